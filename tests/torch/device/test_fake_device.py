"""The backend on device tensors: results, order with the device's streams, lifetimes, failures.

The device is simulated by threads (fake_device.cpp), so that this runs anywhere;
test_cuda.py has the same tests on a GPU.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import _C, backend
from pycomm.errors import Error, Timeout, WireMismatch
from pycomm.feedback import Feedback, Residuals
from pycomm.policy import Decision, Parameter
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.paths import chosen
from tests.torch.device import fake_device
from tests.torch.device.checks import (
    check_capture,
    check_compressed,
    check_ddp,
    check_futures,
    check_hand_over,
    check_lifetimes,
    check_no_capture,
    check_no_capture_of_a_step,
    check_operations,
    check_order,
    check_sends_during_a_copy,
    slow,
)
from tests.torch.device.fake_device import GROUP, on_fakes, run, same_as_cpu
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.pool import on_ranks

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


def check_shared_queue(rank: int, ranks: int, queues: str) -> bool:
    """Return whether `wait` waits for the other rank; it does so where streams are not held."""
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
        work.wait()
        waited = store.check(["calls"])
    torch.accelerator.synchronize()
    assert x.cpu().eq(2).all()
    return rank == 1 or waited


@pytest.mark.parametrize(("queues", "waits"), [("1", True), ("8", False)])
def test_no_stream_is_held_where_all_share_a_queue(fakes, queues, waits):
    """A held stream would stop the others: CUDA_DEVICE_MAX_CONNECTIONS=1 is Megatron's rule."""
    assert run(fakes, "held", check_shared_queue, queues) == [waits, True]


@pytest.mark.parametrize("way", ["held", "late", "kernels", "peers"])
def test_a_compressed_step_refuses_to_be_captured(fakes, way):
    run(fakes, way, check_no_capture_of_a_step, FAKE)


@on_fakes("held", timeout=1)
def test_a_stream_that_is_stuck_ends_the_group_in_time(rank, ranks):
    x = slow(rank, FAKE, 3000 if rank == 1 else 0)
    work = dist.all_reduce(x, async_op=True)
    # The other rank gets the error, or times out at the same moment.
    with pytest.raises(Timeout if rank == 1 else Error) as caught:
        work.wait(timedelta(seconds=10))
    if rank == 1:
        assert "rank 1 did not reach its all_reduce: the work that was queued before it" in str(
            caught.value
        )
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(Error):
        dist.all_reduce(torch.ones(3, device=FAKE), async_op=True).wait()


@on_fakes()
@pytest.mark.parametrize("way", ["held", "peers"])
def test_an_abort_ends_what_waits_for_peers(rank, ranks, way):
    x = slow(0, FAKE, 0)
    dist.all_reduce(x)
    if rank == 1:
        time.sleep(0.2)
        dist.distributed_c10d._abort_process_group()
        return
    work = dist.all_reduce(x, async_op=True)
    if way == "held":  # waiting only synchronizes streams: the failure is still to come
        work.wait()
        assert x.cpu().isnan().all()
        assert work.is_completed()
        assert not work.is_success()
    else:  # kernels wait for their peers
        assert "; on fakegpu:0 2 ranks: " in backend.find().describe()
    with pytest.raises(Error, match="abort"):
        work.wait()
    with pytest.raises(Error, match="abort"):
        dist.all_reduce(x, async_op=True)


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
    dist.init_process_group(
        GROUP,
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=20),
        device_id=device,
    )
    try:
        dist.barrier()
        alone = dist.split_group(split_ranks=[[0], [1]])
        x = slow(rank, FAKE, 10)
        dist.all_reduce(x, group=alone)
        dist.all_reduce(x)
        assert x.cpu().eq(3).all()
        assert alone.bound_device_id == device
    finally:
        dist.destroy_process_group()


@WAYS
def test_ddp_trains_as_on_the_cpu(fakes, way):
    same_as_cpu(fakes, way, check_ddp)


@pytest.mark.parametrize("way", ["held", "peers"])
def test_compressed_gradients_have_the_same_bits_as_on_the_cpu(fakes, way):
    same_as_cpu(fakes, way, check_compressed)


@on_fakes("peers")
def test_operations_among_peers_are_in_the_trace(rank, ranks):
    x = slow(rank, FAKE, 200)
    for _ in range(2):
        dist.all_reduce(x)
    dist.broadcast(x, 0)
    x.cpu()
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


@on_fakes("held")
def test_compressed_collectives_need_peers(rank, ranks):
    native, there = backend.find(), torch.device(FAKE)
    decision = Decision(Parameter("p", (64,), torch.float32), pycomm.codec("int8"), "test")
    x = torch.ones(64, device=FAKE)
    on_cpu = Bucket([decision], [0], Residuals(Feedback(), ranks), torch.device("cpu"))
    with pytest.raises(Error, match="its residuals are elsewhere"):
        native.compressed_all_reduce(x, on_cpu.native, on_cpu.sides, seed=1, step=1)
    bucket = Bucket([decision], [0], None, there)
    assert chosen(bucket, dist.group.WORLD, "all_reduce", x).native is None
    with pytest.raises(Error, match="needs ranks that reach each other's memory"):
        native.compressed_all_reduce(x, bucket.native, bucket.sides, seed=1, step=1)


@on_fakes()
@pytest.mark.parametrize("way", ["held", "late"])
def test_a_message_that_has_come_already_is_received_with_a_hook(rank, ranks):
    """The receive is done when it is posted, and its hook is called at once."""
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # which hooks go to
    heard: list[Any] = []
    group._register_on_completion_hook(heard.append)
    if rank == 0:
        dist.send(torch.ones(3), 1, tag=1)
        dist.send(torch.ones(3), 1, tag=2)
    else:
        dist.recv(torch.zeros(3), 0, tag=2)  # by then the other has come, too
        x = torch.zeros(3, device=FAKE)
        dist.recv(x, 0, tag=1)
        assert x.cpu().tolist() == [1.0] * 3
    assert len(heard) == 2
