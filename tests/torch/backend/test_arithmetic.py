"""Thread settings of torch do not affect collectives: any thread computes the same bits."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.arithmetic import KINDS, arithmetic
from tests.torch.pool import on_ranks

TINY = 1 << 20  # the bits of a denormal float32


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_sums(rank, size, kind):
    """One rank waits at once, on its own thread; the other a moment later, on the queue's."""
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    for numel in (10, 1000, 200_000):
        for own_thread in (0, 1, 2):
            x = torch.full((numel,), TINY, dtype=torch.int32).view(torch.float32)
            y = torch.full((numel,), 1 + 3 * rank * 2.0**-24)
            with arithmetic(kind):
                for tensor in (x, y):
                    if rank == own_thread or own_thread == 2:
                        dist.all_reduce(tensor)
                    else:
                        dist.all_reduce(tensor, async_op=True).wait()
            assert set(x.view(torch.int32).tolist()) == {2 * TINY}
            assert set(y.tolist()) == {2.0 + 4 * 2.0**-24}


@on_ranks(2, backend=None)
def test_the_longest_timeout_waits(rank, size, store):
    """timedelta.max means no timeout, for groups and for waits."""
    dist.init_process_group(
        "pycomm", store=store, rank=rank, world_size=size, timeout=timedelta.max
    )
    try:
        x = torch.ones(5)
        work = dist.all_reduce(x, async_op=True)
        assert work.wait(timedelta.max)
        assert torch.equal(x, torch.full((5,), float(size)))
        if rank == 0:
            assert dist.irecv(x, 1).wait(timedelta.max)
        else:
            dist.send(x, 0)
        dist.group.WORLD.monitored_barrier(timedelta.max)
    finally:
        dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_a_group_without_time_is_refused(rank, size, store):
    def use(seconds: int) -> None:
        timeout = timedelta(seconds=seconds)
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, timeout=timeout)
        dist.all_reduce(torch.ones(1))

    for seconds in (-1, 0):
        with pytest.raises(RuntimeError, match=r"the timeout of the group is .* ms; give one"):
            use(seconds)
        if dist.is_initialized():
            dist.destroy_process_group()
