"""After a failure the result of an operation on device tensors is NaN, or an error: no old bytes.

Where only streams wait for an operation, its caller goes on, and reads whatever the operation has
left. The faults here are those that tests/faults injects into operations of host tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.errors import Error, PeerLost, Timeout
from pycomm.feedback import Feedback, Residuals
from pycomm.policy.exchange import gather
from pycomm.reduction import payloads, two_shot
from pycomm.reduction.nodes import Nodes
from pycomm.reduction.paths import chosen
from tests.ranks import without_threads
from tests.torch.device import fake_device
from tests.torch.device.fake_device import GROUP
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.harness import bucket_of, compressed_on

LATE = 1200  # milliseconds that a stream is busy, longer than the limit of an operation
LIMIT = 0.4

# ------------------------------------------------------------------ the operations


def ours(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return what a rank brings, which no result may be; written when the stream is there."""
    return torch.empty(count, device=FAKE, dtype=dtype).fill_(3)


def operation(
    call: Callable[..., Any], result: Callable[[], torch.Tensor], *inputs: int
) -> Callable[[Any], tuple[dist.Work, torch.Tensor]]:
    """Return what begins an operation of a group, with inputs of these sizes."""

    def begin(group: Any) -> tuple[dist.Work, torch.Tensor]:
        x = result()
        return call(x, *map(ours, inputs), group=group, async_op=True), x

    return begin


OPERATIONS = {
    "all_reduce": operation(dist.all_reduce, lambda: ours(1000)),
    # In parts, each with a hold of its own.
    "all_reduce_of_many": operation(dist.all_reduce, lambda: ours((3 << 20) + 5)),
    "all_reduce_of_columns": operation(dist.all_reduce, lambda: ours(1000).view(10, 100).t()),
    "all_reduce_of_bytes": operation(dist.all_reduce, lambda: ours(1000, torch.uint8)),
    "all_reduce_of_bfloat16": operation(dist.all_reduce, lambda: ours(1001, torch.bfloat16)),
    "reduce_scatter": operation(dist.reduce_scatter_tensor, lambda: ours(500), 1000),
    "all_gather": operation(dist.all_gather_into_tensor, lambda: ours(1000), 500),
    "all_to_all": operation(dist.all_to_all_single, lambda: ours(1000), 1000),
    "broadcast_of_0": operation(partial(dist.broadcast, src=0), lambda: ours(1000)),
    "broadcast_of_1": operation(partial(dist.broadcast, src=1), lambda: ours(1000)),
}


def is_spoiled(x: torch.Tensor) -> bool:
    """Return whether no value can be taken for a result."""
    x = x.cpu()
    return bool(x.isnan().all() if x.is_floating_point() else x.eq(torch.full_like(x, 255)).all())


def check_failed(name: str, work: dist.Work, x: torch.Tensor, way: str) -> None:
    """Check what the caller of a failed operation has."""
    if name == f"broadcast_of_{dist.get_rank()}":  # its tensor is no result
        return
    if way == "held":
        with contextlib.suppress(Error):  # it orders streams only, unless the error is known
            work.wait()
    else:
        with pytest.raises(Error):
            work.wait()
    if way != "late":  # there nothing is delivered: wait() has raised before anybody reads
        assert is_spoiled(x), f"{name} has left {x.cpu().flatten()[:5]}"
    with pytest.raises(Error):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()


def check_all_fail(
    made: dict[str, Any], way: str, unless: type[Error] | tuple[()] = ()
) -> list[dist.Work]:
    """Begin the operation of each group, unless that raises, and check what its caller has then."""
    begun = {}
    for name, group in made.items():
        with contextlib.suppress(unless):
            begun[name] = OPERATIONS[name](group)
    for name, (work, x) in begun.items():
        check_failed(name, work, x, way)
    return [work for work, _ in begun.values()]


# ------------------------------------------------------------------ the ranks


on_fakes = partial(fake_device.on_fakes, settles=True)


def groups(limit: float) -> dict[str, Any]:
    """Return a group for each operation, which has made it once."""
    made = {}
    for name, operation in OPERATIONS.items():
        group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=limit))
        work, x = operation(group)
        work.wait()
        assert not is_spoiled(x)
        made[name] = group
    dist.barrier()
    return made


def abort(group: Any) -> None:
    group._get_backend(torch.device(FAKE)).abort()


def each_way(*ways: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", ways)


ENDS = pytest.mark.parametrize(("how", "dies"), [("dies", (1,)), ("aborts", ())])
"""How rank 1 ends."""


# ------------------------------------------------------------------ faults


@on_fakes()
@each_way("held", "late", "peers")
def test_an_operation_that_a_peer_aborts_leaves_no_result(rank, ranks, way):
    made = groups(20)
    if rank == 1:
        for group in made.values():
            time.sleep(0.1)
            dist.distributed_c10d._abort_process_group(group)
        return
    for name, group in made.items():
        try:
            work, x = OPERATIONS[name](group)
        except Error:  # it was aborted before
            continue
        check_failed(name, work, x, way)
    with pytest.raises(Error, match="abort"):
        OPERATIONS["all_reduce"](made["all_reduce"])[0].wait()


@on_fakes(dies={1})
@each_way("held", "peers")
def test_an_operation_whose_peer_dies_leaves_no_result(rank, ranks, way):
    made = groups(1000)
    if rank == 1:
        dist.barrier()
        os._exit(0)
    dist.barrier()
    for work in check_all_fail(made, way, unless=PeerLost):  # where the death was seen before
        with pytest.raises(PeerLost, match="rank 1"):
            work.wait()


@on_fakes()
@each_way("held", "late")
def test_an_operation_whose_stream_is_late_leaves_no_result(rank, ranks, way):
    """Its input is copied to the host after its deadline, where its results lie."""
    made = groups(LIMIT)
    if rank == 1:
        torch.ops.fakegpu.busy(LATE)
    works = check_all_fail(made, way)
    if rank == 1:  # the other one gets this error, or times out at the same moment
        with pytest.raises(Timeout, match="rank 1 did not reach its all_reduce: the work that was"):
            works[0].wait()


@on_fakes("held")
def test_an_operation_whose_stream_is_late_ends_without_threads(rank, ranks):
    group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=LIMIT))
    OPERATIONS["all_reduce"](group)[0].wait()
    if rank == 1:
        torch.ops.fakegpu.busy(LATE)
    with without_threads():
        work, x = OPERATIONS["all_reduce"](group)
        check_failed("all_reduce", work, x, "held")


@on_fakes()
@each_way("held", "late")
def test_an_operation_that_another_thread_aborts_leaves_no_result(rank, ranks, way):
    made = groups(20)

    def abort_all() -> None:
        time.sleep(0.1)
        for group in made.values():
            abort(group)

    torch.ops.fakegpu.busy(LATE // 2)
    thread = threading.Thread(target=abort_all)
    thread.start()
    check_all_fail(made, way)
    thread.join()


@on_fakes("held")
def test_what_was_queued_behind_a_failed_operation_leaves_no_result(rank, ranks):
    """All that was queued behind a failed operation fails, in order, each behind its own copy."""
    group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=LIMIT))
    dist.all_reduce(ours(10), group=group)
    begun = []
    for i in range(4):
        if rank == 1 and i == 1:
            torch.ops.fakegpu.busy(LATE)
        begun.append(OPERATIONS["all_gather" if i % 2 else "all_reduce_of_many"](group))
    for i, (work, x) in enumerate(begun):
        with contextlib.suppress(Error):
            work.wait()
        assert is_spoiled(x) if i > 0 else x.cpu().equal(2 * ours(x.numel()).cpu())
    with pytest.raises(Error):
        dist.all_reduce(ours(10), group=group)


@on_fakes("held")
def test_a_hold_ends_while_another_thread_has_the_gil(rank, ranks):
    group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=LIMIT))
    work, x = OPERATIONS["all_reduce"](group)
    work.wait()
    library = ctypes.PyDLL(str(fake_device.built()))  # whose functions are called with the GIL
    if rank == 0:
        work, x = OPERATIONS["all_reduce"](group)
        work.wait()
        begun = time.monotonic()
        assert library.fake_device_synchronize(5000) == 1, "the stream waits for the GIL"
        assert time.monotonic() - begun < 4
        assert is_spoiled(x)


@on_fakes("held")
def test_an_operation_that_is_queued_in_part_is_rolled_back(rank, ranks):
    group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=20))
    work, _ = OPERATIONS["all_reduce"](group)
    work.wait()
    if rank == 0:
        x = ours((3 << 20) + 5)
        torch.ops.fakegpu.refuse_holds_after(2)
        try:
            with pytest.raises(Error, match="accepts no more work"):
                dist.all_reduce(x, group=group, async_op=True)
        finally:
            torch.ops.fakegpu.refuse_holds_after(-1)
        torch.accelerator.synchronize()  # the streams go on
        parts = x.cpu()
        part = (4 << 20) // 4
        assert is_spoiled(parts[: 2 * part])
        assert parts[2 * part :].eq(3).all()


@on_fakes("held")
def test_a_driver_that_keeps_callers_waiting_stops_no_operation(rank, ranks):
    """The caller waits for a copy behind a hold, which ends all the same."""
    group = dist.new_group(backend=GROUP, timeout=timedelta(seconds=10))
    torch.ops.fakegpu.keep_callers(True)
    try:
        for name in ("all_reduce", "all_reduce_of_many"):
            work, x = OPERATIONS[name](group)
            work.wait()
            assert x.cpu().eq(6).all()
    finally:
        torch.ops.fakegpu.keep_callers(False)


@on_fakes("late")
def test_an_error_of_the_driver_reaches_who_has_the_future(rank, ranks):
    """It comes in the group's thread, after the operation and its copies."""
    torch.ops.fakegpu.busy(LATE // 4)
    work, _ = OPERATIONS["all_reduce"](dist.group.WORLD)
    torch.ops.fakegpu.refuse_events_after(1)  # that of the copies to the device comes first
    try:
        with pytest.raises(RuntimeError, match="the device has failed"):
            work.get_future().wait()
    finally:
        torch.ops.fakegpu.refuse_events_after(-1)


# ------------------------------------------------------------------ what the hooks make of it


@contextlib.contextmanager
def no_second_shot(rank: int, how: str) -> Iterator[None]:
    """Let rank 1 end between the two shots of a compressed operation by way of the host."""
    first = payloads.all_gather

    def end(*args: Any, **more: Any) -> Any:
        torch.accelerator.synchronize()
        if how == "dies":
            time.sleep(0.1)  # the other rank has the first shot
            os._exit(0)
        abort(dist.group.WORLD)
        return first(*args, **more)

    with patch.object(payloads, "all_gather", end if rank == 1 else first):
        yield


@on_fakes()
@each_way("held", "kernels")
@ENDS
def test_a_step_of_ddp_whose_peer_ends_between_the_shots_is_nan(rank, ranks, how):
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(FAKE)
    ddp = nn.parallel.DistributedDataParallel(model)
    state = pycomm.compress(ddp, "int8")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.25, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        ddp(torch.ones(3, 64, device=FAKE) * (rank + 1)).square().mean().backward()
        optimizer.step()

    step()
    state.settle()
    with no_second_shot(rank, how), contextlib.suppress(Error):
        step()
        assert all(p.grad.cpu().isnan().all() for p in model.parameters())
        assert all(p.detach().cpu().isnan().all() for p in model.parameters())
    if rank == 0:
        with pytest.raises(Error):  # the reason, and not an overflow
            state.settle()
    # Of torch, too: its reducer goes on with no backward that has raised.
    with pytest.raises(RuntimeError):
        step()


@on_fakes(dies={1}, timeout=3600)
@each_way("held", "late", "kernels", "peers")
@pytest.mark.parametrize("after", [0.0, 0.21, 0.47])
def test_a_rank_that_dies_in_a_step_of_ddp_is_named(rank, ranks, after):
    """At any moment of a step; the limit of an operation is an hour."""
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).to(FAKE))  # 65,536 weights
    state = pycomm.compress(ddp, "int4")
    if rank == 1:
        threading.Timer(after, os._exit, (0,)).start()

    def steps() -> None:
        while True:
            ddp(torch.ones(3, 256, device=FAKE)).square().mean().backward()
            state.settle()

    def next_operation() -> None:
        dist.all_reduce(torch.ones(1, device=FAKE))
        torch.accelerator.synchronize()
        state.reducer.check_operations()

    with pytest.raises(RuntimeError, match="rank 1"):  # PeerLost, or DDP's own that quotes it
        steps()
    with pytest.raises(PeerLost, match="rank 1"):
        next_operation()


STAGES: dict[str, tuple[Any, str]] = {
    "sum in the node": (Nodes, "_sum_in_node"),
    "contributions": (payloads, "all_to_all"),
    "results": (payloads, "all_gather"),
    "gather in the node": (Nodes, "_gather_in_node"),
}


@on_fakes("kernels", ranks=4, dies={3})
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_dies_by_nodes_leaves_no_result(rank, ranks, stage):
    """In any stage; the ranks of its node and of its place learn the reason, in time."""
    model = nn.Linear(300, 300).to(FAKE)
    ddp = nn.parallel.DistributedDataParallel(model)
    state = compressed_on([0, 0, 1, 1], ddp, "int4")

    def step() -> None:
        ddp.zero_grad()
        ddp(torch.ones(3, 300, device=FAKE) * (rank + 1)).square().mean().backward()

    for _ in range(4):
        step()
    state.settle()
    before = state.residuals.norms()
    dist.barrier()
    lost = True
    module, name = STAGES[stage]
    first = getattr(module, name)

    def end(*args: Any, **more: Any) -> Any:
        torch.accelerator.synchronize()
        time.sleep(0.1)  # the others have what came before
        os._exit(0)

    with patch.object(module, name, end if rank == 3 else first):
        try:
            step()
            lost = any(p.grad.cpu().isnan().any() for p in model.parameters())
            assert lost == (rank == 2 or stage != "gather in the node")  # whose other node has all
            state.settle()
            failed = False
        except RuntimeError:
            failed = True
    with contextlib.suppress(RuntimeError):
        state.settle()
    if lost:
        assert state.residuals.norms() == before
    assert rank != 1 or failed == (stage != "gather in the node")
    assert rank != 2 or failed


@on_fakes()
@each_way("held", "kernels")
@ENDS
def test_a_round_of_local_sgd_whose_peer_ends_between_the_shots_is_an_error(rank, ranks, how):
    """It is not skipped, as one whose average is not finite."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(FAKE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, foreach=False)

    def train(local: Any) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 64, device=FAKE) * (rank + 1)).square().mean().backward()
            optimizer.step()
            local.step()

    local = pycomm.LocalSGD(model, every=2, codec="int8")
    train(local)
    with no_second_shot(rank, how), pytest.raises(Error):
        train(local)


@on_fakes("held")
def test_payloads_of_variable_size_that_did_not_come_are_an_error(rank, ranks):
    """Bytes of ones are values of lossless: only the error tells."""
    bucket, x = bucket_of("lossless", [4000], device=FAKE), ours(4000)
    how: dict[str, Any] = {"seed": 1, "found_inf": torch.zeros(1, device=FAKE)}
    two_shot.all_reduce(x, bucket, dist.group.WORLD, step=1, **how)
    assert x.cpu().equal(ours(4000).cpu())

    def fail(*args: Any) -> Any:
        if rank == 1:  # the sizes have gone, the payloads have not
            torch.accelerator.synchronize()
            abort(dist.group.WORLD)
        return checked(*args)

    checked = payloads._checked
    with patch.object(payloads, "_checked", fail), pytest.raises(Error, match="abort"):
        two_shot.all_reduce(x, bucket, dist.group.WORLD, step=2, **how)


CODED: dict[str, tuple[int, ...]] = {"all_reduce": (1,), "reduce_scatter": (1, 2)}  # rows


@on_fakes("peers")
def test_a_compressed_operation_among_peers_that_fails_leaves_no_result(rank, ranks):
    made = {op: dist.new_group(backend=GROUP, timeout=timedelta(seconds=20)) for op in CODED}
    agreed: dict[str, dict[Any, Any]] = {op: {} for op in CODED}  # by the first call

    def call(op: str, step: int) -> tuple[Any, torch.Tensor]:
        tensors = [ours(n * 5000) for n in CODED[op]]
        how = {"rows": CODED[op][-1], "paths": agreed[op]}
        bucket = bucket_of("int8", [5000], Residuals(Feedback(), 2), FAKE, **how)
        native: Any = chosen(bucket, made[op], op, tensors[0]).native
        run = getattr(native, f"compressed_{op}")
        return run(*tensors, bucket.native, bucket.sides, seed=1, step=step), tensors[0]

    for op in CODED:
        work, result = call(op, 1)
        work.wait()
        assert work.finite
        assert not is_spoiled(result)
    dist.barrier()
    failed = 0
    for op, group in made.items():
        if rank == 1:
            time.sleep(0.4)  # the other rank waits in the operation
            abort(group)
            continue
        try:
            work, result = call(op, 2)
        except Error:  # it was aborted before
            continue
        with pytest.raises(Error, match="abort"):
            work.wait()
        assert not work.finite
        assert is_spoiled(result)
        failed += 1
    assert rank == 1 or failed


@on_fakes("held")
def test_numbers_that_ranks_decide_by_are_an_error_if_they_did_not_come(rank, ranks):
    """What a rank decides by is no answer, either, if it did not come."""
    assert gather([1.0 + rank], dist.group.WORLD, torch.device(FAKE)) == [[1.0], [2.0]]
    if rank == 1:
        abort(dist.group.WORLD)
        return
    with pytest.raises(Error, match="abort"):
        gather([1.0], dist.group.WORLD, torch.device(FAKE))
