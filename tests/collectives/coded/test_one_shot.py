"""In one shot every rank does what owners do: the same bits in one round in place of two."""

from __future__ import annotations

import numpy as np
import pytest

import pycomm
from pycomm import _C, _test
from pycomm.communicator import Piece
from pycomm.errors import WireMismatch
from tests.codecs.cases import SPECS
from tests.collectives.coded.test_collectives import TENSORS, check, reduce_once
from tests.collectives.test_hierarchical import options
from tests.collectives.ways import bits
from tests.extent import each_pair
from tests.ranks import attempt, run, run_processes

SENT_TO_ALL = [spec for spec in SPECS if pycomm.codec(spec).combine == "gather"]
OWNED = [spec for spec in SPECS if pycomm.codec(spec).combine == "recode"]
DTYPES = ["float32", "float16"]


def shots(algo: str, more: dict[str, object] | None = None) -> dict[str, object]:
    return {"transport": "shm", "algo": algo, **(more or {})}


def sums(codecs: dict[int, str], average: bool, dtype: str):
    """Return a job whose result is the bits of a bucket's sum, and the algorithm that made it."""

    def job(c):
        values = [np.random.default_rng([c.rank, t]).standard_normal(TENSORS[t]) for t in codecs]
        data = np.concatenate(values).astype(dtype)
        pieces = _C.Pieces()
        for t, codec in codecs.items():
            pieces.add(TENSORS[t], pycomm.codec(codec).native, tensor=t)
        kind = _C.DType.__members__[dtype]
        more = {"average": average, "seed": 5, "step": 3, "dtype": kind}
        fine = c.core.run_coded("all_reduce", data.ctypes.data, 0, pieces, **more)
        return fine, bits(data), c.trace()["records"][-1]["algo"]

    return job


@each_pair
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", OWNED)
def test_bits_are_those_of_two_shots(codec, dtype, ranks):
    job = sums(dict.fromkeys(TENSORS, codec), ranks % 2 == 0, dtype)
    two = run(ranks, job, **shots("two_shot"))
    one = run(ranks, job, **shots("one_shot", {"segment_bytes": 4 * 700}))
    assert [algo for *_, algo in two] == ["two_shot"] * ranks
    assert [algo for *_, algo in one] == ["one_shot"] * ranks
    assert [each[:2] for each in one] == [each[:2] for each in two]


@pytest.mark.parametrize("average", [True, False])
def test_pieces_of_one_bucket_have_codecs_of_their_own(average):
    codecs = dict(zip(TENSORS, ["int8", "int4", "fp8", "fp16", "fp32", "eden:bits=4"], strict=True))
    job = reduce_once(list(TENSORS), codecs, average=average, feedback=False)
    for ranks in (1, 2, 3):
        check(run(ranks, job, **shots("one_shot")), codecs, average, feedback=False)


def test_between_processes():
    codecs = dict.fromkeys(TENSORS, "int4:block=64,rounding=stochastic")
    job = reduce_once(list(TENSORS), codecs, feedback=False)
    for ranks in (2, 3):
        outcomes = run_processes(ranks, job, transport="tcp", algo="one_shot")
        check(outcomes, codecs, feedback=False)


@pytest.mark.parametrize("spec", SENT_TO_ALL)
def test_what_all_ranks_get_anyway_is_no_reason(spec):
    """A bucket with such a piece goes as before, whatever is asked for."""
    codecs = {**dict.fromkeys(TENSORS, "int8"), 1: spec}
    one, two = (run(3, sums(codecs, True, "float32"), **shots(a)) for a in ("one_shot", "two_shot"))
    assert one == two


def test_a_residual_of_an_owner_needs_an_owner():
    codecs = dict.fromkeys(TENSORS, "int4")
    check(run(3, reduce_once(list(TENSORS), codecs), **shots("one_shot")), codecs)


def test_ranks_that_differ_in_it_get_an_error():
    """They would take what is a contribution for a result."""

    def job(c):
        data = np.ones(1000, np.float32)
        kept = np.zeros(1000, np.float32) if c.rank == 1 else None
        piece = Piece(1000, pycomm.codec("int8"), owner_residual=kept)
        c.all_reduce_coded(data, [piece], timeout=30)

    for algo in ("one_shot", "two_shot"):
        for outcome in attempt(2, job, **shots(algo)):
            assert isinstance(outcome, WireMismatch), outcome


def test_between_nodes_the_shards_go_so():
    """The sum of a node is coded as that of a rank, whatever the nodes' ranks do with it."""
    job = sums(dict.fromkeys(TENSORS, "int8"), True, "float32")
    outcomes = run(4, job, **options("2+2"))
    assert [algo for *_, algo in outcomes] == ["hierarchical"] * 4
    assert len({each[1] for each in outcomes}) == 1


# ------------------------------------------------------------------ the choice

MEGABIT = 1e6 / 8


def faster(ranks: int, values: int, round_trip: float, rate: float, known: bool = True) -> str:
    """Return the choice for int8."""
    payload, byte = int(values * 8.25 / 8), 1 / (rate * MEGABIT)
    shared = 2 * (ranks - 1) / ranks if known else 0.0
    one, two = _test.schedule.shot_costs(values, payload, ranks, round_trip / 2, byte, shared)
    return "one" if one < two else "two"


@pytest.mark.parametrize("values", [1, 1000, 1 << 20, 1 << 24, 1 << 26])
@pytest.mark.parametrize("round_trip", [0.001, 0.03, 0.2])
def test_two_ranks_on_a_slow_link_use_one_shot(values, round_trip):
    """Both send as many bytes; the link hides the work."""
    assert faster(2, values, round_trip, 200) == "one"


def test_short_messages_of_many_ranks_use_one_shot():
    assert faster(4, 2000, 0.2, 100) == "one"
    assert faster(4, 1 << 24, 0.2, 100) == "two"
    assert faster(8, 1 << 24, 0.03, 1000) == "two"


@pytest.mark.parametrize("known", [True, False])
def test_a_link_that_may_be_fast_hides_no_work(known):
    assert faster(2, 1 << 26, 0.002, 100_000 if known else 100, known) == "two"
    assert faster(2, 1 << 16, 0.002, 100_000 if known else 100, known) == "one"
    assert faster(2, 1 << 24, 0.2, 100_000 if known else 100, known) == "one"
