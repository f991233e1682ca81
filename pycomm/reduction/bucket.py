"""Buckets: the place, codec and residual of each parameter in a bucket that a hook reduces."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pycomm.codecs import Codec
from pycomm.feedback import Residual, Residuals
from pycomm.feedback.residual import ALL, Spans
from pycomm.policy import Decision

if TYPE_CHECKING:
    import torch

    from pycomm._c10d import Layout


_NONE = (0, 0)
_READ = (((0, 1), (1, 0)), ((1, 1), (0, 0)))  # by `Residual.in_place` and `side`


@dataclass(frozen=True, eq=False)
class BucketPiece:
    """One parameter's part of a bucket, like the struct of the same name in communicator.h."""

    name: str
    offset: int
    numel: int
    codec: Codec
    tensor: int
    """Number of the parameter in the model; selects its random numbers."""
    residual: Residual | None


class Bucket:
    """The pieces of a bucket, in order.

    Args:
        decisions: codec of each parameter, in the order of the bucket.
        numbers: number of each parameter in the model.
        residuals: the model's residuals; None for no feedback. An exact parameter has one only if
            an earlier residual is still unsent, or if it has momentum.
        device: device of the residuals.
        rows: number of rows of this layout: for a reduce-scatter one for each rank. The workers'
            residuals have as many.
        levels: node of each rank, if the all-reduce is hierarchical (``Backend.levels``): then a
            rank codes a part of its node's sum, and the owners of values change.
        shares: where each rank's share of the values begins, if shares differ (``Backend.shares``).
        paths: by operation, and whether senders are averaged: the `ChosenPath` on which the ranks
            have agreed. It outlives this object, which each rank makes anew where its own residuals
            are paid: one that has thrown a gradient away, or has joined later, does so in another
            step or never. So only what is there decides about a collective.
        held: function that returns, for each piece, which of its values need memory for their
            residuals; None: all of them.
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
        shares: Sequence[int] = (),
        paths: dict[tuple[str, bool], Any] | None = None,
        held: Callable[[Sequence[BucketPiece]], Sequence[Spans]] | None = None,
    ) -> None:
        self.paths = {} if paths is None else paths
        self.pieces: list[BucketPiece] = []
        self.rows, self.levels = rows, tuple(levels)
        self.numel = 0
        self.flushed: set[str] = set()
        """Names of the pieces whose old residual is still to be sent: their codec leaves none."""
        for decision, number in zip(decisions, numbers, strict=True):
            name, numel = decision.parameter.name, decision.parameter.numel
            residual = None
            kind = residuals.rule.kind if residuals is not None else None
            if levels and kind == "momentum":
                raise ValueError(
                    "feedback of the kind momentum needs ranks that send for themselves, and here "
                    "nodes do; use residual or decay, or PYCOMM_ALGO=flat"
                )
            keeps_errors = residuals is not None and residuals.rule.keeps_errors(decision.codec)
            if residuals is not None and (keeps_errors or name in residuals or kind == "momentum"):
                codec = decision.codec
                form: dict[str, Any] = {"rows": rows, "error": keeps_errors, "codec": codec}
                residual = residuals.get(name, numel, device, empty=held is not None, **form)
            if residual is not None and not keeps_errors:
                self.flushed.add(name)
            self.pieces.append(
                BucketPiece(name, self.numel, numel, decision.codec, number, residual)
            )
            self.numel += numel
        spans = held(self.pieces) if held else [ALL] * len(self.pieces)
        self.spans = {p.name: one for p, one in zip(self.pieces, spans, strict=True)}
        """By name of a piece: the values whose residuals have memory."""
        self._memory = 0
        for piece in self.pieces if held else ():
            if piece.residual is not None and piece.residual.layouts == ["", ""]:
                piece.residual.hold(self.spans[piece.name])
        # Where no rank has a residual, far ranks need no owners: one round in place of two.
        names = [piece.name for piece in self.pieces]
        self._may_owe = residuals is not None and residuals.may_owe(names)
        self.with_residual = {p.name: p for p in self.pieces if p.residual is not None}
        """The pieces that have a residual, by name."""
        text = ";".join(f"{p.name},{p.numel},{p.codec.spec()}" for p in self.pieces)
        if levels:
            text += f";levels={','.join(map(str, levels))}"
        if shares:
            text += f";shares={','.join(map(str, shares))}"
        self.layout = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.layouts = [self.layout, self.layout]
        """Layouts of the two sides of a residual that has been reduced in this bucket alone."""
        self.exchanges: dict[tuple[str, int, int, bool], Any] = {}
        """By operation, rank, number of ranks, and whether senders are averaged: who codes it where
        Python moves the payloads; see `two_shot.find`."""
        self.parts: list[Any] = []
        """The runs of each rank of a node, where the bucket is reduced by nodes in Python."""
        self.single: Any = None
        """The `SingleCoding` that averages the bucket; False: another way does; None: nobody has
        asked yet. See `BucketReducer.coding_of`."""
        self.moments: Any = None
        """The matrices of a coded optimizer, as kernels of a device know them."""
        self._native: Layout | None = None

    def follow_memory(self) -> None:
        """Forget what has addresses of residuals, if some of these have got another memory."""
        memory = sum(residual.memory for residual in self.residuals if residual is not None)
        if memory != self._memory:
            self._memory, self._native, self.moments = memory, None, None
            self.exchanges.clear()

    @cached_property
    def gathers(self) -> bool:
        """Whether some values have no owners: all ranks get their payloads."""
        return any(p.codec.combine == "gather" and p.numel > 0 for p in self.pieces)

    @property
    def native(self) -> Layout:
        """The layout for `Backend.compressed_all_reduce` and the other compressed collectives."""
        if self._native is None:
            from pycomm._build import load_c10d

            self._native = load_c10d().Layout(self.rows, owner_residuals=self._may_owe)
            for p in self.pieces:
                options = p.residual.options() if p.residual is not None else {}
                self._native.add(p.numel, p.codec.spec(), p.tensor, **options)
        return self._native

    @cached_property
    def residuals(self) -> list[Residual | None]:
        """The residual of each piece."""
        return [piece.residual for piece in self.pieces]

    @property
    def sides(self) -> list[tuple[int, int]]:
        """For each piece's residual, the side that is read now and the side that is written."""
        sides = []  # as `Residual.sides`, without a call for each parameter
        for r in self.residuals:
            sides.append(_NONE if r is None else _READ[r.in_place][r.side])
        return sides
