"""By nodes on any backend: exact in a node, coded between nodes, with the bits of the core."""

from __future__ import annotations

import gc
import itertools
import os
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
from pycomm.codecs.convert import convert
from pycomm.feedback import Feedback, Residuals
from pycomm.local_sgd import Blocking, Streamed
from pycomm.policy.exchange import bytes_of
from pycomm.reduction.nodes import Nodes
from tests.torch.harness import (
    Chosen,
    all_equal,
    bucket_of,
    compressed_on,
    gradients,
    owed,
    reduced,
)
from tests.torch.interpreter import Interpreter
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
import sys
from tests.torch.reduction import test_nodes
getattr(test_nodes, sys.argv[1])(int(sys.argv[2]), sys.argv[3])
"""


def run_on_nodes(function: str, folder: Path, **env: str) -> None:
    """Run a function of this file, of a rank and a folder, on four ranks of two nodes."""
    env = {"PYCOMM_ALGO": "hierarchical", **env}
    ranks = [
        Interpreter(
            *("-c", ON_NODE, function, str(rank), str(folder)),
            variables={**env, "PYCOMM_HOST_ID": f"node{rank // 2}"},
            merged=True,
        )
        for rank in range(4)
    ]
    for rank in ranks:
        assert rank.wait(200) == 0, rank.output()


def on_both_carriers(rank: int, folder: str, cases: list[Any], train: Any) -> Iterator[Any]:
    """Yield each case, and what it finds by the core and by Gloo."""
    for number, case in enumerate(cases):
        found = []
        for backend, told in (("pycomm", "core ("), ("gloo", "by nodes: 2 nodes of 2 ranks")):
            store = dist.FileStore(f"{folder}/{backend}{number}", 4)
            dist.init_process_group(backend, store=store, rank=rank, world_size=4)
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
        lost = sent[name] + after[name] - debt  # but for the rounding of residuals in bf16
        assert lost.norm() <= 1e-2 * debt.norm(), name


@on_ranks(4, backend="gloo")
def test_the_groups_go_with_the_state(rank, ranks):
    groups = distributed_c10d._world.pg_map
    before = len(groups)
    model = DistributedDataParallel(Chosen(SHAPES))
    state = compressed_on([0, 0, 1, 1], model, "int4")
    reduced(model, gradients(rank, 0, shapes=SHAPES))
    assert len(groups) == before + 3  # and that of the thread
    del model, state
    gc.collect()
    assert len(groups) == before


@on_ranks(4, backend="gloo", dies=[3], timeout=5)
def test_a_rank_that_dies_leaves_no_result(rank, ranks):
    """Ranks of its node and of its place have an error, in time; no rank takes a step as finite."""
    model = DistributedDataParallel(Chosen(SHAPES))
    state = compressed_on([0, 0, 1, 1], model, "int4")
    reduced(model, gradients(rank, 0, shapes=SHAPES))
    state.settle()
    residuals = state.residual_norms()
    if rank == 3:
        os._exit(0)
    with pytest.raises(RuntimeError):
        reduced(model, gradients(rank, 1, shapes=SHAPES))
    state.discard()
    state.settle()
    assert state.residual_norms() == residuals


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
        how: dict[str, Any] = {"seed": 1, "step": step, "average": True}
        assert nodes.reduce_scatter(out, rows[rank].view(-1), bucket, dist.group.WORLD, **how)
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


def train_shards(rank: int) -> tuple[list[torch.Tensor], str]:
    """Return a rank's shards after three steps of FSDP2; and the summary."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 90), nn.ReLU(), nn.Linear(90, 30))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    state = pycomm.compress(model, "int8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 70, generator=torch.Generator().manual_seed(4 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
    state.settle()
    return [p.to_local().detach().clone() for p in model.parameters()], state.summary()


def shards_on_node(rank: int, folder: str) -> None:
    """Train shards over Gloo, and store them."""
    way = os.environ["PYCOMM_ALGO"]
    store = dist.FileStore(f"{folder}/{way}", 4)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    values, summary = train_shards(rank)
    assert ("by nodes: 2 nodes of 2 ranks" in summary) == (way != "flat"), summary
    torch.save(values, f"{folder}/{way}{rank}")
    dist.destroy_process_group()


def test_shards_of_fsdp_are_reduced_by_nodes(tmp_path):
    ways = ("hierarchical", "flat")
    for way in ways:
        run_on_nodes("shards_on_node", tmp_path, PYCOMM_ALGO=way)
    for rank in range(4):
        by_nodes, alike = (torch.load(tmp_path / f"{way}{rank}") for way in ways)
        for ours, theirs in zip(by_nodes, alike, strict=True):
            assert not torch.equal(ours, theirs)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
