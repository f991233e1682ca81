"""Several threads in one group at once, and ranks that die or leave during an operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.interpreter import Interpreter
from tests.torch.pool import on_ranks


def at_once(*jobs: Any) -> None:
    """Run jobs on threads of their own, and raise the first exception of any of them."""
    raised: list[BaseException] = []

    def run(job):
        try:
            job()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
        assert not thread.is_alive()
    if raised:
        raise raised[0]


@on_ranks(2, timeout=60)
def test_threads_share_a_group_for_equal_collectives(rank, size):
    # The values are equal, whichever threads of the ranks are matched.
    def synchronous():
        for i in range(60):
            x = torch.full((3000,), 1.0)
            dist.all_reduce(x)
            assert x.tolist() == [size] * 3000, i

    def asynchronous():
        for _ in range(6):
            tensors = [torch.full((3000,), 1.0) for _ in range(10)]
            works = [dist.all_reduce(x, async_op=True) for x in tensors]
            sums = [work.get_future().then(lambda done: done.value()[0].sum()) for work in works]
            for work, x, total in zip(works, tensors, sums, strict=True):
                work.wait()
                assert x.tolist() == [size] * 3000
                assert total.wait().item() == 3000.0 * size

    at_once(synchronous, asynchronous, synchronous, asynchronous)
    dist.barrier()


@on_ranks(2, timeout=60)
def test_threads_send_messages_beside_collectives(rank, size):
    peer = 1 - rank

    def ping(tag, numel):
        def job():
            for i in range(25):
                x = torch.full((numel,), float(100 * tag + i))
                y = torch.empty(numel)
                work = dist.isend(x, peer, tag=tag)
                dist.recv(y, peer, tag=tag)
                work.wait()
                assert torch.equal(x, y)

        return job

    def collectives():
        for _ in range(40):
            x = torch.ones(2000)
            dist.all_reduce(x)
            assert x[7].item() == size

    sizes = [3, 3000, 70_000, 400_000]
    at_once(collectives, *(ping(tag, numel) for tag, numel in enumerate(sizes)))
    dist.barrier()


@on_ranks(2, timeout=60)
def test_threads_have_groups_of_their_own(rank, size):
    groups = [dist.new_group(backend="pycomm") for _ in range(4)]

    def user(number, group):
        def job():
            for i in range(30):
                x = torch.full((500 * number + 7,), float(i))
                dist.all_reduce(x, group=group)
                assert x[0].item() == size * i
            dist.destroy_process_group(group)

        return job

    at_once(*(user(number, group) for number, group in enumerate(groups)))
    dist.barrier()


# ------------------------------------------------------------------ during an operation


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("where", ["hook", "thread"])
def test_a_group_is_destroyed_during_backward(rank, size, where):
    group = dist.new_group(backend="pycomm")
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))),
        process_group=group,
        bucket_cap_mb=0.02,
    )
    model(torch.ones(2, 64)).sum().backward()
    killer = None
    if where == "hook" and rank == 0:
        model.module[2].weight.register_hook(lambda _: dist.destroy_process_group(group))
    elif where == "thread" and rank == 0:
        killer = threading.Thread(target=lambda: dist.destroy_process_group(group))

    def train():
        for step in range(2000):
            if killer and step == 3:
                killer.start()
            model(torch.ones(2, 64)).sum().backward()

    with pytest.raises((RuntimeError, ValueError)):
        train()
    if killer:
        killer.join(60)
        assert not killer.is_alive()
    elif rank > 0:
        dist.destroy_process_group(group)
    dist.barrier()


GOES = """
import os, sys, torch, torch.distributed as dist
rank, how, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("pycomm", init_method="file://" + store, rank=rank, world_size=2)
dist.barrier()
works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(5)]
requests = [dist.irecv(torch.zeros(9), 1 - rank), dist.isend(torch.zeros(1 << 20), 1 - rank, tag=3)]
futures = [work.get_future().then(lambda done: done.value()) for work in works]
if rank == 0:
    if how == "sys.exit": sys.exit(3)
    if how == "os._exit": os._exit(3)
    if how == "raise": raise ImportError("on purpose")
    if how == "import":
        open(store + "_broken.py", "w").write("raise ImportError('on purpose')")
        sys.path.insert(0, os.path.dirname(store)); __import__(os.path.basename(store) + "_broken")
try:
    for _ in range(10_000): dist.all_reduce(torch.ones(1 << 16))
except RuntimeError as error:
    print(type(error).__name__, error)
    sys.exit(5)
"""


@pytest.mark.parametrize("how", ["sys.exit", "os._exit", "raise", "import"])
def test_a_rank_that_leaves_with_operations_under_way(tmp_path: Path, how: str) -> None:
    ranks = [
        Interpreter(
            "-c", GOES, str(rank), how, str(tmp_path / "store"), autoload=True, finalized=True
        )
        for rank in range(2)
    ]
    start = time.monotonic()
    said = [rank.communicate(timeout=120) for rank in ranks]
    codes = [rank.returncode for rank in ranks]
    assert codes == [3 if "exit" in how else 1, 5], said
    assert "rank 0" in said[1][0]
    assert time.monotonic() - start < 110


@on_ranks(2)
def test_a_group_that_is_gone_says_so(rank, size):
    """Every thread that uses a destroyed group gets an error at once."""
    group = dist.new_group(backend="pycomm")
    native: Any = group._get_backend(torch.device("cpu"))
    dist.barrier(group=group)
    dist.destroy_process_group(group)
    x = torch.ones(3)

    def use():
        for call in (
            lambda: native.allreduce([x], torch._C._distributed_c10d.AllreduceOptions()),
            lambda: native.send([x], 1 - rank, 0),
            lambda: native.recv([x], 1 - rank, 0),
            lambda: native.allocate_tensor(3, dtype=torch.float32, device=torch.device("cpu")),
            native.describe,
        ):
            with pytest.raises(pycomm.Error, match="the process group is shut down"):
                call()

    use()
    at_once(use, use)


@on_ranks(2)
def test_an_error_of_order_names_threads_as_its_cause(rank, size):
    """As when dcp.async_save runs on the group that trains, or a hook of another thread."""

    def in_thread(call: Callable[[], object]) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    in_thread(lambda: dist.all_reduce(torch.ones(3), group=group))
    one = partial(dist.all_reduce, torch.ones(3), group=group)
    other = partial(dist.broadcast, torch.ones(5), 0, group=group)
    with pytest.raises(pycomm.WireMismatch, match=r"from several threads.* a group of its own"):
        one() if rank == 0 else other()
    dist.barrier()
    group = dist.new_group()  # calls of one thread alone have another cause
    one = partial(dist.all_reduce, torch.ones(3), group=group)
    other = partial(dist.broadcast, torch.ones(5), 0, group=group)
    with pytest.raises(pycomm.WireMismatch) as caught:
        one() if rank == 0 else other()
    assert "threads" not in str(caught.value)
