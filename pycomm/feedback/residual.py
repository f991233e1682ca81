"""The residual of one parameter on one rank.

There are two per parameter. The worker residual is the error of this rank's contribution; the owner
residual is the error of the result that this rank sent back for the values that it owns
(Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", section 4; for both sides Tang et al.
2019, "DoubleSqueeze", algorithm 1).

Each is a pair of buffers: a step reads one side and writes the other. `commit` makes the written
side the current one; without it the step has no effect, as is right for a step that overflowed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pycomm.feedback import storage
from pycomm.feedback.rule import Feedback

Pair = tuple[torch.Tensor, torch.Tensor]
ROLES = ("worker", "owner", "momentum")

_SLICE = 1 << 15  # values: a few pages, a multiple of storage.BLOCK


class Residual:
    """The buffers of one parameter's feedback on this rank.

    Args:
        rule: the kind of feedback.
        numel: number of values that are reduced here.
        device: device of the buffers.
        rows: rows of the worker's residual, one for each owner in a reduce-scatter, which has no
            owner residual.
        error: keep the error of payloads; without it there is only momentum.
        owner: there is an owner residual.
    """

    def __init__(
        self,
        rule: Feedback,
        numel: int,
        device: torch.device,
        *,
        rows: int = 1,
        error: bool = True,
        owner: bool = True,
    ) -> None:
        self.rule, self.numel, self.rows, self.device = rule.kept(rows * numel), numel, rows, device
        self.side = 0
        """The current side; the other one is written."""
        self.in_place = False
        """This step reads the side that it writes, which `use` has prepared; the current side is
        still in the layout of the old buckets."""
        self.moved = False
        """The residuals have been added to this step's gradient."""
        self.layouts = ["", ""]
        """By side: the layout of the bucket for which `owner` was written, which decides which
        values each rank owns."""
        self.last_step = 0
        """Number of the last step in which this residual took part."""
        self.worker: Pair | None = self._pair(rows) if error else None
        """e; for momentum v."""
        self.owner: Pair | None = self._pair() if error and owner and rows == 1 else None
        """Zero but for the values that this rank owns; unwritten zeros take no memory."""
        self.momentum: Pair | None = self._pair(rows) if rule.kind == "momentum" else None

    def _pair(self, rows: int = 1) -> Pair:
        form = self.rule.storage, self.numel, self.device, rows
        return storage.zeros(*form), storage.zeros(*form)

    @property
    def sides(self) -> tuple[int, int]:
        """The side that this step reads, and the side that it writes."""
        return (1 - self.side if self.in_place else self.side), 1 - self.side

    def pairs(self) -> Iterator[tuple[str, Pair]]:
        """Yield the buffers with their roles."""
        for role in ROLES:
            pair: Pair | None = getattr(self, role)
            if pair is not None:
                yield role, pair

    def current(self, role: str) -> torch.Tensor:
        """Return the values after the last committed step, float32 [rows * numel]."""
        pair: Pair = getattr(self, role)
        rows = self.rows if role in ("worker", "momentum") else 1
        whole = [
            storage.load(storage.part(pair[self.side], self.numel, r, 0, self.numel), self.numel)
            for r in range(rows)
        ]
        return torch.cat(whole) if rows > 1 else whole[0]

    def load_worker(self, row: int = 0) -> torch.Tensor:
        """Return a row of the worker residual before this step, float32 [numel]."""
        return self._worker(self.sides[0], row)

    def stored_worker(self, row: int = 0) -> torch.Tensor:
        """Return the same as it is stored."""
        assert self.worker is not None
        return storage.part(self.worker[self.sides[0]], self.numel, row, 0, self.numel)

    def fresh_worker(self, row: int = 0) -> torch.Tensor:
        """Return a row of the worker residual after this step as it is stored."""
        assert self.worker is not None
        return storage.part(self.worker[self.sides[1]], self.numel, row, 0, self.numel)

    def written_worker(self, row: int = 0) -> torch.Tensor:
        """Return a row of the worker residual after this step, float32 [numel]."""
        return self._worker(self.sides[1], row)

    def _worker(self, side: int, row: int) -> torch.Tensor:
        assert self.worker is not None
        stored = storage.part(self.worker[side], self.numel, row, 0, self.numel)
        return storage.load(stored, self.numel)

    def room(self) -> torch.Tensor:
        """Return float32 [numel] for `store_worker`: the residual itself if in float32."""
        assert self.worker is not None
        fresh = self.worker[self.sides[1]]
        return fresh if fresh.dtype == torch.float32 else fresh.new_empty(self.numel).float()

    def store_worker(self, values: torch.Tensor, row: int = 0) -> None:
        """Write a row of the worker residual after this step, float32 [numel]."""
        assert self.worker is not None
        fresh = storage.part(self.worker[self.sides[1]], self.numel, row, 0, self.numel)
        if fresh.data_ptr() != values.data_ptr():
            storage.store(values, fresh)

    def use(self, layout: str, ranks: int, gradient: torch.Tensor | None = None) -> None:
        """Set the layout of the bucket, which decides the owners of values, before a step.

        If the layout changes, the owner residual is added to the worker residual. An owner's error
        counts once in the average and a worker's 1/ranks, so it is multiplied by the ranks and
        nothing is lost.

        Args:
            layout: hash of the bucket's layout.
            ranks: number of ranks that are averaged.
            gradient: [rows, numel]; if ranks are workers for some values only, both residuals are
                added to it instead. Only the kinds residual and decay allow that.
        """
        now, then = self.sides
        same = self.layouts[now] in ("", layout)
        self.layouts[then] = layout
        # Without an owner residual, what a rank keeps is of all its values in any layout.
        if same or self.worker is None or (self.owner is None and gradient is None):
            return
        self.in_place = True
        if self.momentum is not None:
            self.momentum[then].copy_(self.momentum[now])
        if gradient is None:
            self._fold(now, then, ranks)
            return
        self.moved = True
        share = self.rule.decay if self.rule.kind == "decay" else 1
        gradient.add_(self.current("worker").view_as(gradient), alpha=share)
        _clear(self.worker[then])
        if self.owner is not None:
            gradient.add_(self.current("owner").view_as(gradient), alpha=ranks)
            _clear(self.owner[then])

    def _fold(self, now: int, then: int, ranks: int) -> None:
        assert self.worker is not None
        assert self.owner is not None
        for begin in range(0, self.numel, _SLICE):
            end = min(begin + _SLICE, self.numel)

            def part(pair: Pair, side: int, begin: int = begin, end: int = end) -> torch.Tensor:
                return storage.part(pair[side], self.numel, 0, begin, end)

            owned = storage.load(part(self.owner, now), end - begin)
            if owned.any():
                worker = storage.load(part(self.worker, now), end - begin)
                storage.store(worker.add(owned, alpha=ranks), part(self.worker, then))
            else:
                part(self.worker, then).copy_(part(self.worker, now))
        _clear(self.owner[then])

    @property
    def has_moved(self) -> bool:
        """Whether this step's commit has more to do than to change sides."""
        return self.in_place or self.moved or self.layouts[0] != self.layouts[1]

    def commit(self, step: int) -> None:
        """Keep the residual that the last step has written."""
        # Later steps write only this rank's own values to the old side, so the rest is cleared.
        if self.in_place and self.owner is not None:
            _clear(self.owner[self.side])
        if self.moved and self.worker is not None:
            _clear(self.worker[self.side])
        self.side = 1 - self.side
        self.in_place = self.moved = False
        self.last_step = step

    def take_back(self) -> None:
        """Restore the residual from before the last step."""
        self.in_place = self.moved = False

    def forget_other_side(self) -> None:
        """Clear what an owner wrote for other buckets to the side that the next step writes."""
        if self.owner is not None:
            _clear(self.owner[1 - self.side])


def _clear(stored: torch.Tensor) -> None:
    for part in torch.split(stored, _SLICE):
        if part.any():  # else its pages stay unwritten
            part.zero_()
