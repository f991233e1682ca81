"""The residuals of one model on one rank, by parameter name.

A residual belongs to a parameter's name, not to a bucket: DDP makes new buckets after its first
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pycomm.feedback import storage
from pycomm.feedback.residual import ROLES, Pair, Residual
from pycomm.feedback.rule import Feedback


class Residuals:
    """The residuals of one model on one rank.

    Args:
        rule: the kind of feedback.
        ranks: number of ranks, by which owners divide.
    """

    def __init__(self, rule: Feedback, ranks: int) -> None:
        self.rule = rule
        self.ranks = ranks
        self._residuals: dict[str, Residual] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._residuals

    def __getitem__(self, name: str) -> Residual:
        return self._residuals[name]

    def get(
        self, name: str, numel: int, device: torch.device, *, rows: int = 1, error: bool = True
    ) -> Residual:
        """Return the residual of a parameter; zeros at first. Arguments as of `Residual`.

        Raises:
            ValueError: the parameter had another size before.
        """
        found = self._residuals.get(name)
        if found is None or (error and found.worker is None):
            fresh = Residual(self.rule, numel, device, rows=rows, error=error)
            if found is not None:  # has been exact, and keeps its momentum
                fresh.momentum, fresh.side = found.momentum, found.side
            found = self._residuals[name] = fresh
        if (found.numel, found.rows) != (numel, rows):
            raise ValueError(
                f"feedback: {name} has {rows} x {numel} values, its residual "
                f"{found.rows} x {found.numel}; the state belongs to another model"
            )
        return found

    def owed(self, name: str, begin: int, end: int, row: int = 0) -> torch.Tensor | None:
        """Return what this rank's residuals of values begin <= i < end of a row add to the average.

        A worker's error counts 1/ranks, an owner's once. float32 [end - begin]; None: nothing, as
        with EF21, whose results are whole.
        """
        found = self._residuals.get(name)
        if found is None or self.rule.kind == "ef21":
            return None
        first = begin // storage.BLOCK * storage.BLOCK

        def values(pair: Pair | None) -> torch.Tensor | float:
            if pair is None:
                return 0.0
            stored = storage.part(pair[found.sides[0]], found.numel, row, first, end)
            return storage.load(stored, end - first)[begin - first :]

        owed = values(found.worker) + self.rule.decay * values(found.momentum)
        nothing = torch.zeros(end - begin, device=found.device)
        return owed / self.ranks + values(found.owner) + nothing

    def drop(self, name: str) -> None:
        """Forget what is not owed any more, since an exact payload has told all."""
        found = self._residuals.pop(name)
        if found.momentum is not None:
            kept = Residual(found.rule, found.numel, found.device, rows=found.rows, error=False)
            kept.momentum, kept.side, kept.last_step = found.momentum, found.side, found.last_step
            self._residuals[name] = kept

    def commit(self, names: Iterable[str], step: int = 0) -> None:
        """Keep what the last step has written for those of these parameters that have one."""
        for name in names:
            if residual := self._residuals.get(name):
                residual.commit(step)

    def take_back(self, names: Iterable[str]) -> None:
        """Leave these parameters as they were before the last step."""
        for name in names:
            if residual := self._residuals.get(name):
                residual.take_back()

    def scale(self, factor: float, names: Iterable[str] | None = None) -> None:
        """Multiply what these parameters owe, momentum excluded; None: all parameters."""
        self._scale(factor, names, ("worker", "owner"))

    def scale_units(self, factor: float) -> None:
        """Multiply everything: gradients have another unit from now on."""
        self._scale(factor, None, ROLES)

    def _scale(self, factor: float, names: Iterable[str] | None, roles: Iterable[str]) -> None:
        for name in self._residuals if names is None else names:
            if residual := self._residuals.get(name):
                for role, pair in residual.pairs():
                    if role in roles:
                        storage.scale(pair[residual.side], factor)

    def reset(self) -> None:
        """Let go of what workers owe."""
        for residual in self._residuals.values():
            if residual.worker is not None:
                residual.worker[residual.side].zero_()

    def norms(self) -> dict[str, tuple[float, float]]:
        """Return the L2 norms of each parameter's worker and owner residual."""
        return {
            name: (_norm(residual, "worker"), _norm(residual, "owner"))
            for name, residual in self._residuals.items()
        }

    def ages(self, step: int) -> dict[str, int]:
        """Return for how many steps each residual has been waiting, at the end of `step`.

        0: it took part in that step. An unused or frozen parameter's grows, and in steps that
        overflow all do.
        """
        return {name: step - r.last_step for name, r in self._residuals.items()}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all residuals by parameter name, as they are stored."""
        return {
            name: {
                **{role: pair[r.side].clone() for role, pair in r.pairs()},
                "about": (r.numel, r.rows, r.layouts[r.side], r.last_step),
            }
            for name, r in self._residuals.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict` returned; residuals of other names become zero.

        Saved residuals may have been stored in another form.

        Raises:
            ValueError: a parameter has another size here, or was saved with another kind of
                feedback.
        """
        for name in self._residuals.keys() - state.keys():
            other = self._residuals[name]
            other.take_back()
            for _, pair in other.pairs():
                pair[other.side].zero_()
        for name, saved in state.items():
            tensors = {role: saved[role] for role in ROLES if role in saved}
            here = self._residuals.get(name)
            device = here.device if here else next(iter(tensors.values())).device
            numel, rows, layout, last_step = saved["about"]
            mine = self.get(name, numel, device, rows=rows, error="worker" in tensors)
            if tensors.keys() != {role for role, _ in mine.pairs()}:
                raise ValueError(
                    f"feedback: {name} was saved with {', '.join(sorted(tensors))}, which is not "
                    f"what {self.rule} keeps; continue with the kind that was saved"
                )
            mine.take_back()
            mine.layouts[mine.side], mine.last_step = layout, last_step
            for role, pair in mine.pairs():
                for row in range(mine.rows if role in ("worker", "momentum") else 1):
                    there, to = (
                        storage.part(stored, mine.numel, row, 0, mine.numel)
                        for stored in (tensors[role], pair[mine.side])
                    )
                    if there.dtype == to.dtype:
                        to.copy_(there)
                    else:
                        storage.store(storage.load(there, mine.numel).to(device), to)


def _norm(residual: Residual, role: str) -> float:
    pair: Pair | None = getattr(residual, role)
    return 0.0 if pair is None else float(residual.current(role).norm())
