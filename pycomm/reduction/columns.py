"""Factors of columns: the columns of a matrix are brought to one size before they are coded.

A codec gives all values of a block the precision of the largest ones. Where a matrix's columns have
gradients of very different size, as those of a layer whose inputs are not normalized, the small
ones are lost, or arrive in rare lumps; and Adam, which divides each value by its own size, feels
that as much as if the large ones were lost. The error of the whole tensor does not show it.

So such a matrix is divided by a power of two for each column before it is coded, and multiplied by
it afterwards. All ranks have the same factors, so nothing of them travels with the payloads, and
the arithmetic is exact. Residuals are kept in the units of what is coded: where a factor changes,
so do they.

In a few steps (`is_look`) each rank sums the squares of its gradients by columns, before they are
coded, so that the sums are not those of what the codec has left over. The ranks add them up, the
first decides, and the factors hold from the next step on. In all other steps a matrix whose columns
are alike costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.codecs import Cast, Codec
from pycomm.feedback import Residuals
from pycomm.feedback.storage import powers
from pycomm.policy.exchange import answer
from pycomm.reduction.bucket import Bucket

EVERY = 64
"""Steps from one look to the next; the first ones are in the steps 1, 2, 4, 8, and so on."""
ROWS = 4
"""Fewest rows whose sums of squares say something about a column."""
LARGE = 3
"""A matrix gets factors if a column is so many powers of two above the median one: it spoils the
blocks in which it is,"""
UNEQUAL = 2
"""or if this many powers of two, up or down, separate more than `SHARE` of the columns from it."""
SHARE = 1 / 8
_STAY = 0.75  # powers of two by which a column may leave its factor before that changes
_MOST = 24  # powers of two, so that products of float32 stay far from its ends

Exponents = dict[str, torch.Tensor]
"""By name: int8 [columns], on the CPU; the factor of a column is 2 to its power."""


def is_look(step: int) -> bool:
    """Whether the ranks look at the columns in this step."""
    return step > 0 and (step & (step - 1) == 0 or step % EVERY == 0)


def is_divided(codec: Codec) -> bool:
    """Whether a codec has one precision for values of several sizes, of which factors make one."""
    return not isinstance(codec, Cast) and codec.name != "lossless" and codec.combine != "factors"


class ColumnFactors:
    """The factors of a model's matrices; equal on all ranks."""

    def __init__(self) -> None:
        self.current: Exponents = {}
        """Those in which payloads and residuals are now; a name without any has factors of 1."""
        self._decided: Exponents = {}
        """Those of the last look, also of parameters whose codec needs none at present."""
        self._means: dict[str, torch.Tensor] = {}  # of squares: float64 [columns]
        self._sums: dict[str, torch.Tensor] = {}  # in the current look: float32 [columns]
        self.moved = False
        """The last look has led to other factors, for which `begin` has to be called."""
        self._scales: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    # ------------------------------------------------------------------ a step

    def begin(
        self, columns: Callable[[str], int], residuals: Residuals | None, before: Callable[[], None]
    ) -> set[str]:
        """Let the factors of the last look hold from now on; between two steps.

        Args:
            columns: returns a parameter's columns in the step that begins; 0: it takes no factors.
            residuals: their units are changed.
            before: called before residuals are.

        Returns:
            The names of the parameters that have factors now and had none.
        """
        self.moved = False
        decided = self._decided.items()
        now = {name: one for name, one in decided if columns(name) == len(one)}
        new = now.keys() - self.current.keys()
        if not _equal(now, self.current):
            before()
            self.use(now, residuals)
        return new

    def forget(self, name: str) -> None:
        """Forget a parameter, whose shape has changed; it has no residual."""
        for known in (self.current, self._decided, self._means, self._sums):
            known.pop(name, None)
        self._scales.clear()

    def use(self, exponents: Exponents, residuals: Residuals | None) -> None:
        """Take other factors, and change the units of residuals."""
        nothing = torch.zeros(1, dtype=torch.int8)
        for name in {**self.current, **exponents}:
            then, now = (of.get(name, nothing) for of in (self.current, exponents))
            if residuals is not None and not torch.equal(then, now):
                residuals.scale_columns(name, powers(then.int() - now.int()))
        self.current = dict(exponents)
        self._scales.clear()

    def look(
        self,
        values: torch.Tensor,
        bucket: Bucket,
        columns: Callable[[str], int],
    ) -> None:
        """Sum the squares of a bucket's gradients by columns, before anything is done to them.

        Args:
            values: the bucket [rows * values].
            bucket: its layout.
            columns: returns a parameter's number of columns; 0: it takes no factors.
        """
        if values.dtype == torch.float16:  # which has no room for factors
            return
        for piece in bucket.pieces:
            if piece.numel and (width := columns(piece.name)):
                part = _matrix(values, bucket.rows, piece.offset, piece.numel, width)
                norm = torch.linalg.vector_norm(part, dim=(0, 1), dtype=torch.float32)
                known = self._sums.get(piece.name)
                self._sums[piece.name] = norm.square() if known is None else known + norm.square()

    def end(
        self, widths: Mapping[str, int], groups: Sequence[dist.ProcessGroup], device: torch.device
    ) -> None:
        """End a look: add up the sums, and decide; collective.

        Args:
            widths: columns of all parameters that may get factors, equal on all ranks.
            groups: the ranks; of a mesh the groups along its dimensions.
            device: a device whose tensors the groups move.
        """
        sums, self._sums = self._sums, {}
        if not widths:
            return
        none = {width: torch.zeros(width, device=device) for width in set(widths.values())}
        flat = torch.cat([sums.get(name, none[width]) for name, width in widths.items()])
        for group in groups:
            dist.all_reduce(flat, group=group)
        parts = torch.split(flat.cpu().double(), list(widths.values()))
        for name, part in zip(widths, parts, strict=True):
            if part.isfinite().all() and part.any():  # not in a step that has overflowed
                self._means[name] = (self._means.get(name, part) + part) / 2
        decided = torch.cat([self._decide(name, width) for name, width in widths.items()])
        for group in groups:
            there = decided.to(device)
            decided = answer(group.broadcast(there, 0), there)
        now = dict(self._decided)
        found = torch.split(decided, list(widths.values()))
        for name, exponents in zip(widths, found, strict=True):
            now.pop(name, None)
            if exponents.any():
                now[name] = exponents
        self.moved |= not _equal(now, self._decided)
        self._decided = now

    def _decide(self, name: str, width: int) -> torch.Tensor:
        """Return a parameter's exponents, int8 [columns]; zeros: it needs no factors."""
        known = self._decided.get(name, torch.zeros(width, dtype=torch.int8))
        mean = self._means.get(name)
        if mean is None:
            return known
        live = mean > 0
        size = 0.5 * torch.log2(mean / mean[live].median())
        moves = live & ((size - known).abs() > _STAY)
        exponents = torch.where(moves, size.round().clamp(-_MOST, _MOST), known.double())
        is_large = exponents.max() >= LARGE
        unequal = (exponents.abs() >= UNEQUAL).double().mean() > SHARE
        needs = name in self._decided or is_large or unequal
        return exponents.to(torch.int8) if needs else torch.zeros_like(known)

    # ------------------------------------------------------------------ buckets

    def divide(self, values: torch.Tensor, bucket: Bucket) -> None:
        """Divide a bucket [rows * values] by its factors, before it is coded."""
        self._apply(values, bucket, bucket.rows, 0)

    def multiply(self, values: torch.Tensor, bucket: Bucket) -> None:
        """Multiply a decoded bucket [values] by its factors."""
        self._apply(values, bucket, 1, 1)

    def concern(self, bucket: Bucket) -> bool:
        """Whether a bucket has parameters with factors."""
        return bool(self.current) and any(piece.name in self.current for piece in bucket.pieces)

    def _apply(self, values: torch.Tensor, bucket: Bucket, rows: int, which: int) -> None:
        for piece in bucket.pieces:
            exponents = self.current.get(piece.name)
            if exponents is None or not piece.numel:
                continue
            key = piece.name, values.device
            scales = self._scales.get(key)
            if scales is None:
                there, back = powers(-exponents), powers(exponents)
                scales = there.to(values.device), back.to(values.device)
                self._scales[key] = scales
            part = _matrix(values, rows, piece.offset, piece.numel, len(exponents))
            part.mul_(scales[which])

    def span(self, names: Iterable[str]) -> str:
        """Return the smallest and the largest factor of some parameters that have factors."""
        exponents = torch.cat([self.current[name] for name in names])
        return f"2^{int(exponents.min())} to 2^{int(exponents.max())}"

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint, equal on all ranks."""
        return {"current": dict(self.current), "decided": dict(self._decided), "means": self._means}

    def load_state_dict(self, state: Mapping[str, Any], names: Mapping[str, str]) -> Exponents:
        """Restore the state from `state_dict`.

        Args:
            state: what was returned; {}: of a version without factors.
            names: names here by the saved ones.

        Returns:
            The factors in which the saved residuals are. `use` takes them.
        """
        found = {
            key: {names.get(name, name): values for name, values in state.get(key, {}).items()}
            for key in ("current", "decided", "means")
        }
        self._decided, self._means = found["decided"], found["means"]
        self.moved = True
        return found["current"]

    def names(self, state: Mapping[str, Any]) -> Iterable[str]:
        """Return the names of parameters in a saved state."""
        return {name for part in state.values() for name in part}


def _equal(one: Exponents, other: Exponents) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _matrix(values: torch.Tensor, rows: int, offset: int, numel: int, columns: int) -> torch.Tensor:
    """Return a parameter's part of a bucket [rows * values] as [rows, parts, columns], a view."""
    table = values.view(rows, -1)
    first, last = table.stride()
    shape, strides = (rows, numel // columns, columns), (first, columns * last, last)
    return table.as_strided(shape, strides, table.storage_offset() + offset * last)
