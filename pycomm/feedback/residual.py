"""The residual of one parameter on one rank.

There are two per parameter, and a momentum with feedback of that kind. The worker residual is the
error of this rank's contribution; the owner residual is the error of the result that this rank sent
back for the values that it owns (Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", section
4; for both sides Tang et al. 2019, "DoubleSqueeze", algorithm 1).

Each is a pair of buffers: a step reads one side and writes the other. `commit` makes the written
side the current one; without it the step has no effect, as is right for a step that overflowed.

An owner keeps errors of the values that it owns alone, and by nodes a worker those of its part of
the node's sum. On the CPU all values have a place, since pages that nobody writes take no memory.
On a device each side has memory for its span of the values, the rest are zeros, and `use` changes
the spans with the layout of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from pycomm.codecs import Codec, RandomKey
from pycomm.feedback import storage
from pycomm.feedback.rule import Feedback

Pair = tuple[torch.Tensor, torch.Tensor]
Span = tuple[int, int]
"""Values begin <= i < end; multiples of `storage.BLOCK`, or the end of the parameter."""
Spans = Mapping[str, Span]
"""By role; roles that are not there have all values."""
ROLES = ("worker", "owner", "momentum")
ALL: Spans = MappingProxyType({})
RESHARDED = "resharded"
"""Layout of residuals of which each worker has all values, and no owner has any."""

_SLICE = 1 << 15  # values: a few pages, a multiple of storage.BLOCK
_KEY = RandomKey()


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
        empty: worker and owner have no memory before `use`, which then gets spans.
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
        empty: bool = False,
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
        """Number of the last step that was committed; 0: none."""
        self.memory = 0
        """Number of times that a buffer has been replaced by another one."""
        self._all = (0, numel)
        here = (0, 0) if empty and rows == 1 else self._all
        self.spans = {role: [here, here] for role in ("worker", "owner")}
        """By role and side; with several rows all values."""
        self.worker: Pair | None = self._pair("worker", rows) if error else None
        """e; for momentum v."""
        self.owner: Pair | None = self._pair("owner") if error and owner and rows == 1 else None
        """Zero but for the values that this rank owns."""
        has_momentum = rule.kind == "momentum"
        self.momentum: Pair | None = self._pair("momentum", rows) if has_momentum else None

    def _pair(self, role: str, rows: int = 1) -> Pair:
        begin, end = self.span(role, 0)
        form = self.rule.storage, end - begin, self.device, rows
        return storage.zeros(*form), storage.zeros(*form)

    def span(self, role: str, side: int) -> Span:
        spans = self.spans.get(role)
        return spans[side] if spans else self._all

    def options(self) -> dict[str, Any]:
        """Return the rule, the buffers by role, and their spans, as the core takes them."""
        rule = self.rule
        found = {"kind": rule.kind, "storage": rule.storage, "decay": rule.decay}
        spans = {} if self.rows > 1 else {f"{role}_spans": one for role, one in self.spans.items()}
        return {**found, **dict(self.pairs()), **spans}

    def stored(self, role: str, side: int, row: int, begin: int, end: int) -> torch.Tensor:
        """Return values as they are stored, in place.

        Args:
            role: "worker", "owner" or "momentum"; there is such a buffer.
            side: 0 or 1.
            row: row of the worker's residual or of the momentum; 0 for an owner.
            begin: first value, in the span of this side; a multiple of 32.
            end: a multiple of 32, or the end of the parameter.
        """
        pair: Pair = getattr(self, role)
        first, last = self.span(role, side)
        assert first <= begin <= end <= last, (first, begin, end, last)
        return storage.part(pair[side], last - first, row, begin - first, end - first)

    def values(self, role: str, side: int, row: int, begin: int, end: int) -> torch.Tensor:
        """Return the same as float32 [end - begin], with zeros outside of the span; not to write.

        Args:
            begin, end: as for `stored`, anywhere in the parameter.
        """
        first, last = self.span(role, side)
        first, last = max(first, begin), min(last, end)
        if (first, last) == (begin, end):
            return storage.load(self.stored(role, side, row, begin, end), end - begin)
        result = torch.zeros(end - begin, dtype=torch.float32, device=self.device)
        if first < last:
            held = storage.load(self.stored(role, side, row, first, last), last - first)
            result[first - begin : last - begin] = held
        return result

    def hold(self, spans: Spans, sides: Sequence[int] = (0, 1)) -> None:
        """Give sides memory for these values, which keep what they are."""
        for role in self.spans:
            for side in sides:
                self._replace(role, side, spans.get(role, self._all))

    def _replace(self, role: str, side: int, span: Span) -> None:
        pair: Pair | None = getattr(self, role)
        before = self.spans[role][side]
        if pair is None or self.rows > 1 or before == span:
            return
        fresh = storage.zeros(self.rule.storage, span[1] - span[0], self.device)
        begin, end = max(before[0], span[0]), min(before[1], span[1])
        if begin < end:
            to = storage.part(fresh, span[1] - span[0], 0, begin - span[0], end - span[0])
            to.copy_(self.stored(role, side, 0, begin, end))
        setattr(self, role, (fresh, pair[1]) if side == 0 else (pair[0], fresh))
        self.spans[role][side] = span
        self.memory += 1

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

    def move(self, device: torch.device) -> None:
        """Move all buffers to another device."""
        self.device = device
        for role, pair in list(self.pairs()):
            setattr(self, role, tuple(stored.to(device) for stored in pair))
        self.memory += 1

    def current(self, role: str) -> torch.Tensor:
        """Return the values after the last committed step, float32 [rows * numel]."""
        rows = self.rows if role in ("worker", "momentum") else 1
        whole = [self.values(role, self.side, row, 0, self.numel) for row in range(rows)]
        return torch.cat(whole) if rows > 1 else whole[0]

    def stored_worker(self, row: int = 0) -> torch.Tensor:
        """Return a row of the worker residual before this step as it is stored."""
        return self.stored("worker", self.sides[0], row, 0, self.numel)

    def use(
        self,
        layout: str,
        ranks: int,
        gradient: torch.Tensor | None = None,
        spans: Spans = ALL,
    ) -> None:
        """Set the layout of the bucket, which decides the owners of values, before a step.

        If the layout changes, the owner residual is added to the worker residual. An owner's error
        counts once in the average and a worker's 1/ranks, so it is multiplied by the ranks and
        nothing is lost.

        Args:
            layout: hash of the bucket's layout.
            ranks: number of ranks that are averaged.
            gradient: [rows, numel]; if ranks are workers for some values only, both residuals are
                added to it instead. Only the kinds residual and decay allow that.
            spans: the values that each buffer needs memory for in this layout.
        """
        now, then = self.sides
        same = self.layouts[now] in ("", layout)
        if now != then:
            self.hold(spans, [then, now] if same else [then])
            if self.layouts[then] not in ("", layout):  # of a step that was taken back, perhaps
                self.forget_other_side()
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
        assert self.owner is not None
        for begin in range(0, self.numel, _SLICE):
            end = min(begin + _SLICE, self.numel)
            owned = self.values("owner", now, 0, begin, end)
            fresh = self.stored("worker", then, 0, begin, end)
            first, last = self.spans["worker"][now]
            if owned.any() or begin < first or end > last:
                worker = self.values("worker", now, 0, begin, end)
                storage.store(worker.add(owned, alpha=ranks), fresh)
            else:
                fresh.copy_(self.stored("worker", now, 0, begin, end))
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
        """Clear what was written for other buckets to the side that the next step writes.

        That step writes the values that this rank codes and owns in its bucket, and no others.
        """
        for pair in (self.worker, self.owner):
            if pair is not None:
                _clear(pair[1 - self.side])


def encode(
    codec: Codec,
    x: torch.Tensor,
    out: torch.Tensor,
    residual: Residual,
    *,
    worker: bool,
    begin: int,
    row: int = 0,
    key: RandomKey = _KEY,
) -> None:
    """Encode values of a parameter with the residual of earlier steps, and write the new one.

    The order of operations is that of `encode` in csrc/codecs/base/feedback.cpp, so the bits are
    the same.

    Args:
        codec: codec of the payload.
        x: float32 [numel of the run].
        out: uint8 [bytes of the payload].
        residual: residual of the whole parameter.
        worker: encode a contribution; else an owner's result, whose feedback is of the kind
            residual.
        begin: index of x[0] in the parameter.
        row: row of the residual.
        key: selects the random numbers.
    """
    rule, kind = residual.rule, residual.rule.kind if worker else "residual"
    end = begin + x.numel()

    def stored(role: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the values of a buffer before and after this step; None: there is none."""
        if getattr(residual, role, None) is None:
            return None, None
        now, then = (residual.stored(role, side, row, begin, end) for side in residual.sides)
        return now, then

    old, fresh = stored("worker" if worker else "owner")
    old_u, fresh_u = stored("momentum" if worker else "")
    p, e, u, left = x, None, None, None
    if old is not None and fresh is not None:
        e = storage.load(old, x.numel())
        e = e * rule.decay if kind == "decay" else e
        # The codec writes a float32 residual directly, if feedback does not transform it.
        direct = fresh.dtype == torch.float32 and kind != "momentum"
        left = fresh if direct else torch.empty_like(x)
    if old_u is not None:
        p = u = storage.load(old_u, x.numel()) * rule.decay + x
    codec.encode(p, out, e, new_residual=left, key=key, index=begin)
    if left is not None and e is not None and fresh is not None:
        if u is not None:
            u = torch.where(left == p + e, u, 0.0)
        if left is not fresh:
            storage.store(left, fresh)
    if u is not None and fresh_u is not None:
        storage.store(u, fresh_u)


def _clear(stored: torch.Tensor) -> None:
    if not stored.is_cpu:
        stored.zero_()
        return
    for part in torch.split(stored, _SLICE):
        if part.any():  # else its pages stay unwritten
            part.zero_()
