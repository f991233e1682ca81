"""Checks for all devices, run by test_fake_device.py and test_cuda.py.

Each function runs on two ranks, on their `device`, such as "fakegpu" or "cuda".
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import backend, elastic
from pycomm.feedback import Feedback, Residual, Residuals
from pycomm.feedback.rule import LARGE
from pycomm.policy import Decision, Parameter
from pycomm.reduction import paths, two_shot
from pycomm.reduction.batched import Batched
from pycomm.reduction.bucket import Bucket, BucketPiece
from pycomm.reduction.paths import chosen
from tests.torch.harness import inputs, perceptron


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers that differ by rank."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 7 + rank * 5) % 11).to(dtype).reshape(shape)


def every_value(residual: Residual) -> dict[str, torch.Tensor]:
    """Return residuals in float32, also of the values for which a device has no memory."""
    return {role: residual.current(role) for role, _ in residual.pairs()}


def operations(rank: int, ranks: int) -> dict[str, Callable[[Callable], list[torch.Tensor]]]:
    """Return calls that make tensors with a given function and return the collective's outputs."""

    def changed(x, call, *args, **how):
        def operation(new):
            y = new(x)
            call(y, *args, **how)
            return [y]

        return operation

    def large_strided(new):
        x = new(values(rank, 2048, 1100)).t()
        dist.all_reduce(x)
        return [x]

    def strided(new):
        x = new(values(rank, 6, 10)).t()
        dist.all_reduce(x[::2], op=dist.ReduceOp.MAX)
        return [x]

    def gather(new):
        out = [new(torch.zeros(9)) for _ in range(ranks)] if rank == 0 else None
        dist.gather(new(values(rank, 9)), out, dst=0)
        return out or []

    def scatter(new):
        out = new(torch.zeros(9))
        dist.scatter(out, [new(values(r, 9)) for r in range(ranks)] if rank == 1 else None, src=1)
        return [out]

    def all_gather(new):
        out = [new(torch.zeros(r + 1, 3)) for r in range(ranks)]
        dist.all_gather(out, new(values(rank, rank + 1, 3)))
        return out

    def all_gather_single(new):
        whole = new(torch.zeros(ranks * 50))
        whole[rank * 50 : rank * 50 + 50].copy_(new(values(rank, 50)))
        dist.all_gather_into_tensor(whole, whole[rank * 50 : rank * 50 + 50])
        return [whole]

    def reduce_scatter(new):
        out = new(torch.zeros(7))
        dist.reduce_scatter(out, [new(values(rank + r, 7)) for r in range(ranks)])
        return [out]

    def reduce_scatter_single(new):
        out = new(torch.zeros(4, 2))
        dist.reduce_scatter_tensor(out, new(values(rank, 4 * ranks, 2)))
        return [out]

    def all_to_all(new):
        out = [new(torch.zeros(r + rank)) for r in range(ranks)]
        dist.all_to_all(out, [new(values(rank, r + rank)) for r in range(ranks)])
        return out

    def all_to_all_single(new):
        out = new(torch.zeros(ranks * 3))
        dist.all_to_all_single(out, new(values(rank, ranks * 3)))
        return [out]

    def coalesced(new):
        xs = [new(values(rank, n)) for n in (3, 0, 100)]
        with dist._coalescing_manager():
            for x in xs:
                dist.all_reduce(x)
        out = [new(torch.zeros(ranks * 4)), new(torch.zeros(ranks * 6))]
        with dist._coalescing_manager(device=out[0].device):
            for o, n in zip(out, (4, 6), strict=True):
                dist.all_gather_into_tensor(o, new(values(rank, n)))
        return [*xs, *out]

    def peers(new):
        other = 1 - rank
        out = [new(torch.zeros(40)), new(torch.zeros(3))]
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, out[0], other),
                dist.P2POp(dist.isend, new(values(rank, 40)), other),
            ]
        )
        for request in requests:
            request.wait()
        if rank == 0:
            dist.send(new(values(0, 3)), 1, tag=5)
        else:
            dist.recv(out[1], 0, tag=5)
        return out

    reduce, half = dist.all_reduce, dist._make_nccl_premul_sum(0.5)
    bfloat16 = values(rank, 77, dtype=torch.bfloat16)
    others = (
        *(large_strided, strided, gather, scatter, all_gather, all_gather_single, reduce_scatter),
        *(reduce_scatter_single, all_to_all, all_to_all_single, coalesced, peers),
    )
    return {
        "all_reduce": changed(values(rank, 1000), reduce),
        # In parts, the last of which is small.
        "large": changed(values(rank, (3 << 20) + 5), reduce),
        "bfloat16_average": changed(bfloat16, reduce, op=dist.ReduceOp.AVG),
        "premultiplied": changed(values(rank, 12), reduce, op=half),
        "broadcast": changed(values(rank, 5, 3), dist.broadcast, 1),
        "reduce": changed(values(rank, 300), dist.reduce, 1),
        **{f.__name__: f for f in others},
    }


def check_operations(rank: int, ranks: int, device: str) -> None:
    for name, operation in operations(rank, ranks).items():
        want = operation(torch.clone)
        got = operation(lambda x: x.to(device))
        for g, w in zip(got, want, strict=True):
            assert g.device.type == device
            assert torch.equal(g.cpu(), w), f"{name} has {g.cpu()} and not {w}"


def slow(rank: int, device: str, milliseconds: int = 100) -> torch.Tensor:
    """Return a tensor whose values, rank + 1, are only written after the stream's delay."""
    x = torch.zeros(1000, device=device)
    if device == "cuda":
        torch.cuda._sleep(milliseconds * 2_000_000)  # cycles, of which a GPU has 2e9 in a second
    else:
        torch.ops.fakegpu.busy(milliseconds)
    return x.fill_(rank + 1.0)


def check_order(rank: int, ranks: int, device: str, way: str) -> None:
    """Check the order with streams; `way` is as in fake_device.load()."""
    held = way == "held"
    dist.all_reduce(slow(rank, device, 0))  # excludes the cost of the first call
    started = time.monotonic()
    x = slow(rank, device, 1000)
    work = dist.all_reduce(x, async_op=True)
    assert way == "peers" or not work.is_completed()
    if held:
        work.wait()  # the stream waits, not this thread
    copy = torch.empty_like(x)
    if held:
        copy.copy_(x)
        x.fill_(-1.0)
        assert time.monotonic() - started < 0.9
    else:
        work.wait()
        copy.copy_(x)
    assert torch.equal(copy.cpu(), torch.full((1000,), 3.0))
    assert work.is_completed()
    assert work.is_success()

    # With a timeout, wait() blocks the host.
    x = slow(rank, device, 30)
    assert dist.all_reduce(x, async_op=True).wait(timedelta(seconds=10))

    # The caller may use other streams.
    side = torch.Stream(device=device)
    with side:
        x = slow(rank, device, 50)
        dist.all_reduce(x)
        copy.copy_(x)
    side.synchronize()
    assert copy.cpu().eq(3).all()

    # Three operations in a row on one tensor, without a wait in between.
    x = slow(rank, device, 50)
    dist.all_reduce(x, async_op=True)
    dist.broadcast(x, 0, async_op=True)
    dist.all_reduce(x, async_op=True).wait()
    assert x.cpu().eq(6).all()

    # Device and host tensors are processed in one order, and the barrier comes last.
    works, tensors = [], []
    for i in range(6):
        tensors.append(slow(rank, device, 10) if i % 2 else torch.full((10,), rank + 1.0))
        works.append(dist.all_reduce(tensors[-1], async_op=True))
    dist.barrier()
    for work, x in zip(works, tensors, strict=True):
        work.wait()
        assert x.cpu().eq(3).all()


def check_sends_during_a_copy(rank: int, ranks: int, device: str) -> None:
    """A copy to memory that is not pinned waits for an operation that waits for later sends."""
    other, count = 1 - rank, 6
    x, boxes = slow(rank, device, 0), [torch.zeros(1000, device=device) for _ in range(count)]
    dist.all_reduce(x)
    for round_ in range(5):
        x.fill_(1.0)
        if rank == 0:
            for _ in range(count):
                dist.isend(slow(round_, device, 3), other)
        else:
            for request in [dist.irecv(box, other) for box in boxes]:
                request.wait()
            assert all(box.cpu().eq(round_ + 1).all() for box in boxes)
        dist.all_reduce(x, async_op=True).wait()
        assert x.cpu().eq(2).all()


def check_lifetimes(rank: int, ranks: int, device: str) -> None:
    # The input has no other references, and its memory is poisoned when it is unused.
    outs = []
    for i in range(10):
        out = torch.empty(ranks * 1000, device=device)
        dist.all_gather_into_tensor(
            out, slow(rank, device, 3) if i % 2 else slow(rank, device, 0), async_op=True
        )
        gc.collect()
        outs.append(out)
    # The output has no other references, either.
    for _ in range(10):
        dist.all_reduce(slow(rank, device, 1), async_op=True)
    dist.barrier()
    torch.accelerator.synchronize()
    want = torch.cat([torch.full((1000,), r + 1.0) for r in range(ranks)])
    for out in outs:
        assert torch.equal(out.cpu(), want)


def check_futures(rank: int, ranks: int, device: str) -> None:
    copy = torch.empty(1000, device=device)

    def then(future: torch.futures.Future) -> torch.Tensor:
        (result,) = future.value()
        copy.copy_(result)  # on a stream that waits for the operation
        result.fill_(-1.0)
        return copy

    future = dist.all_reduce(slow(rank, device), async_op=True).get_future().then(then)
    assert future.wait() is copy
    assert copy.cpu().eq(3).all()

    def chain(future: torch.futures.Future) -> torch.Tensor:
        (result,) = future.value()
        dist.all_reduce(result)
        return result

    future = dist.all_reduce(slow(rank, device), async_op=True).get_future().then(chain)
    assert future.wait().cpu().eq(6).all()

    with dist._coalescing_manager(async_ops=True, device=torch.device(device)) as all_of_them:
        xs = [slow(rank, device, 20), slow(rank, device, 0)]
        for x in xs:
            dist.all_reduce(x)
    all_of_them.wait()
    assert all(x.cpu().eq(3).all() for x in xs)


def check_ddp(rank: int, ranks: int, device: str) -> list[torch.Tensor]:
    model = perceptron().to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.25, foreach=False)
    for step in range(3):
        optimizer.zero_grad()
        ddp(inputs(rank, step).to(device)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def check_compressed(rank: int, ranks: int, device: str) -> list[torch.Tensor]:
    model = nn.Linear(64, 64).to(device)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    ddp = nn.parallel.DistributedDataParallel(model)
    pycomm.compress(ddp, "int8")
    # Gradients that both devices compute exactly: sums of a few small integers.
    for step in range(3):
        x = (inputs(rank, step, 64).repeat(1, 4) * 4).round().to(device)
        ddp.zero_grad()
        ddp(x).sum().backward()
    return [p.grad.cpu() for p in model.parameters()]


SPECS = [
    *("int8", "int7", "int6:rounding=stochastic", "int5", "int4", "int3", "int2"),
    *("sign", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"),
    *("mxfp8", "mxfp6", "mxfp4", "nvfp4", "eden2", "topk:0.05", "lossless:bfloat16"),
]


def check_bits(
    rank: int, ranks: int, device: str, rule: Feedback, dtype: torch.dtype, *, exchanged: bool
) -> Any:
    """Return results and residuals of three steps of each operation, at odd sizes and offsets.

    Args:
        exchanged: the payloads go by the group's collectives; else the backend runs the operation.
    """
    native, there = backend.find(device=torch.device(device)), torch.device(device)
    specs = [spec for spec in SPECS if not (exchanged and spec.startswith("lossless"))]
    sizes = [LARGE + 1 if spec == "int8" else 333 + 7 * i for i, spec in enumerate(specs)]
    seen = []
    for op, rows in {"all_reduce": 1, "reduce_scatter": ranks}.items():
        decisions = [
            Decision(Parameter(f"p{i}", (n,), torch.float32), pycomm.codec(spec), "test")
            for i, (spec, n) in enumerate(zip(specs, sizes, strict=True))
        ]
        residuals = Residuals(rule, ranks)
        bucket = Bucket(decisions, range(len(specs)), residuals, there, rows=rows)
        for step in range(3):
            given = torch.randn(rows, bucket.numel, generator=generator(rank, step))
            if step == 2 and rank == 1:
                given[-1, 7] = float("inf")
            x = given.to(dtype).to(device)
            out = x.view(-1) if op == "all_reduce" else x.new_zeros(bucket.numel)
            tensors = (out,) if op == "all_reduce" else (out, x.view(-1))
            if exchanged:
                call = getattr(two_shot, op)
                finite = bool(call(*tensors, bucket, dist.group.WORLD, seed=5, step=step))
                assert all(isinstance(way, Batched) for way in bucket.exchanges.values())
            else:
                assert paths.chosen(bucket, dist.group.WORLD, op, out).native is native
                path = paths.CORE if device == "cpu" else paths.PEERS
                assert bucket.agreed.paths[op, False].path is path
                call = getattr(native, f"compressed_{op}")
                work = call(*tensors, bucket.native, bucket.sides, seed=5, step=step)
                work.wait()
                finite = work.finite
            assert finite == (step < 2)
            if finite:
                residuals.commit(bucket.with_residual)
            seen.append(out.cpu().nan_to_num(0.25))
        seen += [p.residual.current(role).cpu() for p in bucket.pieces for role, _ in kept(p)]
    return seen


def check_capture(rank: int, ranks: int, device: str) -> None:
    """A replayed graph of an exact and a compressed all-reduce repeats the calls once."""
    native = backend.find(device=torch.device(device))
    decision = Decision(Parameter("p", (1000,), torch.float32), pycomm.codec("int8"), "test")
    bucket = Bucket([decision], [0], Residuals(Feedback(), ranks), torch.device(device))
    given = torch.randn(1000, generator=generator(rank, 0))
    x, y = values(rank, 1000).to(device), given.to(device)
    want_x, want_y = x.clone(), y.clone()

    def calls(x: torch.Tensor, y: torch.Tensor) -> None:
        dist.all_reduce(x, async_op=True).wait()
        native.compressed_all_reduce(y, bucket.native, bucket.sides, seed=5, step=0).wait()

    assert chosen(bucket, dist.group.WORLD, "all_reduce", y).native is native
    calls(want_x, want_y)
    with capture(device):
        calls(x, y)
    assert torch.equal(x.cpu(), want_x.cpu())
    assert torch.equal(y.cpu(), want_y.cpu())
    calls(want_x, want_y)  # the group is still usable
    assert want_x.cpu().sum() == ranks * x.cpu().sum()


@contextlib.contextmanager
def capture(device: str) -> Iterator[None]:
    """Capture the calls made inside, and replay them once."""
    if device != "cuda":
        torch.ops.fakegpu.begin_capture()
        try:
            yield
        finally:
            torch.ops.fakegpu.end_capture()
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield
    graph.replay()


def check_no_capture_of_a_step(rank: int, ranks: int, device: str) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).to(device))
    state = pycomm.compress(ddp, "int4")
    for _ in range(2):
        ddp(torch.ones(2, 256, device=device)).sum().backward()
    state.settle()
    norms = state.residual_norms()
    with capture(device), pytest.raises(pycomm.Error, match="cannot be part of a CUDA graph"):
        state.begin_step()
    assert state.residual_norms() == norms
    ddp(torch.ones(2, 256, device=device)).sum().backward()
    state.settle()
    assert state.overflows == 0


def check_no_capture(rank: int, ranks: int, device: str) -> None:
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    with capture(device), pytest.raises(pycomm.Error, match="through host memory, so no graph can"):
        dist.all_reduce(x, async_op=True)
    dist.all_reduce(x)
    assert x.cpu().eq(ranks**2).all()


def kept(piece: BucketPiece) -> list[tuple[str, Any]]:
    return list(piece.residual.pairs()) if piece.residual else []


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * rank + step)


def check_hand_over(rank: int, ranks: int, device: str) -> None:
    """A new member gets model and optimizer on its device, by way of the host."""
    trained, new = nn.Linear(300, 21), nn.Linear(300, 21)
    trained.weight.data.copy_(values(5, 21, 300))
    model = (trained if rank == 0 else new).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        for parameter in model.parameters():
            momentum = values(7, *parameter.shape).to(device)
            optimizer.state[parameter] = {"momentum_buffer": momentum}
    assert elastic.hand_over(model, optimizer, has=rank == 0, chunk_bytes=4096) == 0
    assert model.weight.cpu().equal(values(5, 21, 300))
    for parameter in model.parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum.device.type == parameter.device.type == device
        assert momentum.cpu().equal(values(7, *parameter.shape))
