"""The backend on device tensors: results, order with the device's streams, lifetimes, failures.

Each check runs on two ranks, on their `device`: in test_cuda.py on a GPU, and in the tests below on
one that threads simulate (fake_device.cpp), so that they run anywhere.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import _C, backend, elastic
from pycomm.errors import Error, WireMismatch
from pycomm.feedback import Feedback, Residual, Residuals
from pycomm.feedback.rule import LARGE
from pycomm.reduction import paths, two_shot
from pycomm.reduction.bucket import BucketPiece
from pycomm.reduction.paths import chosen
from pycomm.reduction.two_shot import Batched
from tests.torch.device import fake_device
from tests.torch.device.fake_device import GROUP, on_fakes, run, same_as_cpu
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.harness import bucket_of, inputs, integers, perceptron
from tests.torch.pool import on_ranks


def every_value(residual: Residual) -> dict[str, torch.Tensor]:
    """Return residuals in float32, also of the values for which a device has no memory."""
    return {role: residual.current(role) for role, _ in residual.pairs()}


def operations(rank: int, ranks: int) -> dict[str, tuple[Any, ...]]:
    """Return calls, each with the tensors that it takes, and of which it changes some."""
    reduce, other = dist.all_reduce, 1 - rank
    own = slice(rank * 50, rank * 50 + 50)

    def in_place(whole: torch.Tensor, x: torch.Tensor) -> None:
        whole[own].copy_(x)
        dist.all_gather_into_tensor(whole, whole[own])

    def coalesced(*tensors: torch.Tensor) -> None:
        with dist._coalescing_manager():
            for x in tensors[:3]:
                dist.all_reduce(x)
        with dist._coalescing_manager(device=tensors[0].device):
            for out, x in (tensors[3:5], tensors[5:]):
                dist.all_gather_into_tensor(out, x)

    def peers(sent: torch.Tensor, got: torch.Tensor, message: torch.Tensor) -> None:
        ops = [dist.P2POp(dist.irecv, got, other), dist.P2POp(dist.isend, sent, other)]
        for request in dist.batch_isend_irecv(ops):
            request.wait()
        if rank == 0:
            dist.send(message, 1, tag=5)
        else:
            dist.recv(message, 0, tag=5)

    everybody, zeros = range(ranks), torch.zeros
    return {
        "all_reduce": (reduce, integers(rank, 1000)),
        # In parts, the last of which is small.
        "large": (reduce, integers(rank, (3 << 20) + 5)),
        "large_strided": (lambda x: reduce(x.t()), integers(rank, 2048, 1100)),
        "strided": (lambda x: reduce(x.t()[::2], op=dist.ReduceOp.MAX), integers(rank, 6, 10)),
        "bfloat16_average": (
            partial(reduce, op=dist.ReduceOp.AVG),
            integers(rank, 77, dtype=torch.bfloat16),
        ),
        "premultiplied": (partial(reduce, op=dist._make_nccl_premul_sum(0.5)), integers(rank, 12)),
        "broadcast": (partial(dist.broadcast, src=1), integers(rank, 5, 3)),
        "reduce": (partial(dist.reduce, dst=1), integers(rank, 300)),
        "gather": (
            lambda x, *outs: dist.gather(x, list(outs) or None, dst=0),
            integers(rank, 9),
            *(zeros(9) for _ in everybody if rank == 0),
        ),
        "scatter": (
            lambda out, *given: dist.scatter(out, list(given) or None, src=1),
            zeros(9),
            *(integers(r, 9) for r in everybody if rank == 1),
        ),
        "all_gather": (
            lambda x, *outs: dist.all_gather(list(outs), x),
            integers(rank, rank + 1, 3),
            *(zeros(r + 1, 3) for r in everybody),
        ),
        "all_gather_single": (in_place, zeros(ranks * 50), integers(rank, 50)),
        "reduce_scatter": (
            lambda out, *given: dist.reduce_scatter(out, list(given)),
            zeros(7),
            *(integers(rank + r, 7) for r in everybody),
        ),
        "reduce_scatter_single": (
            dist.reduce_scatter_tensor,
            zeros(4, 2),
            integers(rank, 4 * ranks, 2),
        ),
        "all_to_all": (
            lambda *both: dist.all_to_all(list(both[:ranks]), list(both[ranks:])),
            *(zeros(r + rank) for r in everybody),
            *(integers(rank, r + rank) for r in everybody),
        ),
        "all_to_all_single": (dist.all_to_all_single, zeros(ranks * 3), integers(rank, ranks * 3)),
        "coalesced": (
            coalesced,
            *(integers(rank, n) for n in (3, 0, 100)),
            *(zeros(ranks * 4), integers(rank, 4), zeros(ranks * 6), integers(rank, 6)),
        ),
        "peers": (peers, integers(rank, 40), zeros(40), integers(0, 3) if rank == 0 else zeros(3)),
    }


def check_operations(rank: int, ranks: int, device: str) -> None:
    for name, (call, *given) in operations(rank, ranks).items():
        want, got = [x.clone() for x in given], [x.to(device) for x in given]
        call(*want)
        call(*got)
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
    """`way` is as in fake_device.load()."""
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
    native = backend.find(device=torch.device(device))
    specs = [spec for spec in SPECS if not (exchanged and spec.startswith("lossless"))]
    sizes = [LARGE + 1 if spec == "int8" else 333 + 7 * i for i, spec in enumerate(specs)]
    seen = []
    for op, rows in {"all_reduce": 1, "reduce_scatter": ranks}.items():
        residuals = Residuals(rule, ranks)
        bucket = bucket_of(specs, sizes, residuals, device, rows=rows)
        for step in range(3):
            given = torch.randn(rows, bucket.numel, generator=generator(rank, step))
            if step == 2 and rank == 1:
                given[-1, 7] = float("inf")
            x = given.to(dtype).to(device)
            out = x.view(-1) if op == "all_reduce" else x.new_zeros(bucket.numel)
            tensors = (out,) if op == "all_reduce" else (out, x.view(-1))
            if exchanged:
                flag = torch.zeros(1, device=device)
                how: dict[str, Any] = {"seed": 5, "step": step, "found_inf": flag}
                getattr(two_shot, op)(*tensors, bucket, dist.group.WORLD, **how)
                found_inf = flag.cpu()  # of rows each rank knows its own
                dist.all_reduce(found_inf, dist.ReduceOp.MAX)
                finite = not found_inf.any()
                assert all(isinstance(way, Batched) for way in bucket.exchanges.values())
            else:
                assert paths.chosen(bucket, dist.group.WORLD, op, out).native is native
                path = paths.CORE if device == "cpu" else paths.PEERS
                assert bucket.paths[op, False].path is path
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
    bucket = bucket_of("int8", [1000], Residuals(Feedback(), ranks), device)
    given = torch.randn(1000, generator=generator(rank, 0))
    x, y = integers(rank, 1000).to(device), given.to(device)
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
    trained.weight.data.copy_(integers(5, 21, 300))
    model = (trained if rank == 0 else new).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        for parameter in model.parameters():
            momentum = integers(7, *parameter.shape).to(device)
            optimizer.state[parameter] = {"momentum_buffer": momentum}
    assert elastic.hand_over(model, optimizer, has=rank == 0) == 0
    assert model.weight.cpu().equal(integers(5, 21, 300))
    for parameter in model.parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum.device.type == parameter.device.type == device
        assert momentum.cpu().equal(integers(7, *parameter.shape))


# ----------------------------------------------------------------------------- the simulated device

WAYS = pytest.mark.parametrize("way", ["held", "late", "peers"])


@WAYS
@pytest.mark.parametrize(
    "check", [check_operations, check_lifetimes, check_futures, check_sends_during_a_copy]
)
def test_operations_do_what_they_do_on_the_cpu(fakes, way, check):
    run(fakes, way, check, FAKE)


@WAYS
def test_operations_are_in_the_order_of_streams(fakes, way):
    run(fakes, way, check_order, FAKE, way)


def test_a_new_member_gets_a_model_on_its_device(fakes):
    run(fakes, "held", check_hand_over, FAKE)


def test_a_graph_captures_operations_among_peers(fakes):
    """No event is queried, no memory pinned and no stream left unjoined; see fake_device.cpp."""
    run(fakes, "peers", check_capture, FAKE)


def test_operations_by_way_of_the_host_refuse_to_be_captured(fakes):
    run(fakes, "held", check_no_capture, FAKE)


@on_fakes()
@WAYS
def test_streams_of_a_group_have_high_priority(rank, ranks):
    """Kernels of backward have the default priority, and would keep ours waiting."""
    before = torch.ops.fakegpu.prioritized()
    dist.all_reduce(torch.ones(10, device=FAKE))
    assert torch.ops.fakegpu.prioritized() == before + 2


@on_fakes("held")
@pytest.mark.parametrize(("queues", "waits"), [("1", True), ("8", False)])
def test_no_stream_is_held_where_all_share_a_queue(rank, ranks, queues, waits):
    """A held stream would stop the others: CUDA_DEVICE_MAX_CONNECTIONS=1 is Megatron's rule."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(10, device=FAKE))  # ranks agree on the path
    x = torch.ones(10, device=FAKE)
    if rank == 1:
        store.wait(["called"])
        time.sleep(0.3)
        store.set("calls", "")
        dist.all_reduce(x)
    else:
        work = dist.all_reduce(x, async_op=True)
        store.set("called", "")
        work.wait()  # for the other rank, where streams are not held
        assert store.check(["calls"]) == waits
    torch.accelerator.synchronize()
    assert x.cpu().eq(2).all()


@pytest.mark.parametrize("way", ["held", "late", "kernels", "peers"])
def test_a_compressed_step_refuses_to_be_captured(fakes, way):
    run(fakes, way, check_no_capture_of_a_step, FAKE)


@on_fakes("held")
def test_tensors_must_be_on_one_device(rank, ranks):
    with pytest.raises(Error, match="on one device, got some on fakegpu:0 and on cpu"):
        dist.all_gather_into_tensor(torch.zeros(ranks), torch.zeros(1, device=FAKE))
    with pytest.raises(Error, match="all tensors must be on one device"):
        dist.all_gather(
            [torch.zeros(1, device="fakegpu:0"), torch.zeros(1, device="fakegpu:1")],
            torch.zeros(1, device="fakegpu:0"),
        )
    x = torch.ones(3, device="fakegpu:1")
    dist.all_reduce(x)
    assert x.cpu().eq(ranks).all()


@on_fakes()
@WAYS
def test_a_rank_makes_a_context_on_its_own_device_alone(rank, ranks):
    """Else each rank takes hundreds of MB of the first GPU, where its thread has set none."""
    torch.ops.fakegpu.made_contexts(True)
    device = f"{FAKE}:1"

    def use(group: Any) -> None:
        x = torch.ones(1000, device=device)
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait(timedelta(seconds=10))
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(3)]
        for work in works:
            while not work.is_completed():
                time.sleep(0.001)
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank, group=group)
        received = torch.empty_like(x)
        request = dist.irecv(received, 1 - rank, group=group)
        dist.send(x, 1 - rank, group=group)
        request.get_future()
        request.wait()
        assert received.cpu().equal(x.cpu())
        dist.barrier(group=group)
        dist.all_reduce(x, group=group)
        reader = threading.Thread(target=_C.traces)
        reader.start()
        reader.join()

    group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=20))
    use(group)
    dist.destroy_process_group(group)
    gc.collect()
    assert torch.ops.fakegpu.made_contexts(False) == 1 << 1


@on_fakes("held")
def test_devices_that_differ_are_told_on_every_rank(rank, ranks):
    x = torch.full((1000,), float(rank), device="cpu" if rank == 0 else FAKE)
    with pytest.raises(WireMismatch, match="pass tensors of one kind of device on all ranks"):
        dist.all_reduce(x, async_op=True).wait()
    assert x.cpu().eq(rank).all()  # nothing was reduced


@on_ranks(fixture="fakes", backend=None)
@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="split_group of torch 2.11 knows CUDA only"
)
def test_groups_are_split_where_a_device_is_bound(rank, ranks, store):
    fake_device.load("held")
    device = torch.device(FAKE, 0)
    how = {"store": store, "rank": rank, "world_size": ranks, "timeout": timedelta(seconds=20)}
    dist.init_process_group(GROUP, device_id=device, **how)
    dist.barrier()
    alone = dist.split_group(split_ranks=[[0], [1]])
    x = slow(rank, FAKE, 10)
    dist.all_reduce(x, group=alone)
    dist.all_reduce(x)
    assert x.cpu().eq(3).all()
    assert alone.bound_device_id == device


@WAYS
@pytest.mark.parametrize("check", [check_ddp, check_compressed])
def test_gradients_have_the_same_bits_as_on_the_cpu(fakes, way, check):
    same_as_cpu(fakes, way, check)


@on_fakes("peers", ranks=3)
def test_an_all_to_all_in_place_of_unequal_parts(rank, ranks):
    """Parts take several rounds; where one comes from, another one arrives."""
    sizes = [0, 5 << 20, 1 << 20]  # to a rank itself, to the next one, to the one before
    send, recv = ([sizes[way * (r - rank) % ranks] for r in range(ranks)] for way in (1, -1))
    given = torch.arange(sum(send), dtype=torch.int32) * ranks + rank
    x, want = given.to(FAKE), torch.empty_like(given)
    dist.all_to_all_single(want, given, recv, send)
    dist.all_to_all_single(x, x, recv, send)
    assert torch.equal(x.cpu(), want)


SHIFTED: dict[str, Any] = {
    "all_to_all_single": lambda x, n: (x[:-1], x[1:]),
    "all_to_all": lambda x, n: (x[:-1].split(n), x[1:].split(n)),
    "all_gather_into_tensor": lambda x, n: (x[:-1], x[n // 2 : n // 2 + n]),
    "all_gather": lambda x, n: (x[:-1].split(n), x[n // 2 : n // 2 + n]),
    "reduce_scatter_tensor": lambda x, n: (x[n // 2 : n // 2 + n], x[:-1]),
    "reduce_scatter": lambda x, n: (x[n // 2 : n // 2 + n], x[:-1].split(n)),
}
"""of an operation the output and the input in one tensor of n values for each rank, and one"""


@pytest.mark.parametrize("operation", SHIFTED)
@on_fakes("peers", ranks=3)
def test_what_an_operation_overwrites_is_copied_first(rank, ranks, operation):
    """Kernels take large parts in rounds, and what one writes may be what a later one reads."""
    size = 3 << 20
    x = torch.arange(ranks * size + 1, dtype=torch.int32) * ranks + rank

    def result(x: torch.Tensor, *, apart: bool) -> torch.Tensor:
        out, given = ([*t] if isinstance(t, tuple) else t for t in SHIFTED[operation](x, size))
        if apart:
            out = [t.clone() for t in out] if isinstance(out, list) else out.clone()
        getattr(dist, operation)(out, given)
        return torch.cat(out) if isinstance(out, list) else out.clone()

    want = result(x, apart=True)
    assert torch.equal(result(x.to(FAKE), apart=False).cpu(), want)


@on_fakes("peers")
def test_operations_among_peers_are_in_the_trace(rank, ranks):
    x = slow(rank, FAKE, 200)
    for _ in range(2):
        dist.all_reduce(x)
    dist.broadcast(x, 0)
    x.cpu()
    assert f"; on {x.device} 2 ranks: " in backend.find().describe()
    # Only the newest groups count: failed ones may live as long as their errors.
    *_, trace = (t for t in _C.traces() if t["group"].endswith(f"/peers on {x.device}"))
    assert trace["global_ranks"] == list(range(ranks))
    records = trace["records"]
    assert [(r["seq"], r["op"]) for r in records] == [
        (1, "all_reduce"),
        (2, "all_reduce"),
        (3, "broadcast"),
    ]
    assert {(r["state"], r["algo"], r["dtype"]) for r in records} == {
        ("completed", "peers", "float32")
    }


@on_fakes("peers")
def test_who_waits_for_a_flag_lets_other_threads_run(rank, ranks):
    x = torch.ones(64, device=FAKE)
    bucket = bucket_of("int8", [64], Residuals(Feedback(), ranks), FAKE)
    native = chosen(bucket, dist.group.WORLD, "all_reduce", x).native
    work = native.compressed_all_reduce(x, bucket.native, bucket.sides, seed=1, step=1)
    turns, waits = [0], True

    def run_beside() -> None:
        while waits:
            turns[0] += 1
            time.sleep(0.001)

    other = threading.Thread(target=run_beside)
    other.start()
    before = turns[0]
    torch.ops.fakegpu.busy(1000)
    assert work.finite
    during, waits = turns[0] - before, False
    other.join()
    assert during > 20


class Alarm(Exception):
    """Of a signal."""


@on_fakes("peers")
def test_a_signal_during_the_last_wait_is_not_lost(rank, ranks):
    def ring(*_: Any) -> None:
        raise Alarm

    group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=20))
    x = torch.ones(64, device=FAKE)
    dist.all_reduce(x, group=group)
    before = signal.signal(signal.SIGALRM, ring)
    torch.ops.fakegpu.delay_events(1000)
    try:
        dist.all_reduce(x, group=group)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Alarm):
            dist.destroy_process_group(group)  # waits for the operation's event
    finally:
        torch.ops.fakegpu.delay_events(0)
        signal.signal(signal.SIGALRM, before)


@on_fakes("peers")
def test_who_reads_the_trace_ends_no_capture(rank, ranks):
    """The straggler monitor's thread does, and events may not be asked meanwhile."""
    x = slow(rank, FAKE, 0)
    dist.all_reduce(x)
    x.cpu()
    with capture(FAKE), ThreadPoolExecutor(1) as reader:
        traces = reader.submit(_C.traces).result()
        *_, trace = (t for t in traces if t["group"].endswith(f"/peers on {x.device}"))
        assert [r["state"] for r in trace["records"]] == ["completed"]
        dist.all_reduce(x)


@on_fakes("peers")
def test_each_device_of_a_rank_has_a_route_of_its_own(rank, ranks):
    for device in ("fakegpu:0", "fakegpu:1", "fakegpu:0"):
        x = torch.full((1000,), rank + 1.0, device=device)
        dist.all_reduce(x)
        assert x.cpu().eq(3).all()
        assert f"; on {device} 2 ranks: " in backend.find().describe()


@on_fakes("held")
def test_compressed_collectives_need_peers(rank, ranks):
    native, x = backend.find(), torch.ones(64, device=FAKE)
    on_cpu = bucket_of("int8", [64], Residuals(Feedback(), ranks))
    with pytest.raises(Error, match="its residuals are elsewhere"):
        native.compressed_all_reduce(x, on_cpu.native, on_cpu.sides, seed=1, step=1)
    bucket = bucket_of("int8", [64], device=FAKE)
    assert chosen(bucket, dist.group.WORLD, "all_reduce", x).native is None
    with pytest.raises(Error, match="needs ranks that reach each other's memory"):
        native.compressed_all_reduce(x, bucket.native, bucket.sides, seed=1, step=1)
