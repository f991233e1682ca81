"""Allocation of bits per value by measured energy, for budget=.

It is reverse water-filling (Cover and Thomas, "Elements of Information Theory", section 10.3.3)
over the available codecs: minimise the sum of energy * error(codec)^2 over the parameters, while
the sum of payloads stays within the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(frozen=True)
class Choice:
    """Cost and error of one codec: bits per value, and relative squared error."""

    bits: float
    error: float


def hull(choices: Sequence[Choice]) -> list[int]:
    """Return the indices of the useful choices, from the fewest bits up.

    These lie on the lower convex hull of error over bits: each reduces the error less per bit than
    the one before.
    """
    found: list[int] = []
    for i in sorted(range(len(choices)), key=lambda i: (choices[i].bits, choices[i].error)):
        if found and choices[i].error >= choices[found[-1]].error:
            continue
        while len(found) > 1 and _gain(choices, found[-2], found[-1]) <= _gain(
            choices, found[-1], i
        ):
            found.pop()
        found.append(i)
    return found


def _gain(choices: Sequence[Choice], a: int, b: int) -> float:
    return (choices[a].error - choices[b].error) / (choices[b].bits - choices[a].bits)


def allocate(
    energies: Sequence[float], numels: Sequence[int], choices: Sequence[Choice], budget: float
) -> list[int]:
    """Return the index of each parameter's choice.

    The greedy search starts with the fewest bits and repeatedly takes the step that removes the
    most error per bit and still fits. On the hull that is optimal but for the last step.

    Args:
        energies: sum of squares of each parameter's gradient.
        numels: number of values of each parameter.
        choices: the choices, the same for all parameters.
        budget: bits per value, on average over all values.

    Raises:
        ValueError: not even the fewest bits fit.
    """
    ladder = hull(choices)
    left = budget * sum(numels) - choices[ladder[0]].bits * sum(numels)
    if left < 0:
        least = choices[ladder[0]].bits
        raise ValueError(
            f"budget={budget} bits per value is less than the smallest candidate takes: give "
            f"{least:.4g} or more"
        )
    places = [0] * len(numels)

    def offer(i: int) -> tuple[float, int]:
        # The gain per value and bit; parameters with equal gains are taken in order.
        a, b = ladder[places[i]], ladder[places[i] + 1]
        return -energies[i] / numels[i] * _gain(choices, a, b), i

    offers = [offer(i) for i in range(len(numels)) if len(ladder) > 1]
    heapify(offers)
    while offers:
        _, i = heappop(offers)
        a, b = choices[ladder[places[i]]], choices[ladder[places[i] + 1]]
        cost = (b.bits - a.bits) * numels[i]
        if cost > left:
            continue  # a smaller parameter may still fit
        left -= cost
        places[i] += 1
        if places[i] + 1 < len(ladder):
            heappush(offers, offer(i))
    return [ladder[place] for place in places]


def distortion(
    energies: Sequence[float], choices: Sequence[Choice], places: Sequence[int]
) -> float:
    """Return the expected sum of squared errors of an allocation."""
    return sum(e * choices[i].error for e, i in zip(energies, places, strict=True))


@dataclass
class Budget:
    """The current allocation, and the rule by which a new one replaces it.

    Args:
        bits: budget in bits per value.
        choices: cost and error of the candidates.
    """

    bits: float
    choices: Sequence[Choice]
    gain: float = 0.1
    """Fraction of the expected error that a new allocation must remove; else the old one stays."""
    smooth: float = 0.5
    """Weight of earlier measurements."""
    places: dict[str, int] = field(default_factory=dict)
    energies: dict[str, float] = field(default_factory=dict)

    def measured(self, energies: Mapping[str, float], numels: Mapping[str, int]) -> bool:
        """Record measured energies; return whether the allocation changes.

        Args:
            energies: sum of squares of each parameter's gradient, the same on all ranks. Energies
                that are not finite, from a step that overflowed, are ignored.
            numels: number of values of each parameter.
        """
        for name, energy in energies.items():
            if energy == energy and energy != float("inf"):
                before = self.energies.get(name, energy)
                self.energies[name] = self.smooth * before + (1 - self.smooth) * energy
        names = [name for name in numels if name in self.energies]
        if not names:
            return False
        known = [self.energies[name] for name in names]
        new = allocate(known, [numels[name] for name in names], self.choices, self.bits)
        if all(name in self.places for name in names):
            old = [self.places[name] for name in names]
            least = (1 - self.gain) * distortion(known, self.choices, old)
            if distortion(known, self.choices, new) > least:
                return False
        self.places = dict(zip(names, new, strict=True))
        return True
