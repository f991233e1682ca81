"""What a hook knows of one bucket: which parameter lies where, with which codec and residual."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pycomm.codecs import Codec
from pycomm.feedback import Feedback, Residual
from pycomm.policy import Decision

if TYPE_CHECKING:
    import torch

    from pycomm._c10d import Layout


@dataclass(frozen=True, eq=False)
class Piece:
    """One parameter's part of a bucket; the struct of the same name in communicator.h."""

    name: str
    offset: int
    numel: int
    codec: Codec
    tensor: int
    """Number of the parameter in the model; names its random numbers."""
    residual: Residual | None


class Bucket:
    """A bucket's pieces, in order.

    Args:
        decisions: codec of each parameter, in the order of the bucket.
        numbers: number of each parameter in the model.
        feedback: holds the residuals; None for no feedback.
        device: where the residuals live.
        rows: of the values, each laid out like this: for a reduce-scatter one for each rank. The
            workers' residuals have as many.
        levels: node of each rank, if the all-reduce goes node by node (``Backend.levels``): then a
            rank codes a part of its node's sum, and other ranks own other values.
    """

    def __init__(
        self,
        decisions: Sequence[Decision],
        numbers: Sequence[int],
        feedback: Feedback | None,
        device: torch.device,
        *,
        rows: int = 1,
        levels: Sequence[int] = (),
    ) -> None:
        self.pieces: list[Piece] = []
        self.rows = rows
        self.numel = 0
        for decision, number in zip(decisions, numbers, strict=True):
            name, numel = decision.parameter.name, decision.parameter.numel
            # What has become exact still has its debts to pay, which it does at once.
            fed = feedback is not None and (not decision.exact or name in feedback)
            residual = feedback.residual(name, rows * numel, device) if fed and feedback else None
            self.pieces.append(Piece(name, self.numel, numel, decision.codec, number, residual))
            self.numel += numel
        text = ";".join(f"{p.name},{p.numel},{p.codec.spec()}" for p in self.pieces)
        if levels:
            text += f";levels={','.join(map(str, levels))}"
        self.layout = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._native: Layout | None = None

    @property
    def native(self) -> Layout:
        """The same for `Backend.compressed_all_reduce` and the other compressed collectives."""
        if self._native is None:
            from pycomm._build import load_c10d

            self._native = load_c10d().Layout(self.rows)
            for p in self.pieces:
                worker = p.residual.worker if p.residual else None
                owner = p.residual.owner if p.residual and self.rows == 1 else None
                self._native.add(p.offset, p.numel, p.codec.spec(), p.tensor, worker, owner)
        return self._native
