"""Whom the quality guard throws out: nobody whose result is as its codec's errors say, over all
codecs, numbers of ranks and kinds of gradients; and who is really bad.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from math import inf, sqrt
from typing import Any

import pytest
import torch

import pycomm
from pycomm.codecs import ALIASES, codec
from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec
from pycomm.policy import Decision, Guard, Parameter
from pycomm.policy.checks import Checks, Quality, qualities
from pycomm.policy.quality import nominal_error, reduced_error
from tests.codecs.cases import SPECS
from tests.extent import FULL

SIDE = 128
NUMEL = SIDE**2
RANKS = (1, 2, 4, 7)
CODECS = [
    spec
    for spec in dict.fromkeys(
        [*SPECS, *ALIASES, "eden:bits=1", "eden:bits=2,size=128", "int2:rounding=stochastic"]
    )
    if pycomm.codec(spec).combine != "factors" and nominal_error(pycomm.codec(spec)) > 0
]


class OfTwo:
    """What a check asks of a group before it writes a line."""

    def rank(self) -> int:
        return 1


@cache
def gradients(kind: str, ranks: int) -> list[torch.Tensor]:
    """One for each rank: independent, equal, half of each, or opposite but for a tenth.

    Nobody may write to them, since they are made once."""
    g = torch.Generator().manual_seed(ranks)
    common = torch.randn(NUMEL, generator=g)
    own = [torch.randn(NUMEL, generator=g) for _ in range(ranks)]
    if kind == "heavy tails":  # Student's t with 3 degrees of freedom
        return [x / (torch.randn(3, NUMEL, generator=g).square().sum(0) / 3).sqrt() for x in own]
    if kind == "outliers":  # one in a thousand is a hundred times larger
        large = [torch.rand(NUMEL, generator=g) < 1e-3 for _ in range(ranks)]
        return [torch.where(many, 100 * x, x) for x, many in zip(own, large, strict=True)]
    weight = {"independent": 0.0, "equal": 1.0, "half equal": sqrt(0.5), "cancel": 0.1}[kind]
    mixed = [weight * common + sqrt(1 - weight**2) * x for x in own]
    if kind == "cancel" and ranks > 1:
        # They differ by much and their sum is small, as late in training.
        total = torch.stack(mixed).sum(0) * 0.9
        mixed = [x - total / ranks for x in mixed]
    return mixed


def reduced(codec: Codec, inputs: list[torch.Tensor], step: int) -> torch.Tensor:
    """The average as an all-reduce makes it: contributions are coded, and their sum by an owner."""
    ranks = len(inputs)
    total = torch.zeros(NUMEL)
    for rank, x in enumerate(inputs):
        codec.decode_add(codec.encode(x, key=RandomKey(seed=100 + rank, step=step)), total)
    total /= ranks
    if codec.combine != "recode":
        return total
    return codec.decode(codec.encode(total, key=RandomKey(seed=99, step=step)), NUMEL)


def checked(
    codec: Codec, inputs: list[torch.Tensor], guard: Guard, checks: int
) -> Iterator[tuple[Quality, str]]:
    """What check after check finds, and complains about."""
    due = torch.stack(inputs).mean(0)
    judge = Checks(guard, OfTwo(), lambda: 0.0)  # type: ignore[arg-type]
    decision = Decision(Parameter("w", (SIDE, SIDE), torch.float32), codec, "")
    for step in range(0, checks * guard.every, guard.every):
        judge.begin(step, [decision])
        part = judge.wanted["w"]
        lost, d = (reduced(codec, inputs, step) - due)[part].double(), due[part].double()
        sent = sum(float((x[part].double() / len(inputs)).square().sum()) for x in inputs)
        found = Quality(
            step=step,
            error=0.0,
            cosine=1.0,
            coding=float(lost.norm() / d.norm()),
            residual=0.0,
            spread=sent / float(d.square().sum()),
        )
        yield found, judge.warning("w", codec, found)


def whole(codec: Codec, inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Error of the whole parameter, and what it would be of normal values."""
    due = torch.stack(inputs).mean(0)
    energy = float(due.square().sum())
    spread = sum(float((x / len(inputs)).square().sum()) for x in inputs) / energy
    off = (reduced(codec, inputs, 0) - due).norm() / sqrt(energy)
    return float(off), reduced_error(codec, spread)


KINDS = ["independent", "equal", "half equal", "cancel", "heavy tails", "outliers"]


def cases(spec: str, kinds: list[str]) -> list[tuple[str, int]]:
    """Return every kind of gradients, each with one number of ranks, which takes turns from codec
    to codec; with all of them if the extent is full."""
    if FULL:
        return list(product(kinds, RANKS))
    first = CODECS.index(spec)
    return [(kind, RANKS[(first + i) % len(RANKS)]) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("spec", CODECS)
def test_a_codec_with_its_stated_error_stays(spec):
    codec = pycomm.codec(spec)
    for kind, ranks in cases(spec, KINDS):
        inputs = gradients(kind, ranks)
        off, expected = whole(codec, inputs)
        # On tails many are worse than on normal values, which is what the guard is for.
        if off > 1.05 * expected and kind in ("heavy tails", "outliers"):
            continue
        for found, complaint in checked(codec, inputs, Guard(), 6):
            assert not complaint, (kind, ranks, found, expected)


@pytest.mark.parametrize("spec", CODECS)
def test_an_all_reduce_has_the_error_of_its_codings(spec):
    """Of independent, equal and mixed contributions, to a tenth where it should be exact."""
    codec = pycomm.codec(spec)
    for kind, ranks in cases(spec, KINDS[:4]):
        off, expected = whole(codec, gradients(kind, ranks))
        assert off <= 1.1 * expected, (kind, ranks)
        if codec.unbiased:
            assert off >= 0.9 * expected, (kind, ranks)


BAD = {
    # One value of each block is so large that the noise of the others is larger than they are.
    "int3:rounding=stochastic": (1.0, 64, 6.0),
    # Below what the format or its scales can show.
    "fp16": (1e-9, 0, 0.0),
    "int8": (1e-32, 0, 0.0),
    "fp8": (1e-32, 0, 0.0),
    "mxfp4": (1e-42, 0, 0.0),
}


@pytest.mark.parametrize("spec", BAD)
@pytest.mark.parametrize("ranks", [2, 4])
def test_who_is_really_bad_is_thrown_out(spec, ranks):
    codec, (size, block, large) = pycomm.codec(spec), BAD[spec]
    inputs = [size * x for x in gradients("independent", ranks)]
    for x in inputs if block else ():
        x[::block] = large
    found = [complaint for _, complaint in checked(codec, inputs, Guard(), 2)]
    assert not found[0]
    assert "is off by" in found[1]


def test_codecs_whose_errors_are_above_one_have_no_limit():
    assert Guard().limit_of(1.0, 1.2) == inf
    assert Guard().limit_of(0.9, 0.6) == 1.0
    assert Guard().limit_of(0.9, 1.2) == pytest.approx(1.8)
    assert Guard().limit_of(0.2, 0.3) == 0.6
    assert Guard(limit=0.3).limit_of(2.0, 3.0) == 0.3


def test_a_good_check_between_two_bad_ones_forgives():
    judge = Checks(Guard(), OfTwo(), lambda: 0.0)  # type: ignore[arg-type]
    codec = pycomm.codec("int8")
    bad, good = (
        Quality(step=0, error=0.0, cosine=1.0, coding=coding, residual=0.0) for coding in (5.0, 0.0)
    )
    complaints = [judge.warning("w", codec, found) for found in (bad, good, bad, bad)]
    assert [bool(complaint) for complaint in complaints] == [False, False, False, True]


def test_a_suspect_is_checked_again_soon():
    judge = Checks(Guard(every=16), OfTwo(), lambda: 0.0)  # type: ignore[arg-type]
    bad = Quality(step=0, error=0.0, cosine=1.0, coding=5.0, residual=0.0)
    assert sorted(judge.begin(16, decisions())) == sorted(NUMELS)
    judge.wanted.clear()
    assert not judge.begin(19, decisions())
    judge.warning("b", codec("int8"), bad)
    assert [name for step in (17, 18, 20) for name in judge.begin(step, decisions())] == []
    assert list(judge.begin(19, decisions())) == ["b"]
    assert "b" in judge.warning("b", codec("int8"), bad)


# ------------------------------------------------------------------------------------------ samples
# Tests of samples: the values that take part in a check, and the numbers of it.


NUMELS = {"a": 4000, "b": 100_000, "c": 256, "d": 30_000, "e": 50_000}


def decisions(**specs: str) -> list[Decision]:
    return [
        Decision(Parameter(name, (n,), torch.float32), codec(specs.get(name, "int8")), "")
        for name, n in NUMELS.items()
    ]


def sampler(**options: Any) -> Checks:
    return Checks(Guard(**options), OfTwo(), lambda: 0.0)  # type: ignore[arg-type]


def test_all_take_part_in_turn():
    s = sampler(parameters=2)
    turns = []
    for step in range(5):
        s.choose(step, decisions())
        turns.append(sorted(s.wanted))
    assert turns == [["a", "b"], ["c", "d"], ["a", "e"], ["b", "c"], ["d", "e"]]


def test_exact_ones_do_not_and_suspects_come_first():
    s = sampler(parameters=2)
    s.choose(1, decisions(a="fp32", c="fp32"), first=["e", "a"])
    assert sorted(s.wanted) == ["b", "e"]
    s.choose(2, decisions(**dict.fromkeys(NUMELS, "fp32")))
    assert s.wanted == {}


@pytest.mark.parametrize("every", [1, 16, 100])
def test_bytes_are_bounded(every):
    s = sampler(every=every, share=0.05)
    payload = sum(d.encoded_bytes for d in decisions())
    s.choose(every, decisions())
    values = sum(part.stop - part.start for part in s.wanted.values())
    assert 0 < 8 * values <= 0.05 * every * payload


def test_slices_lie_inside_and_wander():
    s = sampler(parameters=5, every=64)
    seen = set()
    for step in range(50):
        s.choose(step, decisions())
        for name, part in s.wanted.items():
            assert 0 <= part.start < part.stop <= NUMELS[name]
        seen.add(s.wanted["b"].start)
    assert len(seen) == 50


@pytest.mark.parametrize("spec", ["int8", "eden:bits=1", "topk:0.01"])
def test_slices_have_whole_blocks_and_enough_values(spec):
    """A part of a block says nothing: what rotates spreads the error of its large values."""
    s, given = sampler(), decisions(**dict.fromkeys(NUMELS, spec))
    unit = max(codec(spec).granule, 1)
    for step in range(0, 320, 16):
        s.choose(step, given)
        assert s.wanted
        for name, part in s.wanted.items():
            assert part.start % unit == 0
            assert part.stop % unit == 0 or part.stop == NUMELS[name]
            assert part.stop - part.start >= min(256, NUMELS[name] - part.start)


def numbers(result: torch.Tensor, exact: torch.Tensor, due: torch.Tensor) -> list[float]:
    pairs = [(result - exact,) * 2, (exact,) * 2, (result,) * 2, (result, exact)]
    pairs += [(result - due,) * 2, (due,) * 2, (due - exact,) * 2]
    sent = 3 * float(torch.dot(due, due))
    return [*(float(torch.dot(a, b)) for a, b in pairs), sent]


def test_numbers_become_errors_and_cosines():
    exact = torch.tensor([3.0, 4.0])
    due, result = torch.tensor([6.0, 8.0]), torch.tensor([6.0, 0.0])
    found = qualities(5, ["x"], numbers(result, exact, due))["x"]
    assert found.step == 5
    assert found.error == pytest.approx(1.0)  # (3, -4) of (3, 4)
    assert found.cosine == pytest.approx(0.6)
    assert found.coding == pytest.approx(0.8)  # 8 of 10
    assert found.residual == pytest.approx(1.0)
    assert found.spread == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_nothing_is_said_of_zeros_and_overflows(bad):
    exact = torch.full((2,), bad)
    good = numbers(torch.ones(2), torch.ones(2), torch.ones(2))
    found = qualities(5, ["x", "y"], numbers(exact, exact, exact) + good)
    assert list(found) == ["y"]
    assert found["y"].error == 0
