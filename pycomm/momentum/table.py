"""The matrices of a bucket or of a step, as C++ knows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm.errors import Error
from pycomm.feedback import Residual, storage
from pycomm.momentum.kernels import Kernels
from pycomm.momentum.moment import CodedMoment, local
from pycomm.reduction.bucket import BucketPiece

FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2, torch.float16: 3}
"""Numbers of stored values' forms, csrc/optim/moments_params.h."""

Part = tuple[CodedMoment, "BucketPiece | None"]
"""A matrix, and its place in a bucket."""


class Table:
    """Matrices, and the addresses of all that the passes read and write for them.

    Args:
        kernels: what runs the passes.
        parts: the matrices.
        own: where what was sent of each is kept; None: nowhere.
        shards: number of shards of each that this rank codes, one behind the other; 1: its own.
        numel: values of a bucket's shard.
    """

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[Part],
        own: Sequence[Residual] | None = None,
        shards: int = 1,
        numel: int = 0,
    ) -> None:
        self.parts, self.own, self.shards = list(parts), own, shards
        self.native = kernels.moments()
        """The shards that are coded."""
        self.landed = kernels.moments() if shards > 1 else self.native
        """This rank's own shards."""
        self._at = [_checked(moment) for moment, _ in parts]
        self.numbers = {id(moment): i for i, (moment, _) in enumerate(parts)}
        """Of the moments, by id."""
        self.sums_numel = 0
        for i, (moment, piece) in enumerate(parts):
            if moment.device.type != kernels.device.type:
                raise Error(
                    f"{moment.optimizer}: parameters are on {moment.device}, and gradients are "
                    f"reduced on {kernels.device}: leave out CPUOffloadPolicy"
                )
            offset = piece.offset if piece else 0
            residual, sent = piece.residual if piece else None, own[i] if own is not None else None
            for shard in range(shards) if shards > 1 else ():
                place = offset + shard * numel
                self._add(self.native, moment, place, (shard, shard, shards), residual, sent)
            self._add(self.landed, moment, offset, (moment.shard, 0, 1), residual, sent)
            self.sums_numel += moment.sums_numel

    def _add(
        self,
        to: object,
        moment: CodedMoment,
        offset: int,
        shard: tuple[int, int, int],
        residual: Residual | None,
        own: Residual | None,
    ) -> None:
        """Add a shard: its number, that among those that are coded here, and their number."""
        (number, row, rows), state = shard, moment.state
        momentum = local(state[moment.key])
        to.add(  # type: ignore[attr-defined]
            (offset, self.sums_numel),
            (moment.rows, moment.columns, number * moment.padded, moment.padded, row, rows),
            [
                moment.room.data_ptr(),
                *(state[key].data_ptr() for key in ("row", "column", "heard")),
            ],
            (momentum.data_ptr(), FORMS[momentum.dtype]),
            _sides(residual, row),
            _sides(own, row),
        )

    @property
    def is_current(self) -> bool:
        """Whether addresses are still those: a state may have been loaded since."""
        for (moment, _), (momentum, at) in zip(self.parts, self._at, strict=True):
            state = moment.state  # without a call of Python
            if state[moment.key] is not momentum or state["row"].data_ptr() != at:
                return False
        return True


def _checked(moment: CodedMoment) -> tuple[torch.Tensor, int]:
    """Return what tells one state from another, whose tensors lie without gaps."""
    state = moment.state
    for key in (moment.key, "row", "column", "heard"):
        if not local(state[key]).is_contiguous():  # of a checkpoint
            state[key] = state[key].contiguous()
    return state[moment.key], state["row"].data_ptr()


def _sides(residual: Residual | None, row: int) -> tuple[int, int, int]:
    if residual is None or residual.worker is None:
        return 0, 0, 0
    first, second = residual.worker
    before = row * storage.count(residual.rule.storage, residual.numel)
    return first.data_ptr() + before, second.data_ptr() + before, FORMS[first.dtype]
