"""What a hook knows of one bucket: which parameter lies where, with which codec and residual."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pycomm import backend
from pycomm.codecs import Codec
from pycomm.feedback import Residual, Residuals
from pycomm.policy import Decision

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from pycomm._c10d import Backend, Layout


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
        residuals: of the model; None for no feedback. An exact parameter has one only if there is
            something left to tell, or momentum.
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
        residuals: Residuals | None,
        device: torch.device,
        *,
        rows: int = 1,
        levels: Sequence[int] = (),
    ) -> None:
        self.pieces: list[Piece] = []
        self.rows, self.levels = rows, tuple(levels)
        self.numel = 0
        for decision, number in zip(decisions, numbers, strict=True):
            name, numel = decision.parameter.name, decision.parameter.numel
            residual = None
            kind = residuals.rule.kind if residuals is not None else None
            if decision.codec.combine == "factors" and kind not in (None, "residual"):
                raise ValueError(
                    f"{name}: {decision.codec.name} has feedback of the kind residual, not {kind}"
                )
            if levels and kind in ("momentum", "ef21"):
                raise ValueError(
                    f"feedback of the kind {kind} needs ranks that send for themselves, and here "
                    "nodes do; use residual or ema, or PYCOMM_ALGO=flat"
                )
            owes = residuals is not None and residuals.rule.keeps_errors(decision.codec)
            if residuals is not None and (owes or name in residuals or kind == "momentum"):
                residual = residuals.get(name, numel, device, rows=rows, error=owes)
            self.pieces.append(Piece(name, self.numel, numel, decision.codec, number, residual))
            self.numel += numel
        text = ";".join(f"{p.name},{p.numel},{p.codec.spec()}" for p in self.pieces)
        if levels:
            text += f";levels={','.join(map(str, levels))}"
        self.layout = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._native: Layout | None = None
        self._taken: bool | None = None  # by a backend on a device

    @property
    def native(self) -> Layout:
        """The same for `Backend.compressed_all_reduce` and the other compressed collectives."""
        if self._native is None:
            from pycomm._build import load_c10d

            self._native = load_c10d().Layout(self.rows)
            for p in self.pieces:
                options: dict[str, Any] = {}
                if p.residual is not None:
                    rule, options = p.residual.rule, dict(p.residual.pairs())
                    options |= {"kind": rule.kind, "storage": rule.storage}
                    options |= {"decay": rule.decay, "nesterov": rule.nesterov}
                self._native.add(p.offset, p.numel, p.codec.spec(), p.tensor, **options)
        return self._native

    def taken_by(self, group: dist.ProcessGroup, op: str, tensor: torch.Tensor) -> Backend | None:
        """Return the backend that does an operation in C++; None: hooks exchange the payloads.

        All ranks ask together, for the first time.

        Args:
            group: that reduces or gathers.
            op: "all_reduce", "reduce_scatter" or "all_gather".
            tensor: has the values; always of one dtype and device.
        """
        native = backend.find(group, tensor.device)
        if native is None or tensor.is_cpu:
            return native
        if self._taken is None:
            self._taken = native.compresses(op, tensor, self.native)
        return native if self._taken else None

    @property
    def sides(self) -> list[tuple[int, int]]:
        """Of each piece's residual, the side that is read now and the side that is written."""
        return [p.residual.sides if p.residual else (0, 0) for p in self.pieces]

    @property
    def fed(self) -> list[str]:
        """The names of the pieces that have a residual."""
        return [p.name for p in self.pieces if p.residual is not None]
