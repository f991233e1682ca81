"""Pitfalls of torch.distributed for third-party backends, one test each.

Where a pitfall needs a GPU or concerns another project, a comment takes the place of its test.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend
from tests.torch.pool import on_ranks

CPU = torch.device("cpu")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def integers(rank: int, *shape: int) -> torch.Tensor:
    return ((torch.arange(torch.Size(shape).numel()) + rank) % 5).float().reshape(shape)


def test_t1_devices_are_registered_by_their_names():
    """A string would be read letter by letter."""
    assert dist.Backend.backend_capability["pycomm"] == ["cpu", "cuda"]
    for letter in "cpuda":
        assert letter not in dist.Backend.default_device_backend_map


@on_ranks(2)
def test_t2_one_backend_serves_both_devices(rank, size):
    """Torch has one slot for all backends that it does not know."""
    group = dist.group.WORLD
    assert group._get_backend(CPU) is group._get_backend(torch.device("cuda"))


@on_ranks(2, backend=None)
def test_t3_bare_and_qualified_names_work(rank, size, store):
    for name, device in (("pycomm", CPU), ("cpu:pycomm", CPU)):
        dist.init_process_group(name, store=store, rank=rank, world_size=size)
        group = dist.group.WORLD
        assert backend.find() is not None
        assert group._get_backend(device).name() == "pycomm"
        # Qualified by the device, torch before 2.15 leaves the group's own name undefined.
        assert group.name() in (("custom",) if name == "pycomm" else ("custom", "undefined"))
        x = torch.ones(3)
        dist.all_reduce(x)
        assert torch.equal(x, torch.full((3,), float(size)))
        dist.destroy_process_group()


@on_ranks(4)
def test_t5_device_meshes_work_on_the_cpu(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mesh.get_group("a"))
    assert x.item() == (rank % 2) * 2 + 2
    if TORCH < (2, 15):  # these need an accelerator for it, so DeviceMesh makes new groups
        with pytest.raises(RuntimeError, match="No device associated"):
            dist.split_group(split_ranks=[[0, 1], [2, 3]])
        return
    half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=half)
    assert x.item() == (rank // 2) * 4 + 1


@on_ranks(2)
def test_t6_fsdp2_averages_and_scales(rank, size):
    """Gradients are averaged (AVG), or divided by a factor while being reduced (PREMUL_SUM)."""
    for factor in (None, 4.0):
        for dtype in (torch.float32, torch.bfloat16):
            model = nn.Linear(4, 4, bias=False)
            nn.init.ones_(model.weight)
            fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            if factor is not None:
                model.set_gradient_divide_factor(factor)
            model(torch.full((1, 4), float(rank + 1))).sum().backward()
            want = sum(r + 1 for r in range(size)) / (factor or size)
            got = model.weight.grad.to_local()
            assert torch.equal(got, torch.full_like(got, want))


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3])
def test_t7_dtensor_from_one_shard_to_another(rank, size):
    """Torch gathers and cuts here for every CPU group, whatever the backend supports."""
    mesh = init_device_mesh("cpu", (size,))
    whole = integers(0, 6, 10)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)])
    assert torch.equal(y.to_local(), whole.chunk(size, 1)[rank])
    assert torch.equal(y.redistribute(mesh, [Replicate()]).to_local(), whole)


# T8: Accelerate on the CPU insists on "gloo", and the Trainer's command line has a list of names.
# PYCOMM_TAKEOVER answers for these names: test_takeover.py.
#
# T9: Lightning takes the name as free text, and Accelerate's `comm_hook` is an enum: both are their
# own interfaces. The promise on our side, register_comm_hook on the model, is in
# test_ddp_compress.py.


def test_t11_the_backend_is_not_a_python_class():
    """Torch 2.13 cannot use one."""
    from pycomm._build import load_c10d

    assert load_c10d().Backend.__mro__[1] is torch._C._distributed_c10d.Backend


@on_ranks(2, backend=None)
def test_t12_detailed_debugging_allows_compression(rank, size, store):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
        wrapper: Any = dist.group.WORLD._get_backend(CPU)
        assert type(wrapper).__name__ == "_ProcessGroupWrapper"
        assert backend.find() is wrapper.wrapped_pg
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 64))
        pycomm.compress(model, "int8")
        model(torch.ones(1, 64)).sum().backward()
        x, y = integers(rank, 7), torch.zeros(7)
        dist.all_reduce(x)
        assert torch.equal(x, sum(integers(r, 7) for r in range(size)))
        ops = [
            dist.P2POp(dist.irecv, y, 1 - rank),
            dist.P2POp(dist.isend, integers(rank, 7), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(y, integers(1 - rank, 7))
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
        dist.destroy_process_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def shared(t: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory that is mapped as shared."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, flags = line.split()[:2]
            begin, end = (int(a, 16) for a in addresses.split("-"))
            if begin <= t.data_ptr() < end:
                return flags.endswith("s")
    return False


@on_ranks(2)
def test_t13_fsdp2_takes_its_buffers_from_us(rank, size):
    """This excludes set_custom_all_gather, by torch's own rule."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    buffers = []
    original = collectives.ProcessGroupAllocMixin.allocate

    def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
        buffers.append(original(*args, **kwargs))
        return buffers[-1]

    results = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
        collectives.ProcessGroupAllocMixin.allocate = allocate
        try:
            for layer in (model[0], model[2]):
                layer.set_allocate_memory_from_process_group_for_comm(ours)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(integers(rank + step, 4, 64)).square().sum().backward()
                optimizer.step()
        finally:
            collectives.ProcessGroupAllocMixin.allocate = original
        results.append([p.to_local().clone() for p in model.parameters()])
        if ours:
            assert len(buffers) >= 3 * 4  # two layers, forward and backward
            assert all(shared(b) for b in buffers)
            count = len(buffers)
    assert len(buffers) == count
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


@on_ranks(2)
def test_t13_tensors_in_shared_memory(rank, size):
    native = backend.find()
    assert native.supports_tensor_alloc(CPU)
    assert not native.supports_tensor_alloc(torch.device("cuda:0"))
    x = native.allocate_tensor(1000, dtype=torch.bfloat16, device=CPU)
    assert (x.shape, x.dtype) == ((1000,), torch.bfloat16)
    assert shared(x)
    assert native.allocate_tensor(0, dtype=torch.float32, device=CPU).numel() == 0
    x.fill_(rank + 1)
    dist.all_reduce(x)
    dist.group.WORLD.shutdown()
    assert x[999] == 3  # the memory outlives the group


@on_ranks(2)
def test_t13_ddp_takes_its_buckets_from_us(rank, size):
    """The all-reduce of a bucket then copies nothing."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(512, 512), gradient_as_bucket_view=True)
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        model.zero_grad()
        model(integers(rank, 4, 512)).sum().backward()
        assert all(shared(p.grad) for p in model.parameters())
