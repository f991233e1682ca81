"""The places where torch asks for a backend's name or class, through torch's public functions.

Found by a search of torch/distributed for ProcessGroupGloo, ProcessGroupNCCL, Backend.GLOO,
Backend.NCCL, get_backend() and name(). Each works on a group of pycomm, or is refused in a
sentence; `PLACES` says which. Other files test more: the flight recorder (test_newer_torch.py),
shrink_group and merge_remote_group (test_groups.py).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend
from tests.torch.pool import on_ranks

CPU = torch.device("cpu")


def sums(group: dist.ProcessGroup | None = None, size: int = 2) -> None:
    """Check that a group works."""
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [float(size)] * 3


# ------------------------------------------------------------------ timeouts


def set_pg_timeout(rank: int, size: int) -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's is that nothing was set
        c10d._set_pg_timeout(timedelta(seconds=1), group)
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(pycomm.Error):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - begin < 15  # of the 20 s that the group was made with
        c10d._get_default_store().set("tried", "")
    else:
        c10d._get_default_store().wait(["tried"])


def default_timeout(rank: int, size: int) -> None:
    assert isinstance(c10d._get_default_timeout(dist.Backend("pycomm")), timedelta)
    sums(dist.new_group(backend="pycomm"))


# ------------------------------------------------------------------ groups


def monitored_barrier(rank: int, size: int) -> None:
    for options in ({}, {"timeout": timedelta(seconds=20)}, {"wait_all_ranks": True}):
        dist.monitored_barrier(**options)
    group = dist.new_group()
    dist.monitored_barrier(group)
    if rank == 0:
        with pytest.raises(pycomm.Timeout, match="Rank 1 failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timedelta(seconds=0.3))
        with pytest.raises(pycomm.Timeout, match="Ranks 1 failed to pass monitoredBarrier"):
            c10d.monitored_barrier(group, timedelta(seconds=0.3), wait_all_ranks=True)
    sums(group)


def monitored_barrier_of_gloo(rank: int, size: int) -> None:
    """torch's own function serves other groups."""
    dist.monitored_barrier(dist.new_group(backend="gloo"))


def dist2_new_group(rank: int, size: int) -> None:
    from torch.distributed import _dist2

    with pytest.MonkeyPatch.context() as patch:
        store = c10d._get_default_store()
        patch.setattr(_dist2, "rendezvous", lambda url: iter([(store, rank, size)]))
        group = _dist2.new_group("pycomm", timedelta(seconds=20), "cpu")
        another = _dist2.new_group("pycomm", timedelta(seconds=20), "cpu", transport="tcp")
    for each in (group, another):
        x = torch.ones(3)
        each.allreduce(x).wait()
        assert x.tolist() == [2.0] * 3
        assert backend.find(each).size() == size  # type: ignore[union-attr]
        each.shutdown()


def new_group(rank: int, size: int) -> None:
    for name in ("pycomm", "cpu:pycomm", None):
        group = dist.new_group(backend=name)
        assert backend.find(group) is not None
        sums(group)


def split_group(rank: int, size: int) -> None:
    """It wants a device of which the default group is; torch says so."""
    with pytest.raises(RuntimeError, match="split"):
        dist.split_group(split_ranks=[[0], [1]])
    sums()


def names(rank: int, size: int) -> None:
    assert dist.get_backend() == "pycomm"
    assert "pycomm" in dist.get_backend_config()
    assert c10d._get_pg_config()["pg_size"] == size


def device_mesh(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))
    sums(mesh.get_group("a"))
    sums(mesh.get_group("b"), 1)
    assert all(backend.find(mesh.get_group(name)) is not None for name in "ab")


def device_mesh_with_another_backend(rank: int, size: int) -> None:
    try:
        override = {"a": ("pycomm", pycomm.Options(transport="tcp")), "b": "gloo"}
        mesh = init_device_mesh(
            "cpu", (size, 1), mesh_dim_names=("a", "b"), backend_override=override
        )
    except TypeError:  # torch has no such option
        return
    assert "tcp" in backend.find(mesh.get_group("a")).describe()  # type: ignore[union-attr]
    assert backend.find(mesh.get_group("b")) is None
    sums(mesh.get_group("a"))


def abort(rank: int, size: int) -> None:
    group = dist.new_group()
    sums(group)
    dist.barrier()
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True) if rank == 0 else None
    c10d._abort_process_group(group)
    if work is not None:
        with pytest.raises(pycomm.Error, match="abort"):
            work.wait()
    sums()


def suspend(rank: int, size: int) -> None:
    native: Any = backend.find()
    for name in ("suspend", "resume"):
        if hasattr(native, name):
            with pytest.raises(RuntimeError, match=name):
                getattr(native, name)()
    sums()


# ------------------------------------------------------------------ operations


def objects(rank: int, size: int) -> None:
    assert c10d._get_object_coll_device() == "cpu"
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank})
    assert everybody == [{"rank": r} for r in range(size)]


def batches(rank: int, size: int) -> None:
    x, y = torch.full((3,), float(rank)), torch.zeros(3)
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert y.tolist() == [1.0 - rank] * 3


def coalescing(rank: int, size: int) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager(device=CPU):
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(tensor.eq(size).all() for tensor in tensors)


def autograd(rank: int, size: int) -> None:
    """Gradients of all_gather and all_to_all, where torch has ways around Gloo and NCCL."""
    from torch.distributed.nn import functional

    x = torch.full((2,), rank + 1.0, requires_grad=True)
    sum(part.sum() for part in functional.all_gather(x)).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [size] * 2
    given = [torch.full((2,), float(rank), requires_grad=True) for _ in range(size)]
    taken = functional.all_to_all([torch.zeros(2) for _ in range(size)], given)
    assert [part[0].item() for part in taken] == [0.0, 1.0]
    (2 * torch.stack(list(taken)).sum()).backward()
    assert all(part.grad is not None and part.grad.tolist() == [2.0] * 2 for part in given)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 7), nn.Linear(7, 1))


def resizing_hook(state, bucket):  # DDP would compare annotations with the types
    """Make the bucket larger for a while, as torch's batched_powerSGD_hook does."""
    buffer = bucket.buffer()
    numel = buffer.numel()
    buffer.resize_(numel + 1000)[numel:].fill_(0)
    buffer.resize_(numel)
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def ddp_hooks(rank: int, size: int) -> None:
    """Hooks of torch, of which one makes its bucket larger."""
    hooks = {
        "fp16": (None, default_hooks.fp16_compress_hook),
        "powerSGD": (powerSGD_hook.PowerSGDState(None, 1, 2), powerSGD_hook.powerSGD_hook),
        "resizing": (None, resizing_hook),
    }
    for state, hook in hooks.values():
        net = DistributedDataParallel(model())
        net.register_comm_hook(state, hook)
        for _ in range(4):
            net(torch.full((2, 9), rank + 1.0)).sum().backward()
        gradients = torch.cat([p.grad.reshape(-1) for p in net.parameters()])  # type: ignore[union-attr]
        everybody = [torch.zeros_like(gradients) for _ in range(size)]
        dist.all_gather(everybody, gradients)
        assert torch.equal(everybody[0], everybody[1])
        assert gradients.isfinite().all()


def memory_of_the_group(rank: int, size: int) -> None:
    """FSDP2 asks the backend for memory."""
    net = fully_shard(model())
    net.set_allocate_memory_from_process_group_for_comm(True)
    net(torch.ones(2, 9)).sum().backward()
    sums()


def symmetric_memory(rank: int, size: int) -> None:
    """torch's is for CUDA, and says so."""
    from torch.distributed import _symmetric_memory as symmetric

    with pytest.raises(Exception, match=r"(?i)cpu|device|backend|allocator"):
        symmetric.rendezvous(symmetric.empty(4, device="cpu"), dist.group.WORLD)
    sums()


PLACES: list[Callable[[int, int], None]] = [
    set_pg_timeout,
    default_timeout,
    monitored_barrier,
    monitored_barrier_of_gloo,
    dist2_new_group,
    new_group,
    split_group,
    names,
    device_mesh,
    device_mesh_with_another_backend,
    abort,
    suspend,
    objects,
    batches,
    coalescing,
    autograd,
    ddp_hooks,
    memory_of_the_group,
    symmetric_memory,
]


def check(rank: int, size: int, place: str) -> None:
    globals()[place](rank, size)


@pytest.mark.parametrize("place", [each.__name__ for each in PLACES])
def test_torch_asks_for_a_backend(pool, place):
    pool.run(check, place)


@on_ranks(2)
def test_one_tensor_twice_gets_its_sum_twice(rank, size):
    """As on Gloo, wherever the tensor gets the same result each time that it is in the list."""
    world: Any = dist.group.WORLD
    for group in (world, dist.new_group(backend="gloo")):
        x, y = torch.full((3,), rank + 1.0), torch.full((2,), rank + 1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the function is deprecated
            dist.all_reduce_coalesced([x, y, x], group=group)
        assert (x.tolist(), y.tolist()) == ([3.0] * 3, [3.0] * 2)
    with dist._coalescing_manager(device=CPU):
        dist.all_reduce(x)
        dist.all_reduce(x)
    assert x.tolist() == [6.0] * 3
    shard, other, whole = torch.full((2,), rank + 1.0), torch.zeros(2), torch.zeros(4)
    world.allgather_into_tensor_coalesced([whole, whole], [shard, shard]).wait()
    assert whole.tolist() == [1.0, 1.0, 2.0, 2.0]
    world.reduce_scatter_tensor_coalesced([shard, shard], [whole, whole]).wait()
    assert shard.tolist() == [2.0 + 2.0 * rank] * 2
    with pytest.raises(pycomm.Error, match="two results would have one place"):
        world.allgather_into_tensor_coalesced([whole, whole], [shard, other])
    with pytest.raises(pycomm.Error, match="two results would have one place"):
        backend.find().allgather_coalesced([[whole[:2], whole[:2]]] * 2, [shard, other])
    sums()
