"""The residuals of one model on one rank, by parameter name.

A residual belongs to a parameter's name, not to a bucket: DDP makes new buckets after its first
step. There are two per parameter. The worker residual is the error of what this rank contributed;
the owner residual is the error of what this rank sent back for the values that it owns
(Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", section 4; for both sides Tang et al.
2019, "DoubleSqueeze", algorithm 1).

Each is a pair of buffers: a step reads one side and writes the other. `commit` makes the written
side the current one; without it the step has left no trace, which is what a step that overflowed
needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from pycomm.feedback import storage
from pycomm.feedback.rule import Feedback

Pair = tuple[torch.Tensor, torch.Tensor]
ROLES = ("worker", "owner", "momentum", "mean")

_SLICE = 1 << 15  # values: a few pages, a multiple of storage.BLOCK


class Residual:
    """What one parameter owes on this rank.

    Args:
        rule: the kind of feedback.
        numel: number of values that are reduced here.
        device: where they live.
        rows: of the worker's residual, one for each owner in a reduce-scatter, which has no owner
            residual.
        error: keep the error of what is sent; without it there is only momentum.
    """

    def __init__(
        self,
        rule: Feedback,
        numel: int,
        device: torch.device,
        *,
        rows: int = 1,
        error: bool = True,
    ) -> None:
        self.rule, self.numel, self.rows, self.device = rule, numel, rows, device
        self.side = 0
        """The current side; the other one is written."""
        self.in_place = False
        """This step reads the other side too: the current one is as it was before buckets
        changed."""
        self.moved = False
        """All that was owed has become a part of this step's gradient."""
        self.layouts = ["", ""]
        """By side: names the bucket under which `owner` was written, which decides who owns
        what."""
        self.last_step = 0
        """Number of the last step in which it took part."""
        self.worker: Pair | None = self._pair(rows) if error else None
        """e; of momentum v; of ef21 what the others know of this rank's gradient."""
        self.owner: Pair | None = self._pair() if error and rows == 1 else None
        """Zero but for the values that this rank owns; zeros that nobody writes cost nothing."""
        self.momentum: Pair | None = self._pair(rows) if rule.kind == "momentum" else None
        self.mean: Pair | None = self._pair() if rule.kind == "ef21" and error else None
        """What all ranks know of the mean gradient."""

    def _pair(self, rows: int = 1) -> Pair:
        form = self.rule.storage, self.numel, self.device, rows
        return storage.zeros(*form), storage.zeros(*form)

    @property
    def sides(self) -> tuple[int, int]:
        """The side that this step reads, and the one that it writes."""
        return (1 - self.side if self.in_place else self.side), 1 - self.side

    def pairs(self) -> Iterator[tuple[str, Pair]]:
        """Its buffers and their roles."""
        for role in ROLES:
            pair: Pair | None = getattr(self, role)
            if pair is not None:
                yield role, pair

    def current(self, role: str) -> torch.Tensor:
        """Return what holds after the last committed step, float32 [rows * numel]."""
        pair: Pair = getattr(self, role)
        rows = self.rows if role in ("worker", "momentum") else 1
        whole = [
            storage.load(storage.part(pair[self.side], self.numel, r, 0, self.numel), self.numel)
            for r in range(rows)
        ]
        return torch.cat(whole) if rows > 1 else whole[0]

    def owed(self) -> torch.Tensor:
        """Return what this rank owes as a worker before this step, float32 [numel]."""
        assert self.worker is not None
        return storage.load(self.worker[self.sides[0]], self.numel)

    def room(self) -> torch.Tensor:
        """Return float32 [numel] to prepare in what `owe` is to get: its own place, if it can."""
        assert self.worker is not None
        fresh = self.worker[self.sides[1]]
        return fresh if fresh.dtype == torch.float32 else fresh.new_empty(self.numel).float()

    def owe(self, values: torch.Tensor) -> None:
        """Write what this rank owes as a worker after this step, float32 [numel]."""
        assert self.worker is not None
        fresh = self.worker[self.sides[1]]
        if fresh.data_ptr() != values.data_ptr():
            storage.store(values, fresh)

    def use(self, layout: str, ranks: int, gradient: torch.Tensor | None = None) -> None:
        """Tell before a step that the owners of the values are those of `layout`.

        If they change, what this rank owes as an owner becomes part of what it owes as a worker. An
        owner's error counts once in the average and a worker's 1/ranks, so nothing is lost.

        Args:
            layout: names the bucket.
            ranks: that are averaged.
            gradient: [numel]; where ranks are workers for some values only, all that is owed is
                added to it instead. Only residual and ema can do that.
        """
        now, then = self.sides
        if self.layouts[now] in ("", layout):
            self.layouts[then] = layout
            return
        self.in_place = True
        self.layouts[then] = layout
        for role, pair in self.pairs():
            if role in ("momentum", "mean"):
                pair[then].copy_(pair[now])
        if self.worker is None or self.owner is None:
            return
        if gradient is None:
            self._fold(now, then, ranks)
        else:
            self.moved = True
            gradient.add_(self.current("worker")).add_(self.current("owner"), alpha=ranks)
            _clear(self.worker[then])
            _clear(self.owner[then])

    def _fold(self, now: int, then: int, ranks: int) -> None:
        assert self.worker is not None
        assert self.owner is not None
        alpha = -ranks if self.rule.kind == "ef21" else ranks
        for begin in range(0, self.numel, _SLICE):
            end = min(begin + _SLICE, self.numel)

            def part(pair: Pair, side: int, begin: int = begin, end: int = end) -> torch.Tensor:
                return storage.part(pair[side], self.numel, 0, begin, end)

            owned = storage.load(part(self.owner, now), end - begin)
            if owned.any():
                worker = storage.load(part(self.worker, now), end - begin)
                storage.store(worker.add(owned, alpha=alpha), part(self.worker, then))
            else:
                part(self.worker, then).copy_(part(self.worker, now))
        _clear(self.owner[then])

    def commit(self, step: int) -> None:
        """Keep what the last step has written."""
        # Steps to come write on the old side what this rank has to do with then, and no more.
        if self.in_place and self.owner is not None:
            _clear(self.owner[self.side])
        if self.moved and self.worker is not None:
            _clear(self.worker[self.side])
        self.side = 1 - self.side
        self.in_place = self.moved = False
        self.last_step = step

    def take_back(self) -> None:
        """Leave everything as it was before the last step."""
        self.in_place = self.moved = False


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


def _clear(stored: torch.Tensor) -> None:
    for part in torch.split(stored, _SLICE):
        if part.any():  # else its pages stay unwritten
            part.zero_()


def _norm(residual: Residual, role: str) -> float:
    pair: Pair | None = getattr(residual, role)
    return 0.0 if pair is None else float(residual.current(role).norm())
