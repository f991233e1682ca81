"""The backend in Python: its parts on every torch, and the whole where torch can have it.

`PYCOMM_BACKEND=python make conformance` runs torch's own suite on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from pycomm import _C, backend
from pycomm.backend import choice
from pycomm.backend.python.arguments import Arguments
from pycomm.backend.python.engine import Engine
from pycomm.backend.python.options import Options
from pycomm.backend.python.store import TorchStore
from pycomm.backend.python.tensors import flat, write_back
from pycomm.errors import Error, PeerLost, Timeout, WireMismatch
from tests.torch.pool import on_ranks

needs_torch = pytest.mark.skipif(
    bool(choice.why_not_python()), reason="torch older than 2.14 has no backends in Python"
)

# ------------------------------------------------------------------ parts


@pytest.fixture
def engine():
    core = _C.Communicator(None, 0, 1, _C.CommunicatorOptions())
    engine = Engine(core, TorchStore(dist.HashStore()), "alone")
    yield engine
    engine.finish()


def test_operations_run_in_order_and_futures_hold_the_outputs(engine):
    seen, x = [], torch.ones(3)
    works = [engine.submit("all_reduce", [x], lambda _, i=i: seen.append(i)) for i in range(50)]
    assert works[-1].get_future().wait() == [x]
    assert seen == list(range(50))
    assert all(work.is_completed() and work.is_success() for work in works)
    assert works[-1]._get_sequence_number() == 50


def test_an_error_keeps_its_type_in_every_wait(engine):
    def fail(_):
        raise PeerLost("rank 1 is gone", 1)

    work = engine.submit("all_reduce", [torch.ones(1)], fail)
    future = work.get_future()
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            work.wait()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        future.wait()
    assert not work.is_success()
    assert work.get_future_result().wait() == 2
    assert engine.error == _distributed_c10d.ErrorType.REMOTE_ERROR


def test_a_timed_out_wait_ends_no_operation(engine):
    go = threading.Event()
    work = engine.submit("all_reduce", [torch.ones(1)], lambda _: go.wait(10))
    with pytest.raises(Timeout, match=r"all_reduce #1 timed out: .* wait of 20 ms; it continues"):
        work.wait(timedelta(milliseconds=20))
    go.set()
    assert work.wait()


def test_a_callback_may_wait_for_a_later_operation(engine):
    go, order = threading.Event(), []
    first = engine.submit("all_reduce", [torch.ones(1)], lambda _: go.wait(10))
    later = []
    waited = first.get_future().then(lambda _: (later[0].wait(), order.append("callback")))
    later.append(engine.submit("all_reduce", [torch.ones(1)], lambda _: order.append("later")))
    go.set()
    waited.wait()
    assert order == ["later", "callback"]


@pytest.fixture
def pair():
    """Two ranks in one process, with a store of torch between them."""
    store, engines = dist.HashStore(), [None, None]

    def join(rank):
        options = _C.CommunicatorOptions()
        options.group, options.timeout = "pair", 20.0
        requests = TorchStore(store)
        core = _C.Communicator(_C.Store.of(requests), rank, 2, options)
        engines[rank] = Engine(core, requests, "pair")

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield engines
    for engine in engines:
        engine.finish()


def test_what_a_dropped_send_reads_is_kept_until_it_is_sent(pair):
    got = torch.zeros(1 << 20)
    pair[0].post("send", torch.full((1 << 20,), 7.0), 1, 0)  # the handle is dropped
    torch.full((1 << 20,), 9.0)  # would get the memory
    work = pair[1].post("recv", got, 0, 0)
    assert work.get_future().wait() == [got]
    assert work.source_rank() == 0
    assert torch.equal(got, torch.full((1 << 20,), 7.0))


def test_pending_works_include_receives_that_were_dropped(pair):
    """Forty of them, so that the engine forgets some before anyone waits."""
    grid = torch.zeros(3, 40)
    for column in range(40):
        pair[0].post("send", torch.full((3,), 1.0 + column), 1, 0)
        pair[1].post("recv", grid[:, column], 0, 0)._request.wait()  # received, and not yet copied
    pair[1].settle_all()
    assert grid.tolist() == [[1.0 + column for column in range(40)]] * 3


def test_what_another_thread_posts_meanwhile_is_not_forgotten(pair):
    grid = torch.zeros(3, 18)
    for column in range(18):
        pair[0].post("send", torch.full((3,), 1.0 + column), 1, 0)

    def post_another() -> bool:  # while the engine looks which of its works are done
        first.is_completed = first.needs_its_buffer = lambda: False
        thread = threading.Thread(target=pair[1].post, args=("recv", grid[:, 17], 0, 0))
        thread.start()
        thread.join(20)
        return False

    first = pair[1].post("recv", grid[:, 0], 0, 0)
    first.is_completed = first.needs_its_buffer = post_another
    for column in range(1, 17):
        pair[1].post("recv", grid[:, column], 0, 0)
    pair[1].settle_all()
    assert grid.tolist() == [[1.0 + column for column in range(18)]] * 3


@pytest.mark.parametrize("inference", [False, True])
def test_flat_results_reach_tensors_with_gaps(inference):
    with torch.inference_mode(inference):
        grid = torch.zeros(4, 4)
    column = grid[:, 1]
    made = flat(column)
    assert (made is not column, made.is_contiguous()) == (True, True)
    with torch.inference_mode():
        made += 3
    write_back(made, column)
    assert grid.tolist() == [[0, 3, 0, 0]] * 4
    whole = torch.zeros(3, requires_grad=True)
    assert flat(whole) is whole
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    assert flat(conjugate).tolist() == [1 - 2j, 3 + 1j]
    assert not flat(conjugate).is_conj()  # the core reads memory


class Far:
    """A store that fails."""

    appends, round_trip = True, 0.0

    def set(self, key, value):
        raise OSError("the cable is out")

    def get(self, key, seconds):
        return None


def test_a_failing_store_is_named():
    store = _C.Store.of(Far())
    with pytest.raises(Error, match="the store failed at the key k: the cable is out"):
        store.set("k", "v")
    with pytest.raises(Timeout, match="no rank set the key k in the store within 50 ms"):
        store.get("k", 0.05)


def test_options_have_the_names_of_the_binary():
    options = Options(timedelta(seconds=7), transport="tcp", tls=True)
    copied = options.__copy__()
    assert (copied.transport, copied.tls, copied._timeout) == ("tcp", True, timedelta(seconds=7))
    copied.transport = "shm"
    assert options.transport == "tcp"
    with pytest.raises(TypeError, match="no option 'trnsport'"):
        Options(trnsport="tcp")
    with pytest.raises(Error, match="unknown device_path"):
        options.device_path = "moon"


REFUSED = [
    (lambda a, x: a.only("op", []), "takes one tensor, got 0"),
    (lambda a, x: a.only_written("op", [x.expand(3, 4)]), "share one place in memory"),
    (lambda a, x: a.check_written("op", x, x), "share memory with each other"),
    (lambda a, x: a.check("op", x.to_sparse()), "got a sparse tensor"),
    (lambda a, x: a.check("op", torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)), "quantized"),
    (lambda a, x: a.check_peer("op", "the root", 2), "the root is 2, but the group has ranks 0 to"),
    (lambda a, x: a.check_tag("op", -1), "tags begin at 0"),
    (lambda a, x: a.same_dtype("op", x, x.double()), "must have one dtype"),
    (lambda a, x: a.one_per_rank("op", [[x]], x), "a list of 2 tensors, one per rank, got 1"),
    (lambda a, x: a.own_part("op", [x, x[:2]], x, "input"), "has 2 values, the other tensor 4"),
    (lambda a, x: a.reducible("op", x, dist.ReduceOp.BXOR), "bxor"),
    (lambda a, x: a.rows("op", x[:3], [], "input"), "not divisible by 2 ranks"),
    (lambda a, x: a.rows("op", x, [5, -1], "input"), "numbers of at least 0 whose sum"),
    (lambda a, x: a.pair_up("op", [x], [x]), "must have 2 times 4 values"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_wrong_arguments_are_refused_with_rank_and_operation(call, text):
    with pytest.raises(Error, match=f"rank 1: op: .*{text}"):
        call(Arguments(1, 2), torch.ones(4))


def test_a_tensor_whose_memory_is_gone_is_refused():
    x = torch.ones(100)
    x.untyped_storage().resize_(4)
    with pytest.raises(Error, match="100 values whose storage has been resized"):
        Arguments(0, 2).check("op", x)


# ------------------------------------------------------------------ the whole


@contextmanager
def joined(store, rank, ranks, *, python: bool) -> Iterator[None]:
    """Have a default group, and others, of the implementation that is asked for."""
    module = choice._python() if python else choice.ready_c10d()
    with mock.patch.object(backend, "load", return_value=module):
        dist.init_process_group(
            "pycomm", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
        )
        assert (backend.find_native() is None) == python
        assert backend.find() is not None
        try:
            yield
        finally:
            dist.destroy_process_group()


def _every_operation(rank, ranks, store, mixed):
    with joined(store, rank, ranks, python=not mixed or rank % 2 == 1):
        _operations(rank, ranks)


def _operations(rank, ranks):
    mine = torch.arange(5, dtype=torch.float32) + rank
    everybody = [torch.arange(5, dtype=torch.float32) + r for r in range(ranks)]
    total = sum(everybody)

    def same(got, want):
        assert torch.equal(got, want), f"{got} is not {want}"

    for is_async in (False, True):

        def done(work, is_async=is_async):
            if is_async:
                work.wait()

        x = mine.clone()
        done(dist.all_reduce(x, async_op=is_async))
        same(x, total)
        x = torch.stack([mine, mine])[:, 0]  # with gaps
        done(dist.all_reduce(x, dist.ReduceOp.MAX, async_op=is_async))
        same(x, everybody[-1][0].expand(2))
        x = mine.clone()
        done(dist.broadcast(x, 1, async_op=is_async))
        same(x, everybody[1])
        x = mine.clone()
        done(dist.reduce(x, 1, async_op=is_async))
        same(x, total if rank == 1 else mine)
        outs = [torch.empty(5) for _ in range(ranks)]
        done(dist.all_gather(outs, mine, async_op=is_async))
        same(torch.stack(outs), torch.stack(everybody))
        out = torch.empty(5 * ranks)
        done(dist.all_gather_single(out, mine, async_op=is_async))
        same(out, torch.cat(everybody))
        outs = [torch.empty(5) for _ in range(ranks)] if rank == 0 else None
        done(dist.gather(mine, outs, 0, async_op=is_async))
        if outs is not None:
            same(torch.stack(outs), torch.stack(everybody))
        out = torch.empty(5)
        done(dist.scatter(out, everybody if rank == 0 else None, 0, async_op=is_async))
        same(out, mine)
        done(dist.reduce_scatter(out, [mine * (r + 1) for r in range(ranks)], async_op=is_async))
        same(out, total * (rank + 1))
        done(dist.reduce_scatter_single(out, mine.repeat(ranks), async_op=is_async))
        same(out, total)
        out = torch.empty(ranks)
        done(dist.all_to_all_single(out, torch.arange(ranks) + 10.0 * rank, async_op=is_async))
        same(out, torch.arange(ranks) * 10.0 + rank)
        # Rank r sends r + 1 rows to each.
        uneven = torch.empty(sum(range(1, ranks + 1)))
        sent = torch.full((ranks * (rank + 1),), float(rank))
        got, give = list(range(1, ranks + 1)), [rank + 1] * ranks
        done(dist.all_to_all_single(uneven, sent, got, give, async_op=is_async))
        same(uneven, torch.cat([torch.full((r + 1,), float(r)) for r in range(ranks)]))
        done(dist.barrier(async_op=is_async))
    peer = (rank + 1) % ranks
    got = torch.empty(5)
    ops = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got, (rank - 1) % ranks)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got, everybody[rank - 1])
    i, v = torch.tensor([[0, rank + 1]]), torch.ones(2)
    x = torch.sparse_coo_tensor(i, v, (ranks + 2,))
    dist.all_reduce(x)
    want = torch.zeros(ranks + 2)
    for r in range(ranks):
        want[0] += 1
        want[r + 1] += 1
    same(x.to_dense(), want)
    half = dist.new_group([0, 1])
    if rank < 2:
        x = mine.clone()
        dist.all_reduce(x, group=half)
        same(x, everybody[0] + everybody[1])


@needs_torch
@pytest.mark.parametrize("mixed", [False, True], ids=["python", "mixed"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_equals_torchs(pool, ranks, mixed):
    if mixed:
        choice.ready_c10d()
    pool.run(_every_operation, mixed, ranks=ranks, backend=None)


def _compressed_ddp(rank, ranks, store, python):
    import pycomm

    with joined(store, rank, ranks, python=python):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 64))
        pycomm.compress(model, "int4")
        for step in range(3):
            model.zero_grad()
            inputs = torch.randn(8, 512, generator=torch.Generator().manual_seed(10 * step + rank))
            model(inputs).square().sum().backward()
        return model.module.weight.grad.clone()


@needs_torch
def test_compressed_ddp_has_the_bits_of_the_binary(pool):
    choice.ready_c10d()
    found = [pool.run(_compressed_ddp, python, backend=None) for python in (True, False)]
    assert all(torch.equal(gradient, found[0][0]) for run in found for gradient in run)


@on_ranks(2, backend=None)
@needs_torch
def test_errors_come_with_their_type(rank, ranks, store):
    with joined(store, rank, ranks, python=True):
        with pytest.raises(Error, match=rf"rank {rank}: all_gather: needs a list of 2 tensors"):
            dist.all_gather([torch.ones(1)], torch.ones(1))
        work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
        with pytest.raises(WireMismatch):
            work.wait()
        with pytest.raises(WireMismatch):
            dist.barrier()


@on_ranks(2, backend=None, dies=[1])
@needs_torch
def test_a_rank_that_dies_is_named(rank, ranks, store):
    with joined(store, rank, ranks, python=True):
        dist.barrier()
        if rank == 1:
            os._exit(3)
        with pytest.raises(PeerLost) as lost:
            dist.all_reduce(torch.ones(4), async_op=True).wait()
        assert lost.value.ranks == [1]
