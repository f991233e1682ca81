"""The residuals of one model on one rank, by parameter name.

A residual belongs to a parameter's name, not to a bucket: DDP makes new buckets after its first
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from pycomm.codecs import Codec
from pycomm.feedback import storage
from pycomm.feedback.residual import ROLES, Residual
from pycomm.feedback.rule import Feedback

NO_CODECS: Mapping[str, Codec] = MappingProxyType({})


class Residuals:
    """The residuals of one model on one rank.

    Args:
        rule: the kind of feedback.
        ranks: number of ranks, the divisor of the average.
        owners: keep residuals of owners, too.
    """

    def __init__(self, rule: Feedback, ranks: int, *, owners: bool = True) -> None:
        self.rule = rule
        self.ranks = ranks
        self.inherited = False
        """Residuals have been taken over, or may be by other ranks: ranks need no longer have those
        of the same parameters. Equal on all ranks."""
        self._owners = owners
        self._residuals: dict[str, Residual] = {}
        self._known: set[str] = set()  # parameters that have had a residual

    def __contains__(self, name: str) -> bool:
        return name in self._residuals

    def __getitem__(self, name: str) -> Residual:
        return self._residuals[name]

    def get(
        self,
        name: str,
        numel: int,
        device: torch.device,
        *,
        rows: int = 1,
        error: bool = True,
        empty: bool = False,
        codec: Codec | None = None,
        saved: torch.Tensor | None = None,
    ) -> Residual:
        """Return the residual of a parameter, initially zeros; arguments as for `Residual`.

        Args:
            codec: of the parameter, by which "auto" chooses the storage.
            saved: stored values, whose storage "auto" keeps while there is no codec.

        Raises:
            ValueError: the parameter had another size before.
        """
        self._known.add(name)
        found = self._residuals.get(name)
        form: dict[str, Any]
        rule = self.rule.kept(rows * numel, codec)
        if codec is None and saved is not None and self.rule.storage == "auto":
            rule = replace(rule, storage=storage.name_of(saved))
        if found is None or (error and found.worker is None):
            form = {"rows": rows, "error": error, "owner": self._owners}
            fresh = Residual(rule, numel, device, empty=empty, **form)
            if found is not None:  # has been exact, and keeps its momentum
                fresh.momentum, fresh.side = found.momentum, found.side
            found = self._residuals[name] = fresh
        elif (rule.storage, found.rule.storage) == ("float32", "int8"):
            form = {"rows": found.rows, "error": found.worker is not None}
            wide = Residual(rule, found.numel, found.device, owner=found.owner is not None, **form)
            _load(wide, _saved(found))
            found = self._residuals[name] = wide
        if found.device != device:  # of a state that was loaded to another one
            found.move(device)
        if (found.numel, found.rows) != (numel, rows):
            raise ValueError(
                f"feedback: {name} has {rows} x {numel} values, its residual "
                f"{found.rows} x {found.numel}; the state belongs to another model"
            )
        return found

    def added(self, name: str, begin: int, end: int, row: int = 0) -> torch.Tensor | None:
        """Return what this rank's residuals of values begin <= i < end of a row add to the average.

        A worker's error counts 1/ranks, an owner's once. float32 [end - begin]; None: nothing.
        """
        found = self._residuals.get(name)
        if found is None:
            return None
        block = storage.BLOCK
        first, last = begin // block * block, min(-(-end // block) * block, found.numel)

        def values(role: str) -> torch.Tensor | float:
            if getattr(found, role) is None:
                return 0.0
            kept = found.values(role, found.sides[0], row if role != "owner" else 0, first, last)
            return kept[begin - first : end - first]

        share = self.rule.decay if self.rule.kind == "decay" else 1.0
        errors = share * values("worker") + self.rule.decay * values("momentum")
        nothing = torch.zeros(end - begin, device=found.device, dtype=torch.float32)
        return errors / self.ranks + values("owner") + nothing

    def bytes_for(self, codec: Codec, numel: int, rows: int, shards: int = 1) -> int:
        """Return the bytes of a parameter's residual when all of it has been written.

        Args:
            codec: codec of the parameter.
            numel: values of a row.
            rows: number of rows; see `Residual`.
            shards: number of ranks of a node that code a part of its sum each.
        """
        errors = self.rule.keeps_errors(codec)
        if not errors and self.rule.kind != "momentum":
            return 0
        form = self.rule.kept(rows * numel, codec).storage
        row = storage.count(form, numel)
        taken = row * rows // shards * (errors + (self.rule.kind == "momentum"))
        if errors and rows == 1 and codec.combine == "recode":
            taken += row // self.ranks  # the owner residual, of which the rest is zeros
        return 2 * taken  # each has two sides

    def may_owe(self, names: Iterable[str]) -> bool:
        """Return whether any rank may have a residual of these parameters.

        All ranks return the same, since they create residuals alike. When they drop them depends on
        each rank's own steps, so what has had a residual may have one for ever.
        """
        return self.inherited or not self._known.isdisjoint(names)

    def drop(self, name: str) -> None:
        """Remove a residual that a payload without error has sent; momentum stays."""
        found = self._residuals[name]
        if found.momentum is None:
            del self._residuals[name]
            return
        found.worker = found.owner = None
        found.layouts = ["", ""]

    def forget(self, name: str) -> None:
        """Remove all buffers of a parameter, for example because its shape has changed."""
        self._residuals.pop(name, None)

    def commit(self, names: Iterable[str], step: int = 0) -> None:
        """Commit the last step for those of these parameters that have a residual."""
        for name in names:
            if residual := self._residuals.get(name):
                residual.commit(step)

    def swap(self, names: Iterable[str]) -> None:
        """Make the other side of these parameters' residuals the current one."""
        for name in names:
            if residual := self._residuals.get(name):
                residual.side = 1 - residual.side

    def take_back(self, names: Iterable[str]) -> None:
        """Restore these parameters' residuals from before the last step."""
        for name in names:
            if residual := self._residuals.get(name):
                residual.take_back()

    def scale(
        self, factor: float, names: Iterable[str] | None = None, *, momentum: bool = False
    ) -> None:
        """Multiply these parameters' residuals; None: all parameters.

        Args:
            factor: what they are multiplied by.
            names: names of the parameters.
            momentum: multiply momentum, too, as for a new unit of the gradients.
        """
        for name in self._residuals if names is None else names:
            if residual := self._residuals.get(name):
                for role, pair in residual.pairs():
                    if momentum or role != "momentum":
                        storage.scale(pair[residual.side], factor)

    def scale_matrix(
        self, name: str, factors: Sequence[torch.Tensor], columns: int, forgets: bool
    ) -> None:
        """Multiply the rows and columns of a parameter's residual, for new units of them.

        Args:
            name: name of the parameter.
            factors: float32 [rows, 1] or [columns], of this rank's part, on any device.
            columns: columns of the parameter, of which each row of a residual has whole rows.
            forgets: the errors had one size in the units of before. Those that would be more than
                twice that in their new unit become 0. Momentum stays.
        """
        residual = self._residuals.get(name)
        if residual is None:
            return
        of_errors = (
            [one.where(one * (1 / one).mean() <= 2, 0) for one in factors] if forgets else factors
        )
        for role, _ in residual.pairs():
            of_role = factors if role == "momentum" else of_errors
            rows = residual.rows if role in ("worker", "momentum") else 1
            for row in range(rows):
                values = residual.values(role, residual.side, row, 0, residual.numel)
                if values.any():  # else its pages stay unwritten
                    begin, end = residual.span(role, residual.side)
                    times = _times(values, of_role, columns, row, rows)[begin:end]
                    to = residual.stored(role, residual.side, row, begin, end)
                    storage.store(times, to)

    def norms(self) -> dict[str, tuple[float, float]]:
        """Return the L2 norms of each parameter's worker and owner residual."""
        return {
            name: (norm(residual, "worker"), norm(residual, "owner"))
            for name, residual in self._residuals.items()
        }

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all residuals by parameter name, as they are stored."""
        return {name: _saved(residual) for name, residual in self._residuals.items()}

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], codecs: Mapping[str, Codec] = NO_CODECS
    ) -> None:
        """Take over what `state_dict` returned, in place of all residuals of before.

        The saved residuals may have another storage.

        Args:
            state: what was returned.
            codecs: by name, of the parameters that have one by now; see `get`.

        Raises:
            ValueError: a parameter was saved with another kind of feedback.
        """
        self.check_kind(state)
        self._residuals.clear()
        self.inherited = True
        for name, saved in state.items():
            worker, codec = saved.get("worker"), codecs.get(name)
            stored = saved["momentum"] if worker is None else worker
            numel, rows, *_ = saved["about"]
            form: dict[str, Any] = {"error": worker is not None, "codec": codec, "saved": worker}
            _load(self.get(name, numel, stored.device, rows=rows, **form), saved)

    def check_kind(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that what `state_dict` returned is of this kind of feedback.

        Raises:
            ValueError: a parameter was saved with another kind.
        """
        for name, saved in state.items():
            if ("momentum" in saved) != (self.rule.kind == "momentum"):
                roles = ", ".join(role for role in ROLES if role in saved)
                raise ValueError(
                    f"feedback: {name} was saved with {roles}, which is not what {self.rule} "
                    "keeps; continue with the kind that was saved"
                )


def _saved(residual: Residual) -> dict[str, Any]:
    """Return copies of a residual's current side, as they are stored."""
    r = residual
    return {
        **{role: pair[r.side].clone() for role, pair in r.pairs()},
        "about": (r.numel, r.rows, r.layouts[r.side], r.last_step),
        "spans": {role: r.span(role, r.side) for role, _ in r.pairs()},
    }


def _load(mine: Residual, saved: Mapping[str, Any]) -> None:
    """Let a new residual of the same size be what `_saved` returned, maybe in another storage."""
    *_, mine.layouts[mine.side], mine.last_step = saved["about"]
    for role, _ in mine.pairs():
        begin, end = saved["spans"][role]
        for row in range(mine.rows if role in ("worker", "momentum") else 1):
            there = storage.part(saved[role], end - begin, row, 0, end - begin)
            to = mine.stored(role, mine.side, row, begin, end)
            if there.dtype == to.dtype:
                to.copy_(there)
            else:
                storage.store(storage.load(there, end - begin).to(mine.device), to)


def norm(
    residual: Residual, role: str, factors: Iterable[torch.Tensor] = (), columns: int = 1
) -> float:
    """Return the L2 norm of a residual; of its rows and columns, times these factors of them."""
    if getattr(residual, role) is None:
        return 0.0
    values = residual.current(role)
    for one in factors:
        values = values.view(-1, columns) * one.to(values.device)
    return float(values.norm())


def _times(
    values: torch.Tensor, factors: Iterable[torch.Tensor], columns: int, row: int, rows: int
) -> torch.Tensor:
    """Return one of `rows` rows of a residual, multiplied by the factors of its own."""
    result = values.view(-1, columns)
    for one in factors:
        mine = one.to(values.device)
        result = result * (mine.chunk(rows)[row] if mine.ndim > 1 else mine)
    return result.view(-1)
