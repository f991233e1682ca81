"""Tests of samples: the values that take part in a check, and the numbers of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pycomm.codecs import codec
from pycomm.policy import Decision, Guard, Parameter
from pycomm.policy.samples import Sampler, qualities

NUMELS = {"a": 4000, "b": 100_000, "c": 256, "d": 30_000, "e": 50_000}


def decisions(**specs: str) -> list[Decision]:
    return [
        Decision(Parameter(name, (n,), torch.float32), codec(specs.get(name, "int8")), "")
        for name, n in NUMELS.items()
    ]


def sampler(**options: Any) -> Sampler:
    return Sampler(Guard(**options), None)


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
