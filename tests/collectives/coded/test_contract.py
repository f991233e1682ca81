"""Coded collectives with every kind of codec that the contract allows (simple_codecs.cpp).

The results can be computed exactly, since every value is an integer times an eighth.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pybind11
import pytest

import pycomm
from pycomm import _C, _test
from pycomm.codecs.cuda.sources import include_folder
from pycomm.communicator import Piece
from pycomm.straggler.compare import compare
from pycomm.straggler.stats import rank_stats
from tests.collectives.test_hierarchical import options
from tests.collectives.ways import WAYS, bits
from tests.compiling import compile_cpp
from tests.extent import each_value
from tests.ranks import attempt, run, run_processes

SEED, STEP = 77, 5
SIZES = [1000, 3, 4099, 0, 20011]
OFFSETS = np.cumsum([0, *SIZES])
KINDS = [
    {"combine": combine, "granule": granule, "variable": variable}
    for combine in ("recode", "gather")
    for granule, variable in [(64, True), (0, False), (48, False)]
]


def describe(kind: dict[str, Any]) -> str:
    return f"{kind['combine']}-{kind['granule']}" + "-variable" * kind["variable"]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    target = tmp_path_factory.mktemp("codecs") / "simple_codecs.so"
    source = Path(__file__).parent / "simple_codecs.cpp"
    package = Path(_C.__file__).parent
    flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")
    folders = (include_folder(), pybind11.get_include(), sysconfig.get_paths()["include"])
    link = ("-shared", f"-L{package}", "-lpycomm", f"-Wl,-rpath,{package}")
    compile_cpp(source, target, *flags, *(f"-I{folder}" for folder in folders), link=link)
    spec = importlib.util.spec_from_file_location("simple_codecs", target)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradient(rank: int, rows: int = 1) -> np.ndarray:
    """Return sparse values, so that payloads vary; multiples of 1/1024 below 16 are exact."""
    random = np.random.default_rng([rank, rows])
    values = random.integers(-(1 << 13), 1 << 13, (rows, OFFSETS[-1])) / 1024
    return (values * (random.random(values.shape) < 0.3)).astype(np.float32)


def debts(rank: int, rows: int = 1) -> np.ndarray:
    random = np.random.default_rng([rank, rows, 1])
    return (random.integers(-64, 64, (rows, OFFSETS[-1])) / 1024).astype(np.float32)


def through(p: np.ndarray) -> np.ndarray:
    codes = np.rint(8 * p) + 0.0  # an integer has no -0
    return (codes / 8).astype(np.float32)


def model(kind: dict[str, Any], ps: list[np.ndarray], divisor: int, owed: np.ndarray | None):
    """Return one tensor's result, each rank's residual, and the owners' residual."""
    if ps[0].size == 0:
        return ps[0], ps, ps[0]
    sent = [through(p) for p in ps]
    left = [p - s for p, s in zip(ps, sent, strict=True)]
    total = sent[0]
    for s in sent[1:]:
        total = total + s
    average = total / np.float32(divisor)
    if kind["combine"] != "recode" or owed is None:
        return average, left, owed
    p = average + owed
    result = through(p)
    return result, left, p - result


def pieces(codec: Any, owed: np.ndarray, owners: np.ndarray | None = None) -> list[Piece]:
    return [
        Piece(
            size,
            codec,
            tensor=i,
            residual=owed[i],
            owner_residual=None if owners is None else owners[0, begin : begin + size],
        )
        for i, (size, begin) in enumerate(zip(SIZES, OFFSETS[:-1], strict=True))
    ]


def by_tensor(rows: np.ndarray) -> list[np.ndarray]:
    """Return a copy in the layout of pieces' residuals: [rows, size] for each tensor."""
    return [rows[:, b : b + n].copy() for b, n in zip(OFFSETS[:-1], SIZES, strict=True)]


def all_reduce(codec: Any):
    def job(c):
        data, owed, owners = gradient(c.rank)[0], by_tensor(debts(c.rank)), debts(0)
        fine = c.all_reduce_coded(data, pieces(codec, owed, owners), seed=SEED, step=STEP)
        return fine, data, owed, owners[0]

    return job


def check_all_reduce(kind: dict[str, Any], outcomes: list[Any]) -> None:
    ranks = len(outcomes)
    for i, (begin, size) in enumerate(zip(OFFSETS[:-1], SIZES, strict=True)):
        part = slice(begin, begin + size)
        ps = [(gradient(r) + debts(r))[0, part] for r in range(ranks)]
        start = debts(0)[0, part]
        result, left, owners = model(kind, ps, ranks, start)
        owned = np.zeros(size, np.int64)
        for r, (fine, data, owed, theirs) in enumerate(outcomes):
            assert fine
            assert bits(data[part]) == bits(result), (i, r)
            assert bits(owed[i][0]) == bits(left[r]), (i, r)
            changed = theirs[part] != start
            assert np.array_equal(theirs[part][changed], owners[changed])
            owned += changed
        assert np.array_equal(owned, owners != start)


kinds = pytest.mark.parametrize("kind", KINDS, ids=describe)


@kinds
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_bytes_of_the_model(codecs, kind, ranks):
    check_all_reduce(kind, run(ranks, all_reduce(codecs.Simple(**kind))))


@each_value
@kinds
@pytest.mark.parametrize("way", ["direct", "tcp"])
def test_result_is_independent_of_way_and_segments(codecs, kind, way):
    job = all_reduce(codecs.Simple(**kind))
    check_all_reduce(kind, run(3, job, **WAYS[way], segment_bytes=700))


@kinds
def test_on_nodes_there_is_one_result(codecs, kind):
    """The result is that of the nodes' sums, as if nodes were ranks."""
    outcomes = run(4, all_reduce(codecs.Simple(**kind)), **options("mixed"))
    for i, (begin, size) in enumerate(zip(OFFSETS[:-1], SIZES, strict=True)):
        part = slice(begin, begin + size)
        ps, start = [], debts(0)[0, part]
        for node in ([0, 2], [1, 3]):
            p = sum(gradient(r)[0, part] for r in node)
            # A residual is on the rank that encodes the value: where it has changed, no other rank
            # has written. Where it has not, either rank's residual may have been applied.
            paid = [outcomes[r][2][i][0] != debts(r)[0, part] for r in node]
            first = share_of(outcomes, i, node[0], part, paid[0], paid[1])
            ps.append(p + np.where(first, *(debts(r)[0, part] for r in node)))
        result, _, _ = model(kind, ps, 4, start)
        for fine, data, _, _ in outcomes:
            assert fine
            assert bits(data[part]) == bits(result), i


def share_of(outcomes, tensor, rank, part, ours, theirs) -> np.ndarray:
    """Return the values that a node's first rank encodes, from where residuals have changed."""
    numel = ours.size
    cut = int(np.argmax(theirs)) if theirs.any() else numel
    last = numel - int(np.argmax(ours[::-1])) if ours.any() else 0
    assert last <= cut
    # The cut lies in between, where neither has changed, at a multiple of the granularity of cuts.
    return np.arange(numel) < cut


@kinds
def test_both_halves(codecs, kind):
    """Rows go through reduce_scatter and all_gather."""
    ranks, codec = 3, codecs.Simple(**kind)

    def job(c):
        data, owed = gradient(c.rank, ranks), by_tensor(debts(c.rank, ranks))
        out = np.empty(OFFSETS[-1], np.float32)
        fine = c.reduce_scatter_coded(data, out, pieces(codec, owed), seed=SEED, step=STEP)
        row, rows = gradient(c.rank)[0], np.empty((ranks, OFFSETS[-1]), np.float32)
        debt = by_tensor(debts(c.rank))
        fine &= c.all_gather_coded(row, rows, pieces(codec, debt), seed=SEED, step=STEP)
        return fine, out, owed, rows, debt

    outcomes = run(ranks, job, segment_bytes=700)
    assert all(outcome[0] for outcome in outcomes)
    for i, (begin, size) in enumerate(zip(OFFSETS[:-1], SIZES, strict=True)):
        part = slice(begin, begin + size)
        for owner in range(ranks):
            ps = [(gradient(r, ranks) + debts(r, ranks))[owner, part] for r in range(ranks)]
            result, left, _ = model(kind, ps, ranks, None)
            assert bits(outcomes[owner][1][part]) == bits(result)
            assert all(bits(outcomes[r][2][i][owner]) == bits(left[r]) for r in range(ranks))
            p = (gradient(owner) + debts(owner))[0, part]
            alone, left, _ = model(kind, [p], 1, None)
            assert all(bits(outcome[3][owner, part]) == bits(alone) for outcome in outcomes)
            assert bits(outcomes[owner][4][i][0]) == bits(left[0])


@pytest.mark.parametrize("combine", ["recode", "gather"])
def test_keys(codecs, combine):
    """Each encoder uses the seed that hop_seed in coded.h documents."""
    ranks = 3
    codec = codecs.Simple(combine)
    codecs.take_keys()
    run(ranks, all_reduce(codec))
    expected = {_test.hop_seed(SEED, r) for r in range(ranks)}
    if combine == "recode":
        expected.add(_test.hop_seed(SEED, -1))
    assert set(codecs.take_keys()) == expected


def test_only_the_used_bytes_travel(codecs):
    numel = 1 << 16

    def sent(c, codec):
        x = np.zeros(numel, np.float32)
        x[:: 1 << 8] = c.rank + 1
        c.barrier()
        before = c.wire_bytes()
        c.all_reduce_coded(x, codec)
        return c.wire_bytes() - before

    for combine in ("recode", "gather"):
        codec = codecs.Simple(combine, variable=True, granule=1 << 14)
        used = 256 * 8 + 4
        for n in run(2, sent_by(sent, codec), **WAYS["tcp"]):
            assert used <= n < 2 * used + 1500, "payload, frames and sizes"


def sent_by(job, codec):
    return lambda c: job(c, codec)


@pytest.mark.parametrize("combine", ["recode", "gather"])
@pytest.mark.parametrize("way", ["direct", "tcp"])
def test_a_size_that_cannot_be_is_an_error_on_every_rank(codecs, combine, way):
    def job(c):
        codec = codecs.Simple(combine, variable=True, lies=c.rank == 1)
        c.all_reduce_coded(np.ones(1000, np.float32), codec)

    for error in attempt(3, job, **WAYS[way]):
        assert isinstance(error, pycomm.WireMismatch)
        # The error comes from a peer before it receives, or from rank 1 itself when it decodes.
        assert re.search(r"rank 1 (is to send|sent a payload of simple .* has) 6 bytes", str(error))


def test_between_processes(codecs):
    kind = KINDS[2]
    check_all_reduce(kind, run_processes(3, all_reduce(codecs.Simple(**kind)), transport="tcp"))


@pytest.mark.parametrize("way", ["direct", "tcp"])
def test_the_rank_that_stands_still_is_named(codecs, way):
    """The others have sent what they could, and wait for it."""

    def job(c):
        codec = codecs.Simple("recode", rests=600 if c.rank == 1 else 0)
        c.barrier()
        c.all_reduce_coded(np.ones(3000, np.float32), codec, timeout=0.3)

    for error in attempt(3, job, **WAYS[way])[::2]:
        assert isinstance(error, pycomm.Timeout)
        assert (
            "\n  rank 1 does not progress: in all_reduce #2 (avg of 3000 float32, simple)"
            in str(error)
        )
        assert "\n  ranks 0, 2 wait: " in str(error)


def test_the_rank_whose_codec_is_slow_is_named(codecs):
    def job(c):
        codec = codecs.Simple("recode", rests=3 if c.rank == 1 else 0)
        for _ in range(10):
            c.all_reduce_coded(np.ones(300, np.float32), codec)
        return rank_stats(c.core.trace())

    health = compare(run(3, job, **WAYS["window"]))
    assert health is not None
    assert (health.finding.rank, health.finding.cause) == (1, "codec")
