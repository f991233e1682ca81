"""Factors of rows and columns: those of a matrix are brought to one size before they are coded.

A codec gives all values of a block the precision of the largest ones. Where a matrix's columns have
gradients of very different size, as those of a layer whose inputs are not normalized, the small
ones are lost, or arrive in rare lumps; and Adam, which divides each value by its own size, feels
that as much as if the large ones were lost. The error of the whole tensor does not show it. So it
is with rows where a block holds parts of several. A codec that sends the largest values alone gets
no factors of rows: the rows of an output that is rare would take the place of those that matter.

So such a matrix is divided by a power of two for each row and column before it is coded, and
multiplied by it afterwards. All ranks have the same factors, so nothing of them travels with the
payloads, and the arithmetic is exact. Residuals are kept in the units of what is coded: where a
factor changes, so do they. But the error of some codecs (`errs_alike`) is as large where a gradient
is small as where it is large in the same block: in new units it would be thousands of small
gradients, and spoil steps. There it is forgotten.

In a few steps (`is_look`) each rank sums the squares of its gradients, before they are coded, so
that the sums are not those of what the codec has left over. The ranks add them up, the first
decides, and the factors hold from the next step on. In all other steps a matrix whose rows and
columns are alike costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pycomm.codecs import Cast, Codec
from pycomm.feedback import Residuals
from pycomm.feedback.residuals import norm
from pycomm.feedback.storage import powers
from pycomm.policy.exchange import answer
from pycomm.policy.names import renamed
from pycomm.reduction.bucket import Bucket

EVERY = 64
"""Steps from one look to the next; the first ones are in the steps 1, 2, 4, 8, and so on."""
LEAST = 4
"""Fewest values whose squares say something about a row or column."""
LARGE = 3
"""The columns of a matrix get factors if one is so many powers of two above the median one, since
it spoils the blocks in which it is;"""
SHARES = ((2, 1 / 8), (3, 1 / 32))
"""or if so many powers of two, up or down, separate more than this share of them from it. So with
rows."""
_STAY = 0.75  # powers of two by which a column may leave its factor before that changes
_MOST = 24  # powers of two, so that products of float32 stay far from its ends

Exponents = dict[str, torch.Tensor]
"""By name: int8 [rows + columns], on the CPU; a factor is 2 to its power."""


def is_look(step: int) -> bool:
    """Whether the ranks look at the sizes of rows and columns in this step."""
    return step > 0 and (step & (step - 1) == 0 or step % EVERY == 0)


def is_divided(codec: Codec) -> bool:
    """Whether a codec has one precision for values of several sizes, of which factors make one."""
    return not isinstance(codec, Cast) and codec.name != "lossless"


def errs_alike(codec: Codec) -> bool:
    """Whether a codec's error of a small value is as large as that of a large one in its block."""
    return codec.name == "sign" or getattr(codec, "rounding", "nearest") != "nearest"


@dataclass(frozen=True)
class Matrix:
    """A parameter as a matrix, and this rank's part of it: whole rows, the last may be padding."""

    rows: int
    columns: int
    given: slice
    """Rows of what this rank contributes."""
    got: slice
    """Rows of the result that it gets."""
    by_rows: bool = True
    """Rows get factors, too."""
    forgets: bool = False
    """What a coding has left over is forgotten where it is large in a new unit."""

    @property
    def size(self) -> int:
        """Number of rows and columns."""
        return self.rows + self.columns

    def factors(self, exponents: torch.Tensor, part: slice) -> list[torch.Tensor]:
        """Return the factors of a part's rows [rows, 1] and columns [columns] that are not 1."""
        rows, columns = torch.split(exponents, [self.rows, self.columns])
        found = []
        if rows.any():
            padded = rows.new_zeros(max(self.rows, part.stop))
            padded[: self.rows] = rows
            found.append(powers(padded[part])[:, None])
        if columns.any():
            found.append(powers(columns))
        return found


MatrixOf = Callable[[str], "Matrix | None"]
"""A parameter's matrix, by name; None: it takes no factors."""


class Factors:
    """The factors of a model's matrices; equal on all ranks."""

    def __init__(self) -> None:
        self.current: Exponents = {}
        """Those in which payloads and residuals are now; a name without any has factors of 1."""
        self.moved = False
        """The last look has led to other factors, for which `begin` has to be called."""
        self._matrices: dict[str, Matrix] = {}  # of those that have factors, or had
        self.sums: dict[str, torch.Tensor] | None = None
        """In a step that looks, the squares so far: float32 [rows + columns]; None: it does not."""
        self._told: set[str] = set()
        self._decided: Exponents = {}  # also of parameters whose codec needs none at present
        self._means: dict[str, torch.Tensor] = {}  # of squares: float64 [rows + columns]
        self._erring: set[str] = set()  # whose codec in the last look `errs_alike`
        self._scales: dict[tuple[str, torch.device, int], list[torch.Tensor]] = {}

    # ------------------------------------------------------------------ a step

    def begin(
        self,
        taken: MatrixOf,
        shape: MatrixOf,
        residuals: Residuals | None,
        before: Callable[[], None],
    ) -> set[str]:
        """Let the factors of the last look hold from now on; between two steps.

        Args:
            taken: the parameters' matrices in the step that begins.
            shape: the same, whatever their codecs are.
            residuals: their units are changed.
            before: called before residuals are.

        Returns:
            The names of the parameters that have factors for the first time.
        """
        self.moved = False
        now = {}
        for name, exponents in self._decided.items():
            matrix = taken(name)
            if matrix is not None and not matrix.by_rows:
                exponents = exponents.clone()
                exponents[: matrix.rows] = 0
            if matrix is not None and exponents.any():
                now[name] = exponents
        if not _equal(now, self.current):
            before()

            def matrix_of(name: str) -> Matrix | None:
                matrix = taken(name)  # of the codec that reads the residual; another has left it
                if matrix is None or name not in self._erring:
                    return matrix or shape(name)
                return replace(matrix, forgets=True)

            self.use(now, matrix_of, residuals)
        new = self.current.keys() - self._told
        self._told |= new
        return new

    def use(self, exponents: Exponents, shape: MatrixOf, residuals: Residuals | None) -> None:
        """Take other factors, and change the units of residuals.

        Args:
            exponents: the factors; those of parameters of another shape are left out.
            shape: the parameters' matrices, whatever their codecs are.
            residuals: what is in the factors of now.
        """
        then, self.current = self.current, {}
        for name in {**then, **exponents}:
            matrix = shape(name)
            none = torch.zeros(matrix.size if matrix else 0, dtype=torch.int8, device="cpu")
            old, new = then.get(name, none), exponents.get(name, none)
            if matrix is None or len(old) != matrix.size or len(new) != matrix.size:
                continue
            if residuals is not None and not torch.equal(old, new):
                change = matrix.factors(old - new, matrix.given)
                residuals.scale_matrix(name, change, matrix.columns, matrix.forgets)
            if name in exponents:
                self.current[name], self._matrices[name] = new, matrix
        self._scales.clear()

    def knows(self, names: Iterable[str]) -> bool:
        """Whether there has been a look at all of these parameters."""
        return all(name in self._means for name in names)

    def forget(self, name: str) -> None:
        """Forget a parameter, whose shape has changed; it has no residual."""
        of_look = {} if self.sums is None else self.sums
        for known in (self.current, self._matrices, self._decided, self._means, of_look):
            known.pop(name, None)
        self._scales.clear()

    def leave(self, names: Set[str], shape: MatrixOf, residuals: Residuals | None) -> None:
        """Let some parameters have no factors until a look at them finds new ones."""
        self.use({n: one for n, one in self.current.items() if n not in names}, shape, residuals)
        for name in names:
            self.forget(name)

    def look(self, values: torch.Tensor, bucket: Bucket, matrix: MatrixOf) -> None:
        """Sum the squares of a bucket's gradients, before anything is done to them.

        Args:
            values: the bucket [rows * values].
            bucket: its layout.
            matrix: the parameters' matrices.
        """
        if values.dtype == torch.float16 or self.sums is None:  # float16 has no room for factors
            return
        for piece in bucket.pieces:
            found = matrix(piece.name)
            if found is None or not piece.numel:
                continue
            part = _view(values, bucket.rows, piece.offset, piece.numel, found.columns)
            sums = torch.zeros(found.size, dtype=torch.float32, device=values.device)
            ours = torch.linalg.vector_norm(part, dim=2, dtype=torch.float32).view(-1)
            rows = sums[: found.rows][found.given]
            rows += ours[: len(rows)].square()
            columns = torch.linalg.vector_norm(part, dim=(0, 1), dtype=torch.float32)
            sums[found.rows :] += columns.square()
            known = self.sums.get(piece.name)
            self.sums[piece.name] = sums if known is None else known + sums

    def end(
        self,
        matrices: Mapping[str, Matrix],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
    ) -> None:
        """End a look: add up the sums, and decide; collective.

        Args:
            matrices: of all parameters that may get factors, equal on all ranks.
            groups: the ranks; of a mesh the groups along its dimensions.
            device: a device whose tensors the groups move.
        """
        sums, self.sums = self.sums or {}, None
        self._erring = {name for name, matrix in matrices.items() if matrix.forgets}
        if not matrices:
            return
        sizes = [one.size for one in matrices.values()]
        none = {size: torch.zeros(size, dtype=torch.float32, device=device) for size in set(sizes)}
        flat = torch.cat([sums.get(name, none[one.size]) for name, one in matrices.items()])
        for group in groups:
            dist.all_reduce(flat, group=group)
        for name, part in zip(matrices, torch.split(flat.cpu().double(), sizes), strict=True):
            mean = self._means.setdefault(name, torch.zeros_like(part))
            if part.isfinite().all():  # not in a step that has overflowed
                # Of the looks in which it had gradients at all: rare rows are not small ones.
                mean = torch.where(mean > 0, (mean + part) / 2, part).where(part > 0, mean)
                self._means[name] = mean
        decided = torch.cat([self._decide(name, one) for name, one in matrices.items()])
        for group in groups:
            there = decided.to(device)
            decided = answer(group.broadcast(there, 0), there)
        now = dict(self._decided)
        for name, exponents in zip(matrices, torch.split(decided, sizes), strict=True):
            now.pop(name, None)
            if exponents.any():
                now[name] = exponents.clone()
        self.moved |= not _equal(now, self._decided)
        self._decided = now

    def _decide(self, name: str, matrix: Matrix) -> torch.Tensor:
        """Return a parameter's exponents, int8 [rows + columns]; zeros: it needs no factors."""
        none = torch.zeros(matrix.size, dtype=torch.int8, device="cpu")
        known = self._decided.get(name, none)
        mean = self._means.get(name)
        if mean is None:
            return known
        counts = [matrix.rows, matrix.columns]
        parts = zip(
            *(torch.split(one, counts) for one in (known, mean)), reversed(counts), strict=True
        )
        return torch.cat(
            [_exponents(then, size) if count >= LEAST else then for then, size, count in parts]
        )

    # ------------------------------------------------------------------ buckets

    def scale(self, values: torch.Tensor, bucket: Bucket, sign: int) -> None:
        """Divide a bucket [rows * values] by its factors before it is coded, or multiply a decoded
        one [values] by them.

        Args:
            values: the bucket.
            bucket: its layout.
            sign: -1 to divide, 1 to multiply.
        """
        rows = bucket.rows if sign < 0 else 1
        for piece in bucket.pieces:
            exponents = self.current.get(piece.name)
            if exponents is None or not piece.numel:
                continue
            matrix = self._matrices[piece.name]
            part = _view(values, rows, piece.offset, piece.numel, matrix.columns)
            key = piece.name, values.device, sign
            scales = self._scales.get(key)
            if scales is None:
                place = matrix.given if sign < 0 else matrix.got
                there = [f.to(values.device) for f in matrix.factors(sign * exponents, place)]
                shape = (rows, -1, 1)
                scales = [f.view(shape) if f.ndim > 1 else f for f in there]
                self._scales[key] = scales
            for factors in scales:
                part.mul_(factors)

    def span(self, names: Iterable[str]) -> str:
        """Return the smallest and the largest factor of some parameters that have factors."""
        exponents = torch.cat([self.current[name] for name in names])
        return f"2^{int(exponents.min())} to 2^{int(exponents.max())}"

    def norms(self, residuals: Residuals) -> dict[str, tuple[float, float]]:
        """Return `Residuals.norms` in units of gradients."""
        found = residuals.norms()
        for name in self.current.keys() & found.keys():
            matrix, residual = self._matrices[name], residuals[name]
            how = matrix.factors(self.current[name], matrix.given), matrix.columns
            found[name] = norm(residual, "worker", *how), norm(residual, "owner", *how)
        return found

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint, equal on all ranks."""
        means = dict(self._means)
        return {"current": dict(self.current), "decided": dict(self._decided), "means": means}

    def load_state_dict(
        self,
        state: Mapping[str, Mapping[str, torch.Tensor]],
        names: Mapping[str, str],
        shape: MatrixOf,
        residuals: Residuals | None,
    ) -> None:
        """Restore the state from `state_dict`.

        Args:
            state: what was returned.
            names: names here by the saved ones.
            shape: the parameters' matrices here, whatever their codecs are.
            residuals: those of now, which get the units of the saved ones.
        """
        found: dict[str, Exponents] = {}
        for key in ("current", "decided", "means"):
            found[key] = {}
            for name, values in renamed(state[key], names).items():
                matrix = shape(name)
                if matrix is not None and matrix.size == len(values):
                    found[key][name] = values.cpu()  # whatever the state was loaded to
        self._decided, self._means = found["decided"], found["means"]
        self.use(found["current"], shape, residuals)
        self.moved = True


def _exponents(known: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the exponents of rows or columns, int8; zeros: they are alike.

    Args:
        known: those of now.
        mean: mean squares, float64; 0: not known.
    """
    live = mean > 0
    if not live.any():
        return known
    size = 0.5 * torch.log2(mean / mean[live].median())
    moves = live & ((size - known).abs() > _STAY)
    exponents = torch.where(moves, size.round().clamp(-_MOST, _MOST), known.double())
    shares = [(exponents.abs() >= far).double().mean() > share for far, share in SHARES]
    needs = known.any() or exponents.max() >= LARGE or any(shares)
    return exponents.to(torch.int8) if needs else torch.zeros_like(known)


def _equal(one: Exponents, other: Exponents) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _view(values: torch.Tensor, rows: int, offset: int, numel: int, columns: int) -> torch.Tensor:
    """Return a parameter's part of a bucket [rows * values] as [rows, parts, columns]."""
    table = values.view(rows, -1)
    first, last = table.stride()
    shape, strides = (rows, numel // columns, columns), (first, columns * last, last)
    return table.as_strided(shape, strides, table.storage_offset() + offset * last)
