"""budget= bits per value: bits go where measured energy makes them worth most.

Reverse water-filling (Cover and Thomas, "Elements of Information Theory", section 10.3.3) over what
codecs can do: minimise the sum of energy * error(codec)^2 over the parameters, where the sum of
payloads stays within the budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass(frozen=True)
class Choice:
    """What one codec costs and does: bits per value, and relative squared error."""

    bits: float
    error: float


def hull(choices: Sequence[Choice]) -> list[int]:
    """Return the places of the choices worth making, from the fewest bits up.

    These lie on the lower convex hull of error over bits: each next one buys less per bit.
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
    """Return the place of each parameter's choice.

    Starts with the fewest bits and buys, again and again, what takes the most error away per bit
    and still fits. On the hull's slopes that is optimal but for the last purchase.

    Args:
        energies: sum of squares of each parameter's gradient.
        numels: its number of values.
        choices: one list for all.
        budget: bits per value, on average over all values.

    Raises:
        ValueError: not even the fewest bits fit.
    """
    ladder = hull(choices)
    left = budget * sum(numels) - choices[ladder[0]].bits * sum(numels)
    if left < 0:
        least = choices[ladder[0]].bits
        raise ValueError(f"budget={budget} bits a value: the smallest candidate takes {least:.4g}")
    places = [0] * len(numels)

    def offer(i: int) -> tuple[float, int]:
        # Per value and bit; parameters with the same worth go in order.
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
    """The allocation in force, and when another one takes its place.

    Args:
        bits: the budget.
        choices: what the candidates cost and do.
    """

    bits: float
    choices: Sequence[Choice]
    gain: float = 0.1
    """A new allocation must take this part of the expected error away; else the old one stays."""
    smooth: float = 0.5
    """Weight of what was measured before."""
    places: dict[str, int] = field(default_factory=dict)
    energies: dict[str, float] = field(default_factory=dict)

    def measured(self, energies: Mapping[str, float], numels: Mapping[str, int]) -> bool:
        """Take measured energies; return whether the allocation changes.

        Args:
            energies: sum of squares of each parameter's gradient, the same on all ranks. One that
                is not finite, from a step that overflowed, changes nothing.
            numels: number of values.
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
