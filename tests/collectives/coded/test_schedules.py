"""all_reduce_coded by other schedules than two-shot of all ranks: by nodes, and in one shot.

Inside a node sums are exact, and coded between the nodes. In one shot every rank does what owners
do: the same bits in one round in place of two.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import pycomm
from pycomm import _C, _test
from pycomm.communicator import Piece
from pycomm.errors import WireMismatch
from tests.codecs.cases import SPECS
from tests.collectives.coded.test_collectives import OWNED, TENSORS, check, reduce_once
from tests.collectives.test_hierarchical import NODES, SITES, options, sited
from tests.collectives.ways import bits
from tests.extent import each_pair
from tests.ranks import attempt, run, run_processes

LEVELS = [name for name in NODES if name not in ("flat", "one")]


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("segment_bytes", [0, 700])
def test_bytes_of_the_model(name, segment_bytes):
    nodes = NODES[name]
    job = reduce_once(list(TENSORS), OWNED)
    outcomes = run(len(nodes), job, **options(name, segment_bytes=segment_bytes))
    check(outcomes, OWNED, nodes=nodes)


@pytest.mark.parametrize("shared", [(), (0,), (0, 1, 2, 3)], ids=len)
@pytest.mark.parametrize("segment_bytes", [0, 8192])
def test_between_processes(shared, segment_bytes):
    """Ranks of a node read the values of those whose bucket is in the heap of their group."""
    more = options("2+2", segment_bytes=segment_bytes) | {"transport": "shm"}
    outcomes = run_processes(4, reduce_once(list(TENSORS), OWNED, shared=shared), **more)
    check(outcomes, OWNED, nodes=NODES["2+2"])


def test_values_that_the_kernel_reads_have_the_same_sums():
    def reduce(c):
        x = np.random.default_rng(c.rank).standard_normal(1 << 20, np.float32)
        c.all_reduce_coded(x, pycomm.codec("int8"))
        return bits(x)

    processes = run_processes(4, reduce, **(options("2+2") | {"transport": "shm"}))
    assert processes == run(4, reduce, **options("2+2"))


def test_each_byte_of_a_payload_goes_over_a_link_once():
    """Two nodes of two ranks exchange half the flat traffic, and every rank sends its part."""

    def sent(c):
        before = c.wire_bytes()
        c.all_reduce_coded(np.ones(1 << 18, np.float32), pycomm.codec("int8"))
        c.barrier()
        return c.wire_bytes() - before

    payload = pycomm.codec("int8").encoded_bytes(1 << 18)
    by_levels = run(4, sent, **options("2+2"))
    flat = run(4, sent, **options("2+2", algo="flat"))
    assert all(0.5 * payload <= n < 0.6 * payload for n in by_levels)
    assert all(n >= 0.9 * payload for n in flat)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["2+2", "1+3"])
@pytest.mark.parametrize("segment_bytes", [0, 700])
def test_non_finite_values_reach_every_rank(bad, name, segment_bytes):
    def overflow(c):
        x = np.ones(5000, np.float32)
        if c.rank == 1:
            x[1234] = bad
        finite = c.all_reduce_coded(x, pycomm.codec("int4"))
        again = c.all_reduce_coded(np.ones(5000, np.float32), pycomm.codec("int4"))
        return finite, again, bits(x), bool(np.isfinite(x[1234]))

    outcomes = run(4, overflow, **options(name, segment_bytes=segment_bytes))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0][:2] == (False, True)
    assert outcomes[0][3] is False


@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("segment_bytes", [0, 700])
def test_a_rank_that_does_not_come_is_named(lost, segment_bytes):
    """Its own node may wait for it, or another one."""

    def absent(c):
        if c.rank == lost:
            return time.sleep(1.0)
        return c.all_reduce_coded(np.ones(5000, np.float32), pycomm.codec("int8"), timeout=0.5)

    outcomes = attempt(4, absent, **options("2+2", segment_bytes=segment_bytes))
    for error in outcomes[:lost] + outcomes[lost + 1 :]:
        assert isinstance(error, pycomm.Timeout)
        assert f"rank {lost}" in str(error)


@pytest.mark.parametrize("name", ["2+2", "mixed", "3+1", "2+1+2", "hosts of two ranks"])
def test_a_site_codes_its_sum_as_a_rank_would(name):
    sites, _ = SITES[name]
    outcomes = run(len(sites), reduce_once(list(TENSORS), OWNED), **sited(name))
    check(outcomes, OWNED, nodes=sites)


# ---------------------------------------------------------------------------------------- one shot


SENT_TO_ALL = [spec for spec in SPECS if pycomm.codec(spec).combine == "gather"]
RECODED = [spec for spec in SPECS if pycomm.codec(spec).combine == "recode"]
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
@pytest.mark.parametrize("codec", RECODED)
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
