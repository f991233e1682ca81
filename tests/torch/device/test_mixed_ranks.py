"""Ranks whose tensors are on the CPU and ranks whose tensors are on a device, in one group.

Stand-ins: the device is simulated by threads (fake_device.cpp), where codecs run as their
references in plain torch, and Triton's kernels run in its interpreter, on tensors of the CPU. Real:
the group, its channels, the hooks, and the codecs in C++ of the other ranks. Every result must have
the bits of a group whose ranks are all on the CPU, compressed in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import backend
from pycomm.codecs import implementations
from pycomm.errors import WireMismatch
from tests.torch.device import fake_device
from tests.torch.device.checks import check_ddp, every_value, operations
from tests.torch.harness import equal, inputs, perceptron
from tests.torch.hooks.given_gradients import SHAPES, Net
from tests.torch.pool import Pool, on_ranks

CPU, FAKE, TRITON = "cpu", "fakegpu", "triton"
STEPS = 2
LIMIT = 200  # seconds: Triton's interpreter is slow, and others may use the processors
CODECS = ["int8", "int4", "eden:bits=2,size=128", "sign", "topk:0.05"]


@contextmanager
def coded_by_triton() -> Iterator[None]:
    """Let this process code tensors of the CPU by Triton's kernels, in its interpreter."""
    before = implementations.ORDER["cpu"]
    implementations.ORDER["cpu"] = ("triton",)
    implementations._select.cache_clear()
    try:
        yield
    finally:
        implementations.ORDER["cpu"] = before
        implementations._select.cache_clear()


def on_own_device(
    rank: int,
    ranks: int,
    store: dist.Store,
    kinds: tuple[str, ...],
    path: str,
    check: Callable[..., Any],
    *args: Any,
) -> Any:
    """Call check(rank, ranks, device, *args) in a group where each rank is of its kind."""
    kind = kinds[rank]
    # Also in ranks that do not use it: autograd counts the devices at a process's first backward,
    # and the process may be of another kind in the next test.
    fake_device.load("held")
    dist.init_process_group(
        "cpu:pycomm,fakegpu:pycomm" if kind == FAKE else "pycomm",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LIMIT),
        pg_options=pycomm.Options(device_path=path),
    )
    device = FAKE if kind == FAKE else CPU
    try:
        if kind != TRITON:
            return check(rank, ranks, device, *args)
        with coded_by_triton():
            return check(rank, ranks, device, *args)
    finally:
        dist.destroy_process_group()


def run(fakes: Pool, kinds: tuple[str, ...], check: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a check on ranks of these kinds; with "cpu" alone in a group like any other."""
    path = "auto" if set(kinds) == {CPU} else "mixed"
    every = (kinds, path, check, *args)
    return fakes.run(on_own_device, *every, ranks=len(kinds), backend=None, deadline=LIMIT)


def results(rank: int, ranks: int, device: str) -> list[torch.Tensor]:
    """Return the outputs of all operations, and those of sums that rounding makes differ."""
    seen = [
        out.cpu()
        for operation in operations(rank, ranks).values()
        for out in operation(lambda x: x.to(device))
    ]
    generator = torch.Generator().manual_seed(rank)
    for numel in (1000, (3 << 20) + 5):  # the second is one that devices send in parts
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            x = (torch.randn(numel, generator=generator) * 10.0 ** (rank - 1)).to(device)
            dist.all_reduce(x, op=op)
            seen.append(x.cpu())
    dist.barrier()
    return seen


def compressed(rank: int, ranks: int, device: str, codec: str) -> list[Any]:
    """Return the gradients of two steps with feedback, and the norms of the residuals."""
    model = nn.parallel.DistributedDataParallel(Net().to(device), bucket_cap_mb=0.01)
    state = pycomm.compress(model, codec)
    generator, seen = torch.Generator().manual_seed(10 + rank), []
    for _ in range(STEPS):
        given = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
        model.zero_grad()
        model(given).backward()
        seen += [p.grad.cpu().clone() for p in model.parameters()]
    # Every rank has errors of its own, which the next step would send.
    kept = state.state_dict()[f"rank{rank}"][1]
    return seen + [x.cpu() for name in kept for x in every_value(state.residuals[name]).values()]


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("codec", CODECS)
def test_compressed_gradients_have_the_bits_of_ranks_on_the_cpu(fakes, codec):
    """The mixed group has ranks in C++, by the reference on the device, and by Triton.

    Triton's interpreter takes minutes for eden; tests/codecs/test_contract.py compares its bytes.
    """
    kinds = (CPU, FAKE, CPU if codec.startswith("eden") else TRITON)
    found = run(fakes, kinds, compressed, codec)
    want = run(fakes, (CPU,) * len(kinds), compressed, codec)
    for kind, ours, theirs in zip(kinds, found, want, strict=True):
        assert len(ours) >= STEPS * len(SHAPES)
        assert equal(ours, theirs), f"a rank of the kind {kind}"


def local_steps(rank: int, ranks: int, device: str) -> list[torch.Tensor]:
    model = perceptron().to(device)
    outer = pycomm.LocalSGD(model, every=2, codec="int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, foreach=False)
    for step in range(4):
        optimizer.zero_grad()
        model(inputs(rank, step).to(device)).square().mean().backward()
        optimizer.step()
        outer.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("kinds", [(CPU, FAKE), (FAKE, CPU)])
@pytest.mark.parametrize("check", [results, check_ddp, local_steps])
def test_results_have_the_bits_of_ranks_on_the_cpu(fakes, kinds, check):
    assert equal(run(fakes, kinds, check), run(fakes, (CPU, CPU), check))


def sub_group(rank: int, ranks: int, device: str) -> None:
    """A group made from a mixed one is mixed too, unless its options say something else."""
    alike = dist.new_group(list(range(ranks)))
    assert backend.find(alike).options.device_path == "mixed"
    x = torch.ones(5, device=device)
    dist.all_reduce(x, group=alike)
    assert x.cpu().eq(ranks).all()
    own = dist.new_group(list(range(ranks)), pg_options=pycomm.Options())
    assert backend.find(own).options.device_path == "auto"


def test_groups_made_from_a_mixed_one_are_mixed(fakes):
    run(fakes, (CPU, FAKE), sub_group)


def unprepared(rank: int, ranks: int, device: str) -> str:
    x = torch.full((1000,), float(rank), device=device)
    with pytest.raises(WireMismatch) as caught:
        dist.all_reduce(x, async_op=True).wait()
    assert x.cpu().eq(rank).all()  # nothing was reduced
    return str(caught.value)


def test_without_the_option_every_rank_reads_what_to_do(fakes):
    every = ((CPU, FAKE), "auto", unprepared)
    for text in fakes.run(on_own_device, *every, backend=None):
        assert "all_reduce #1" in text
        assert 'make the group with pycomm.Options(device_path="mixed") on all ranks' in text


@on_ranks(fixture="fakes", backend=None)
def test_a_rank_that_alone_has_the_option_is_refused(rank, ranks, store):
    path = "mixed" if rank == 1 else "auto"
    with pytest.raises(WireMismatch, match=r"device_path=mixed.*start all ranks with the same"):
        dist.init_process_group(
            "pycomm",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=20),
            pg_options=pycomm.Options(device_path=path),
        )
