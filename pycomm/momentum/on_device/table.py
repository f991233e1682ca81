"""The matrices of a bucket or of a step, as C++ knows them."""

from __future__ import annotations

from collections.abc import Sequence

from pycomm import _C
from pycomm.feedback import Residual
from pycomm.momentum.on_device.moment import DeviceMoment
from pycomm.momentum.scaled import FORMS
from pycomm.reduction.bucket import BucketPiece

Part = tuple[DeviceMoment, "BucketPiece | None"]
"""A matrix, and its place in a bucket."""


class Table:
    """Matrices, and the addresses of all that kernels read and write for them.

    Args:
        parts: the matrices.
        own: where what was sent of each is kept; None: nowhere.
    """

    def __init__(self, parts: Sequence[Part], own: Sequence[Residual] | None = None) -> None:
        self.parts, self.own = list(parts), own
        self.native = _C.DeviceMoments()
        self._at: list[tuple[int, int]] = []
        self.numbers = {id(moment): i for i, (moment, _) in enumerate(parts)}
        """Of the moments, by id."""
        self.sums_numel = 0
        for i, (moment, piece) in enumerate(parts):
            state = moment.state
            momentum = state["exp_avg"]
            self.native.add(
                (piece.offset if piece else 0, self.sums_numel, moment.rows, moment.columns),
                [
                    one.data_ptr()
                    for one in (moment.room, *(state[k] for k in ("row", "column", "heard")))
                ],
                (momentum.data_ptr(), FORMS[momentum.dtype]),
                _sides(piece.residual if piece else None),
                _sides(own[i] if own is not None else None),
            )
            self._at.append((momentum.data_ptr(), state["row"].data_ptr()))
            self.sums_numel += moment.sums_numel

    @property
    def is_current(self) -> bool:
        """Whether addresses are still those: a state may have been loaded since."""
        for (moment, _), (momentum, row) in zip(self.parts, self._at, strict=True):
            state = moment.state
            if state["exp_avg"].data_ptr() != momentum or state["row"].data_ptr() != row:
                return False
        return True


def _sides(residual: Residual | None) -> tuple[int, int, int]:
    if residual is None or residual.worker is None:
        return 0, 0, 0
    first, second = residual.worker
    return first.data_ptr(), second.data_ptr(), FORMS[first.dtype]
