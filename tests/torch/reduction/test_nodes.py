"""Buckets over Gloo: by nodes with the bits of the core, and beside backward.

By nodes gradients are exact in a node and coded between nodes, on any backend.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import backend
from pycomm.codecs.convert import convert
from pycomm.feedback import Feedback, Residuals
from pycomm.local_sgd import Blocking, Streamed
from pycomm.policy.exchange import bytes_of
from pycomm.reduction import own_group
from pycomm.reduction.nodes import Nodes
from pycomm.reduction.own_group import ExchangeThread
from tests.ranks import in_child
from tests.torch.harness import (
    Chosen,
    all_equal,
    bucket_of,
    compressed_on,
    gradients,
    owed,
    reduced,
)
from tests.torch.interpreter import Interpreter, launch
from tests.torch.pool import on_ranks

SHAPES = {"large": (256, 256), "odd": (255, 257), "bias": (50,), "small": (40, 70)}
CODECS: list[tuple[str, str | bool]] = [
    ("int4", True),
    ("int8", "residual:storage=int8"),
    ("int4:rounding=stochastic", False),
    ("sign", "decay:0.9"),
    ("eden2", False),
    ("topk:0.05", True),
    ("lossless", False),
    ("fp32", True),
]
FIXED = "int4 factors=off"
"""Of new factors residuals have other units, and are rounded in int8: these stay to the bit."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def train(
    rank: int, codec: str, feedback: str | bool, dtype: torch.dtype, nodes: Any = None
) -> tuple[Any, str]:
    """Return the gradients of three steps, of which one overflows on one rank; and the summary."""
    model = DistributedDataParallel(Chosen(SHAPES).to(dtype))
    state = compressed_on(nodes, model, codec, feedback=feedback)
    results = []
    for step in range(4):
        given = {k: g.to(dtype) for k, g in gradients(rank, step, shapes=SHAPES).items()}
        if step == 1 and rank == 2:
            given["odd"][-1, -1] = torch.inf
        result = reduced(model, given)
        for name, value in result.items():
            value[value.isnan()] = torch.nan  # which is one of many
            results.append((step, name, bytes_of(value)))
    state.settle()
    return (results, state.overflows), state.summary()


ON_NODE = """
import os, sys
rank = int(os.environ["RANK"])
os.environ["PYCOMM_HOST_ID"] = f"node{rank // 2}"
from tests.torch.reduction import test_nodes
getattr(test_nodes, sys.argv[1])(rank, sys.argv[2])
"""


def run_on_nodes(function: str, folder: Path, **env: str) -> None:
    """Run a function of this file, of a rank and a folder, on four ranks of two nodes."""
    env = {"PYCOMM_ALGO": "hierarchical", **env}
    launch("-c", ON_NODE, function, str(folder), folder=folder, ranks=4, **env)


def on_both_carriers(rank: int, folder: str, cases: list[Any], train: Any) -> Iterator[Any]:
    """Yield each case, and what it finds by the core and by Gloo."""
    for number, case in enumerate(cases):
        found = []
        for carrier, told in (("pycomm", "core ("), ("gloo", "by nodes: 2 nodes of 2 ranks")):
            store = dist.FileStore(f"{folder}/{carrier}{number}", 4)
            dist.init_process_group(carrier, store=store, rank=rank, world_size=4)
            result, summary = train(rank, case)
            assert told in summary, summary
            found.append(result)
            dist.destroy_process_group()
        yield case, *found


def on_node(rank: int, folder: str) -> None:
    cases = list(itertools.product(CODECS, DTYPES))
    trained = on_both_carriers(rank, folder, cases, lambda r, case: train(r, *case[0], case[1]))
    for case, (also, _), (results, overflows) in trained:
        for (step, name, ours), (*_, theirs) in zip(results, also, strict=True):
            assert ours == theirs, f"{case}: {name} differs in step {step}"
        assert overflows == 1, f"{case}: {overflows} overflows"


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_gloo_has_the_bits_of_the_core(tmp_path, implementation):
    run_on_nodes("on_node", tmp_path, PYCOMM_IMPL=implementation)


EXCHANGES = [Blocking(), Streamed(fragments=2, overlap=1)]


def train_apart(rank: int, case: tuple[Any, torch.dtype]) -> tuple[list[bytes], str]:
    """Return the parameters after three rounds of LocalSGD; and the summary."""
    exchange, dtype = case
    model = Chosen(SHAPES).to(dtype)
    local = pycomm.LocalSGD(model, every=2, codec="int4", exchange=exchange)
    for step in range(6):
        with torch.no_grad():
            for name, gradient in gradients(rank, step, shapes=SHAPES, scale=0.1).items():
                getattr(model, name).sub_(gradient.to(dtype))
        local.step()
    local.finish()
    return [bytes_of(p.detach()) for p in model.parameters()], local.summary()


def apart_on_node(rank: int, folder: str) -> None:
    cases = list(itertools.product(EXCHANGES, DTYPES))
    for case, core, gloo in on_both_carriers(rank, folder, cases, train_apart):
        assert core == gloo, case


def test_local_sgd_has_the_bits_of_the_core(tmp_path):
    run_on_nodes("apart_on_node", tmp_path)


@on_ranks(4, then=all_equal, backend="gloo")
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [7, 5, 7, 5]], ids=str)
@pytest.mark.parametrize("codec", ["int4", "topk:0.05"])
def test_all_ranks_have_one_result(rank, ranks, nodes, codec):
    results, summary = train(rank, codec, True, torch.float32, nodes=nodes)
    assert "by nodes: 2 nodes of 2 ranks" in summary
    return results


@on_ranks(4, backend="gloo")
@pytest.mark.parametrize(
    ("feedback", "nodes"),
    [
        *((True, nodes) for nodes in (range(4), [3] * 4, [0, 0, 0, 1], None)),
        ("momentum:0.9", [0, 0, 1, 1]),
    ],
    ids=str,
)
def test_some_ranks_reduce_alike(rank, ranks, feedback, nodes):
    """Those of one node, those alone, those of unequal nodes, and all with momentum."""
    summary = train(rank, "int4", feedback, torch.float32, nodes=nodes)[1]
    assert "by nodes: " not in summary
    assert ("flat, since momentum is of" in summary) == (feedback is not True)
    assert ("flat, since nodes have unequal" in summary) == (nodes == [0, 0, 0, 1])


def bytes_to_other_nodes(rank: int, ranks: int, nodes: list[int]) -> int:
    """Return the bytes that a rank sends to ranks of other nodes in a step."""
    sent, begin = 0, dist.ProcessGroup.alltoall_base
    gather = dist.ProcessGroup._allgather_base
    of = {r: node for r, node in enumerate([0, 0, 1, 1])}

    def others(group: dist.ProcessGroup) -> list[bool]:
        return [of[r] != of[rank] for r in dist.get_process_group_ranks(group)]

    def to_all(group: Any, out: Any, given: Any, incoming: Any, sizes: list[int]) -> Any:
        nonlocal sent
        sent += sum(size for size, far in zip(sizes, others(group), strict=True) if far)
        return begin(group, out, given, incoming, sizes)

    def to_each(group: Any, out: Any, given: torch.Tensor) -> Any:
        nonlocal sent
        sent += given.nbytes * sum(others(group))
        return gather(group, out, given)

    model = DistributedDataParallel(Chosen(SHAPES))
    compressed_on(nodes, model, "int4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "alltoall_base", to_all)
        patch.setattr(dist.ProcessGroup, "_allgather_base", to_each)
        reduced(model, gradients(rank, 0, shapes=SHAPES))
    return sent


def test_a_node_sends_what_one_rank_would(pool):
    """Two nodes of two: 2 (N-1)/N payloads of 0.13 of the gradients each; flat it is twice that."""
    gradient = 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    share = {
        name: sum(pool.run(bytes_to_other_nodes, nodes, ranks=4, backend="gloo")) / 2 / gradient
        for name, nodes in {"flat": range(4), "by nodes": [0, 0, 1, 1]}.items()
    }
    assert share["by nodes"] < 0.15
    assert share["flat"] > 0.26


@on_ranks(4, backend="gloo")
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], None], ids=str)
def test_resharded_residuals_are_sent_whole(rank, ranks, nodes):
    """Two ranks save; four load, of which each codes a part alone. Nothing is left behind."""
    pair = dist.new_group([0, 1])
    saved: list[Any] = [None] * ranks
    if rank < 2:
        model = DistributedDataParallel(Chosen(SHAPES), process_group=pair)
        state = pycomm.compress(model, "int4")
        for step in range(2):
            reduced(model, gradients(rank, step, shapes=SHAPES))
        mine = state.state_dict()
    dist.all_gather_object(saved, mine if rank < 2 else {})
    model = DistributedDataParallel(Chosen(SHAPES))
    state = compressed_on(nodes, model, "int4")
    state.load_state_dict(*saved[:2])
    before, sent = owed(state, SHAPES), dict.fromkeys(SHAPES, 0)
    for _ in range(4):
        for name, value in reduced(model, {n: torch.zeros(s) for n, s in SHAPES.items()}).items():
            sent[name] = sent[name] + value
    after = owed(state, SHAPES)
    assert before["large"].norm() > 0
    for name, debt in before.items():
        assert after[name].norm() <= 1e-3 * debt.norm(), name
        lost = sent[name] + after[name] - debt  # but for the rounding of residuals in int8
        assert lost.norm() <= 1e-2 * debt.norm(), name


@on_ranks(4, backend="gloo")
def test_groups_and_thread_go_with_the_state(rank, ranks):
    groups, threads = distributed_c10d._world.pg_map, set(threading.enumerate())
    before = len(groups)
    model = DistributedDataParallel(Chosen(SHAPES))
    state = compressed_on([0, 0, 1, 1], model, "int4")
    reduced(model, gradients(rank, 0, shapes=SHAPES))
    assert len(groups) == before + 3  # and that of the thread
    (thread,) = set(threading.enumerate()) - threads
    del model, state
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert len(groups) == before


@on_ranks(4, backend="gloo", dies=[3], timeout=5)
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], None], ids=str)
def test_a_rank_that_dies_is_an_error_of_backward(rank, ranks, nodes):
    """In time, also on ranks of its node and of its place; no rank takes a step as finite."""
    model = DistributedDataParallel(Chosen(SHAPES), bucket_cap_mb=0.2)
    state = compressed_on(nodes, model, FIXED)
    for step in range(2):  # DDP makes its buckets anew between these
        reduced(model, gradients(rank, step, shapes=SHAPES))
    state.settle()
    norms = state.residual_norms()
    if rank == 3:
        os._exit(0)
    with pytest.raises(RuntimeError, match="reduce"):  # with the place that has failed
        reduced(model, gradients(rank, 2, shapes=SHAPES))
    state.settle()  # ends, and takes the residuals back
    assert state.residual_norms() == norms
    with pytest.raises(RuntimeError):  # at once: its group is of no use
        state.reduce(torch.ones(256 * 256), ["large"])


# ------------------------------------------------------------------ rows, as FSDP2 has them

CPU = torch.device("cpu")
SIZES = [100, 4099]


@on_ranks(4, backend="gloo")
@pytest.mark.parametrize("levels", [[0, 0, 1, 1], [0, 1, 1, 0]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_coded_sums_of_nodes(rank, ranks, levels, dtype):
    codec, residuals = pycomm.codec("int8"), Residuals(Feedback(storage="float32"), ranks)
    bucket = bucket_of("int8", SIZES, residuals, rows=ranks, levels=levels)
    nodes = Nodes(dist.group.WORLD, levels, CPU)
    errors = [[torch.zeros(numel) for numel in SIZES] for _ in range(2)]  # by node
    for step in range(3):
        rows = [
            torch.randn(ranks, sum(SIZES), generator=torch.Generator().manual_seed(9 * step + r))
            for r in range(ranks)
        ]
        rows = [row.to(dtype) for row in rows]
        for piece in bucket.with_residual.values():
            piece.residual.use(bucket.layout, ranks)
        out = torch.empty(sum(SIZES), dtype=dtype)
        how: dict[str, Any] = {"seed": 1, "step": step, "found_inf": torch.zeros(1)}
        nodes.reduce_scatter(out, rows[rank].view(-1), bucket, average=True, **how)
        assert not how["found_inf"].any()
        residuals.commit(bucket.with_residual)
        for i, got in enumerate(torch.split(out, SIZES)):
            total = torch.zeros(SIZES[i])
            for node in range(2):
                theirs = [torch.split(row[rank].float(), SIZES)[i] for row in rows]
                first, second = (theirs[r] for r in range(ranks) if levels[r] == node)
                sent = first + second + errors[node][i]
                payload = torch.empty(codec.encoded_bytes(SIZES[i]), dtype=torch.uint8)
                codec.encode(sent, payload)
                value = codec.decode(payload, torch.empty(SIZES[i]))
                errors[node][i], total = sent - value, total + value
            assert torch.equal(got, convert(total, dtype, divisor=ranks)), (step, i)


@on_ranks(4, backend="gloo")
def test_shards_of_fsdp_are_reduced_by_nodes(rank, ranks):
    found = []
    for nodes in ([0, 0, 1, 1], None):
        model = fully_shard(Chosen(SHAPES), mesh=init_device_mesh("cpu", (4,)))
        state = compressed_on(nodes, model, "int8")
        found.append([reduced(model, gradients(rank, step, shapes=SHAPES)) for step in range(3)])
        assert ("by nodes: 2 nodes of 2 ranks" in state.summary()) == (nodes is not None)
    for by_nodes, flat in zip(*found, strict=True):
        for name in SHAPES:
            error = (by_nodes[name] - flat[name]).norm() / flat[name].norm()
            assert error < 0.02
            assert error > 0 or name == "bias"


# ---------------------------------------------------------------------------------- beside backward
# Buckets over Gloo are reduced by a thread with its own group.


WIDTH = 256  # a weight has 65,536 values, and a bucket of its own
LAYERS = 4


def wrapped(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2, **options)


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    x = torch.full((2, WIDTH), 1.0 + rank + step)
    model(x).square().mean().backward()


@on_ranks(2, backend="gloo")
@pytest.mark.parametrize("codec", ["int4", "topk:0.05", "lossless", "fp32"])
def test_a_bucket_travels_while_backward_goes_on(rank, ranks, codec):
    """The exchange of the first bucket begins when the last hook has been called."""
    model = wrapped()
    state = pycomm.compress(model, codec)
    backward(model, rank)
    last, waited = threading.Event(), []
    model.module[0].bias.register_hook(lambda grad: last.set())
    state.reducer.thread.run(torch.ones(1), lambda: waited.append(last.wait(60)))
    backward(model, rank, 1)
    assert waited == [True]


@on_ranks(3, backend="gloo")
def test_operations_of_the_user_are_not_mispaired(rank, ranks):
    """Between the hooks, on the model's own group, while buckets travel."""
    model = wrapped()
    pycomm.compress(model, "int8")
    sums: list[torch.Tensor] = []

    def add(grad: torch.Tensor) -> None:
        mine = torch.full((5,), float(rank + len(sums)))
        dist.all_reduce(mine)
        sums.append(mine)

    for layer in model.module:
        layer.weight.register_hook(add)
    for step in range(3):
        backward(model, rank, step)
    assert [float(s[0]) for s in sums] == [3.0 + 3 * i for i in range(3 * LAYERS)]


@on_ranks(2, backend="gloo")
def test_a_signal_ends_the_wait_for_a_step(rank, ranks):
    model = wrapped()
    state = pycomm.compress(model, "int4")
    release = threading.Event()
    state.reducer.thread.run(torch.ones(1), lambda: release.wait() and torch.ones(()))
    state.reduce(torch.ones(WIDTH * WIDTH), ["0.weight"])
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            state.settle()
    finally:
        signal.signal(signal.SIGALRM, old)
        release.set()
    state.settle()


@on_ranks(2, backend="gloo")
def test_who_gets_a_result_may_fork(rank, ranks):
    """A child has no thread that would end the wait for a step."""
    thread = ExchangeThread(dist.group.WORLD)
    begins, known = threading.Event(), []
    tensor = torch.ones(1)
    future, is_finite = thread.run(tensor, lambda: begins.wait(60) and torch.ones(()))

    def ask() -> None:
        signal.alarm(20)  # ends a child that waits
        assert is_finite()

    at_result = future.then(lambda _: known.append(in_child(ask)))
    begins.set()
    at_result.wait()
    assert known == ["returned"]


ENDS = """
import threading, torch, torch.distributed as dist
from pycomm.reduction.own_group import ExchangeThread
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
thread, runs = ExchangeThread(dist.group.WORLD), threading.Event()
def reduce():
    runs.set()
    x = torch.ones(600, 600)
    for _ in range(25):  # a tenth of what the end waits for, on an idle machine
        x = x @ x * 0
thread.run(torch.ones(1), reduce)
runs.wait()
"""


def test_an_interpreter_may_end_while_a_bucket_travels():
    """A thread that comes back from C++ later would abort the process."""
    process = Interpreter("-c", ENDS, merged=True, finalized=True)
    assert process.wait(60) == 0, process.output()


@on_ranks(2)
def test_the_group_of_the_thread_has_the_models_backend(rank, ranks):
    """The default group may be of one that moves no host tensors, such as NCCL."""
    model = wrapped(process_group=dist.new_group(backend="gloo"))
    state = pycomm.compress(model, "int4")
    backward(model, rank)
    assert dist.get_backend(state.reducer.thread.group) == dist.get_backend(model.process_group)
    assert backend.find(state.reducer.thread.group) is None


# ------------------------------------------------------------------------------------------- groups
# Groups of pycomm's objects are made and closed on several threads.


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_group_is_made_while_another_closes(rank, ranks, when):
    """torch names a group by a count of groups, which then differs between ranks."""
    former = own_group.make(dist.group.WORLD)
    destroy, gather = dist.destroy_process_group, own_group.gather
    destroyed, counted = threading.Event(), threading.Event()
    thread = threading.Thread(target=own_group.close, args=(former,))

    def slow(group: dist.ProcessGroup) -> None:
        destroy(group)
        destroyed.set()
        counted.wait(0.5)

    def gathered(*args: Any) -> Any:
        counts = gather(*args)
        if when == "while":
            thread.start()
        counted.set()
        thread.join()
        return counts

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(own_group, "gather", gathered)
            if when == "before":
                patch.setattr(dist, "destroy_process_group", slow)
                thread.start()
                assert destroyed.wait(10)
        made = own_group.make(dist.group.WORLD)
    if rank == 1:
        own_group.close(former)
    assert former not in dist.distributed_c10d._world.pg_map
    for group in (made, own_group.make(dist.group.WORLD)):
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [2.0, 2.0, 2.0]
        own_group.close(group)


def test_torch_asks_for_the_names_of_groups():
    """It would name them otherwise, by counts."""
    assert distributed_c10d._process_group_name.__module__ == distributed_c10d.__name__
    assert hasattr(distributed_c10d._process_group_name, "__wrapped__")


@on_ranks(4)
def test_parts_that_have_made_other_groups_make_one(rank, ranks):
    made = []
    for parts in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        (ours,) = (part for part in parts if rank in part)
        made.append(own_group.make(dist.group.WORLD, ours))
    if rank < 2:
        half = dist.new_group([0, 1], use_local_synchronization=True)
        made.append(own_group.make(half))
    made.append(own_group.make(dist.group.WORLD))
    for group in made:
        values = torch.ones(3)
        dist.all_reduce(values, group=group)
        assert values.tolist() == [float(group.size())] * 3
