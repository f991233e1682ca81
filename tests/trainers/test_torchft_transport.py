"""A healing replica gets its state through the Manager's own group, coded and along a chain."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")

from torchft.checkpointing import transport_test

import pycomm
from pycomm.torchft import HandOverTransport, ProcessGroupPycomm
from tests.torch.pool import Pool, on_ranks

LIMIT = timedelta(seconds=20)
CHUNK = 4096


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.stop()


def grouped(rank: int, size: int, store: Any, **options: Any) -> ProcessGroupPycomm:
    made = ProcessGroupPycomm(timeout=LIMIT, options=pycomm.Options(**options))
    if rank == 0:
        grouped.server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        store.set("address", f"localhost:{grouped.server.port}")
    made.configure(f"{store.get('address').decode()}/quorum", str(rank), rank, size)
    return made


def state() -> dict[str, Any]:
    torch.manual_seed(5)
    odd = torch.tensor([float("nan"), -0.0, 1e-45, float("inf")])
    odd.view(torch.int32)[0] = 0x7F800123  # a NaN with a payload
    weight = torch.randn(301, 7)
    return {
        "user": {
            "default": {
                "weight": weight,
                "tied": weight,
                "turned": torch.randn(5, 3).t(),
                "half": torch.randn(1003).bfloat16(),
                "odd": odd,
                "counts": torch.arange(9) > 4,
                "adam": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}]},
            },
            "pycomm": {},
        },
        "torchft": {"step": 7, "batches_committed": 21},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        raw = [t.contiguous().view(-1).view(torch.uint8).tolist() for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and raw[0] == raw[1]
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def healed(rank: int, size: int, store: Any, transport: str, codec: str) -> int:
    group = grouped(rank, size, store, transport=transport)
    made: HandOverTransport[Any] = HandOverTransport(group, codec=codec, chunk_bytes=CHUNK)
    works = []
    for step, new in ((7, [3, 1]), (8, [2])):
        if rank == 0:
            made.send_checkpoint(new, step, state(), LIMIT)
        # Others go on: their collectives do not wait for the hand-over, nor does the sender's.
        x = torch.ones(5)
        works.append((group.allreduce([x], dist.ReduceOp.SUM), x))
        if rank in new:
            found = made.recv_checkpoint(0, made.metadata(), step, LIMIT)
            assert same(found, state())
            assert found["user"]["default"]["tied"] is found["user"]["default"]["weight"]
        made.disallow_checkpoint()
    for work, x in works:
        work.wait()
        assert x.tolist() == [float(size)] * 5
    sent = group._ours().sent_bytes
    made.shutdown()
    group.shutdown()
    return sent


@pytest.mark.parametrize(("transport", "codec"), [("auto", "lossless"), ("tcp", "none")])
def test_new_replicas_get_the_same_bits(pool, transport, codec):
    sent = pool.run(healed, transport, codec, ranks=4, backend=None)
    assert sent[3] < CHUNK, "the last one passes nothing on"
    assert sent[1] > 2 * CHUNK, "the first one does"


@on_ranks(3, backend=None)
@pytest.mark.parametrize("what", ["lambda", "memory", "step", "chunk"])
def test_what_fails_is_told_and_holds_nobody_up(rank, size, store, what):
    group = grouped(rank, size, store)
    group.barrier().wait()  # all have formed it before one ends
    made: HandOverTransport[Any] = HandOverTransport(
        group, chunk_bytes=2 * CHUNK if rank == 1 and what == "chunk" else CHUNK
    )
    start = time.monotonic()
    if rank == 0:
        kept = state()
        if what == "lambda":
            with pytest.raises(pycomm.Error, match="cannot be handed over"):
                made.send_checkpoint([1], 7, {"f": print}, LIMIT)
        else:
            store.set("metadata", made.metadata())
            made.send_checkpoint([1, 2], 7, kept, LIMIT)
        made.disallow_checkpoint()
    elif what == "memory":
        from pycomm.elastic import chunks

        works = chunks.Chunks.decode
        if rank == 1:
            chunks.Chunks.decode = None  # a TypeError at the first chunk
        with pytest.raises(TypeError if rank == 1 else pycomm.Error):
            made.recv_checkpoint(0, made.metadata(), 7, LIMIT)
        chunks.Chunks.decode = works
    elif what == "step":
        with pytest.raises(pycomm.Error, match="of step 7, not of 8"):
            made.recv_checkpoint(0, made.metadata(), 8, LIMIT)
    elif what == "chunk":
        theirs = store.get("metadata").decode()
        if rank == 1:
            with pytest.raises(pycomm.Error, match="make the same transport on all replicas"):
                made.recv_checkpoint(0, theirs, 7, LIMIT)
            group.abort(errored=False)  # as after any error that the Manager is told
        else:
            with pytest.raises(pycomm.Error):
                made.recv_checkpoint(0, theirs, 7, LIMIT)
    assert time.monotonic() - start < 15, "long before the group's timeout of 20 s"
    made.shutdown()
    group.shutdown()


def test_torchfts_own_test_of_transports():
    """torchft's (BSD licence), with threads as replicas, a sharded tensor and a timeout."""
    if dist.is_initialized():  # by tests of torchft that ran before, and the one here makes its own
        dist.destroy_process_group()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def init(rank: int, size: int) -> Any:
        group = ProcessGroupPycomm(timeout=timedelta(seconds=3))
        group.configure(f"localhost:{store.port}/prefix", "0", rank, size)
        device = torch.device("cpu")
        return HandOverTransport(group, state_dict=lambda: transport_test.make_state_dict(device))

    transport_test.run_multi_recovery_test(TestCase(), init, torch.device("cpu"))
