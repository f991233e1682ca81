"""Groups of pycomm's objects are made and closed on several threads."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pycomm.reduction import own_group
from tests.torch.pool import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_group_is_made_while_another_closes(rank, ranks, when):
    """torch names a group by a count of groups, which then differs between ranks."""
    former = own_group.make(dist.group.WORLD)
    destroy, gather = dist.destroy_process_group, own_group.gather
    destroyed, counted = threading.Event(), threading.Event()
    thread = threading.Thread(target=own_group.close, args=(former,))

    def slow(group: dist.ProcessGroup) -> None:
        destroy(group)
        destroyed.set()
        counted.wait(0.5)

    def gathered(*args: Any) -> Any:
        counts = gather(*args)
        if when == "while":
            thread.start()
        counted.set()
        thread.join()
        return counts

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(own_group, "gather", gathered)
            if when == "before":
                patch.setattr(dist, "destroy_process_group", slow)
                thread.start()
                assert destroyed.wait(10)
        made = own_group.make(dist.group.WORLD)
    if rank == 1:
        own_group.close(former)
    assert former not in dist.distributed_c10d._world.pg_map
    for group in (made, own_group.make(dist.group.WORLD)):
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [2.0, 2.0, 2.0]
        own_group.close(group)


def test_torch_asks_for_the_names_of_groups():
    """It would name them otherwise, by counts."""
    assert distributed_c10d._process_group_name.__module__ == distributed_c10d.__name__
    assert hasattr(distributed_c10d._process_group_name, "__wrapped__")


@on_ranks(4)
def test_parts_that_have_made_other_groups_make_one(rank, ranks):
    """A rank that is in no part counts no group, and torch from 2.14 on tells no rank of that."""
    made = []
    for members in ([0, 1, 2], [2, 3]):
        ours = members if rank in members else []
        made.append(own_group.make_part(dist.group.WORLD, ours))
    if rank < 2:
        half = dist.new_group([0, 1], use_local_synchronization=True)
        made.append(own_group.make(half))
    made.append(own_group.make(dist.group.WORLD))
    for group in filter(None, made):
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [float(group.size())] * 3
