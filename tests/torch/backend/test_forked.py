"""A forked child of a rank (a data loader's worker) and its parent's process group.

Every operation raises in the child, and reaches neither the group nor the store.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm

CALLS: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "all_reduce": lambda x, rank: dist.all_reduce(x),
    "an asynchronous all_reduce": lambda x, rank: dist.all_reduce(x, async_op=True),
    "all_gather": lambda x, rank: dist.all_gather_into_tensor(torch.empty(2 * x.numel()), x),
    "reduce_scatter": lambda x, rank: dist.reduce_scatter_tensor(torch.empty(x.numel() // 2), x),
    "all_to_all": lambda x, rank: dist.all_to_all_single(torch.empty_like(x), x),
    "broadcast": lambda x, rank: dist.broadcast(x, 0),
    "barrier": lambda x, rank: dist.barrier(),
    "send": lambda x, rank: dist.send(x, 1 - rank),
    "irecv": lambda x, rank: dist.irecv(x, 1 - rank),
}


def in_child(call: Callable[[], Any]) -> str:
    """Return the outcome of a call in a forked child: "" if it raised our error, else a text."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call()
        except pycomm.Error as error:
            code = 0 if "forked child" in str(error) else 2
        except BaseException:
            code = 3
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return ["", "no error", "another of ours", "another"][code] if 0 <= code < 4 else str(code)


def check_children(rank: int, size: int) -> None:
    x = torch.full((1000,), 1000.0)
    under_way = dist.irecv(torch.empty(10), 1 - rank, tag=3)
    done = dist.all_reduce(torch.ones(10), async_op=True)
    done.wait()
    wrong = {what: in_child(lambda call=call: call(x, rank)) for what, call in CALLS.items()}
    wrong["wait for a receive"] = in_child(under_way.wait)
    assert not any(wrong.values()), wrong

    def end_everything() -> None:
        dist.destroy_process_group()
        gc.collect()
        raise pycomm.Error("a forked child that has come to its end")

    assert in_child(end_everything) == ""
    x = torch.full((1000,), float(rank + 1))
    dist.all_reduce(x)
    assert set(x.tolist()) == {3.0}
    dist.send(torch.ones(10), 1 - rank, tag=3)
    under_way.wait()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_cannot_use_the_group_of_its_parent(pool, monkeypatch, transport):
    monkeypatch.setenv("PYCOMM_TRANSPORT", transport)
    pool.stop()  # its ranks have the earlier environment
    try:
        pool.run(check_children)
    finally:
        pool.stop()
