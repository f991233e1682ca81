"""Bits go where the energy is: the budget is met, and no other way is better."""

from __future__ import annotations

import itertools

import pytest
import torch

from pycomm.codecs import codec
from pycomm.policy import Parameter, Policy
from pycomm.policy.budget import Budget, Choice, allocate, distortion, hull
from pycomm.policy.codec_selection import BIT_CANDIDATES, Allotted, Bounded, select_codecs
from pycomm.policy.quality import bits, reduced_error
from pycomm.policy.samples import Quality

# Bits 2 to 8: each bit takes the squared error down to a quarter.
CHOICES = [Choice(b + 0.25, 4.0 ** (2 - b) / 8) for b in range(2, 9)]
ENERGIES = [1e4, 1.0, 30.0, 1e-4, 2.0]
NUMELS = [1000, 50_000, 3000, 20_000, 800]


def spent(places: list[int], numels: list[int] = NUMELS) -> float:
    return sum(CHOICES[p].bits * n for p, n in zip(places, numels, strict=True)) / sum(numels)


@pytest.mark.parametrize("budget", [2.25, 2.5, 4.25, 6.0, 8.25, 100.0])
def test_the_budget_is_met(budget):
    places = allocate(ENERGIES, NUMELS, CHOICES, budget)
    assert spent(places) <= budget + 1e-9
    if budget < 8:
        # What is left over would not pay for one bit more of the smallest parameter that has room.
        left = (budget - spent(places)) * sum(NUMELS)
        assert left < min(n for n, p in zip(NUMELS, places, strict=True) if p < len(CHOICES) - 1)
    else:
        assert places == [len(CHOICES) - 1] * len(NUMELS)


def test_it_beats_the_same_bits_for_all():
    uniform = [CHOICES.index(next(c for c in CHOICES if c.bits == 4.25))] * len(NUMELS)
    best = allocate(ENERGIES, NUMELS, CHOICES, 4.25)
    # The parameter with nearly all the energy is small, so 8 bits for it cost little.
    assert distortion(ENERGIES, CHOICES, best) < 0.05 * distortion(ENERGIES, CHOICES, uniform)


def test_the_allocation_is_optimal_for_equal_sizes():
    energies, numels, budget = [9.0, 1.0, 0.3, 40.0], [100] * 4, 4.25
    best = distortion(energies, CHOICES, allocate(energies, numels, CHOICES, budget))
    for places in itertools.product(range(len(CHOICES)), repeat=4):
        if spent(list(places), numels) <= budget:
            assert distortion(energies, CHOICES, places) >= best * (1 - 1e-12)


def test_choices_that_never_pay_are_left_out():
    choices = [Choice(8, 0.01), Choice(4, 0.2), Choice(2, 0.5), Choice(5, 0.25), Choice(6, 0.18)]
    assert hull(choices) == [2, 1, 0]


def test_too_small_a_budget_is_refused():
    with pytest.raises(ValueError, match=r"budget=1.*smallest candidate takes: give 2\.25 or more"):
        allocate(ENERGIES, NUMELS, CHOICES, 1.0)


def test_small_changes_of_energy_change_nothing():
    numels = {"a": 1000, "b": 1000}
    budget = Budget(4.25, CHOICES)
    assert budget.measured({"a": 100.0, "b": 1.0}, numels)
    before = dict(budget.places)
    assert before["a"] > before["b"]
    assert not budget.measured({"a": 90.0, "b": 1.2}, numels)
    assert not budget.measured({"a": float("nan"), "b": float("inf")}, numels)
    assert budget.places == before
    changed = [budget.measured({"a": 1.0, "b": 100.0}, numels) for _ in range(8)]
    assert any(changed)
    assert budget.places["a"] < budget.places["b"]


class Whole:
    """A parameter that is all of its bucket but for a value before it."""

    name, offset = "w", 1

    def __init__(self, numel: int) -> None:
        self.numel = numel


@pytest.mark.parametrize(("rows", "columns"), [(4096, 64), (512, 1000), (1024, 4), (3, 5), (1, 1)])
@pytest.mark.parametrize("place", [0, -1])
def test_energies_are_measured_whatever_the_shape(rows, columns, place):
    """One large column, where a sample at equal distances would see it always or never."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[:, place] *= 30
    selection = Allotted(4.25, [codec("int4"), codec("int8")])
    selection.enter(Parameter("w", (rows, columns), torch.float32))
    found = []
    for _ in range(2 * Allotted.EVERY):
        selection.step(0.1, lambda own: found.append(own) or [own], lambda _: 0)
        selection.probe(torch.cat((torch.tensor([1e6]), x.view(-1))), [Whole(x.numel())])
    true = float(x.square().sum())
    assert len(found) == 2
    for (energy,) in found:
        # Of 4096 values 4 to 64 are of the column: a quarter of a few is much.
        assert 0.2 * true < energy < 3 * true
    if columns == 64:
        assert all(abs(energy / true - 1) < 0.5 for (energy,) in found)
        assert found[0] != found[1]


def test_budget_candidates_owe_nothing_and_err_less():
    chosen = select_codecs(Policy(budget=5.15))
    assert isinstance(chosen, Allotted)
    assert all(c.unbiased for c in chosen._codecs)
    energies, numels = [9.0, 1.0, 0.3, 40.0], [4096] * 4
    promised = {}
    for name, codecs in {"eden": chosen._codecs, "int": map(codec, BIT_CANDIDATES)}.items():
        choices = [Choice(bits(c), reduced_error(c) ** 2) for c in codecs]
        places = allocate(energies, numels, choices, 5.25)
        promised[name] = distortion(energies, choices, places)
    assert promised["eden"] < 0.75 * promised["int"]


def test_energies_of_all_ranks_count():
    allotted = Allotted(6.5, [codec("int4"), codec("int8")])
    for name in "ab":
        allotted.enter(Parameter(name, (100, 100), torch.float32))
    # The first rank alone sees that "a" has nearly all the energy; on the last "b" has more.
    for _ in range(2):
        allotted.step(1.0, lambda _: [[1e4, 1.0], [1.0, 2.0]], lambda _: 0)
    assert [allotted.codec(name)[0] for name in "ab"] == [codec("int8"), codec("int4")]


@pytest.mark.parametrize(("error", "spec"), [(0.29, "int4"), (0.3, "int4"), (0.31, "int8")])
def test_an_error_above_the_bound_takes_more_bits(error, spec):
    bounded = Bounded(0.3, [codec("int4"), codec("int8")])
    assert bounded.codec("a")[0] == codec("int4")
    found = Quality(step=0, error=error, cosine=1.0, coding=error, residual=0.0)
    assert bounded.checked({"a": found}) == (spec != "int4")
    assert bounded.codec("a")[0] == codec(spec)
