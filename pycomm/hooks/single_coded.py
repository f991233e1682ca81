"""The exchange of a momentum, whose coarse payloads are coded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.feedback.residual import ALL, Spans
from pycomm.policy.exchange import gather
from pycomm.reduction.bucket import Bucket, BucketPiece
from pycomm.reduction.nodes import Nodes
from pycomm.reduction.reducer import completed
from pycomm.reduction.single_coding import SingleCoding, is_coarse
from pycomm.reduction.state import CompressionState


class SingleCodedState(CompressionState):
    """The part of a state whose coarse payloads are gathered, or answered without a residual.

    See `pycomm.reduction.single_coding`: a second residual would be a second delay, which momentum
    does not tolerate. Finer codecs travel as gradients do.
    """

    defers = False
    has_factors = False  # the momentum has second moments of rows and columns

    _encoded: Callable[[], None] | None = None
    """Is called once, by the next reduction that `coding_of` tells of; see `SingleCoding`."""

    def coding_of(self, bucket: Bucket) -> SingleCoding | None:
        """Return how a bucket is averaged; None: as gradients are."""
        if bucket.single is None:  # it is asked for several times a step
            bucket.single = self._find_coding(bucket) or False
        return bucket.single or None

    def _find_coding(self, bucket: Bucket) -> SingleCoding | None:
        if self.process_group.size() == 1 or not any(is_coarse(p.codec) for p in bucket.pieces):
            return None
        single = SingleCoding(bucket, self.process_group)
        dense = [p for p in bucket.pieces if p.codec.combine != "gather"]
        if single.gathers and not any(is_coarse(p.codec) for p in dense):
            return None  # payloads are gathered there, too
        return single

    def _reduce_coded(
        self, tensor: torch.Tensor, bucket: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        single = self.coding_of(bucket)
        if single is None:
            return super()._reduce_coded(tensor, bucket)
        bucket.agreed.paths["all_reduce", False] = single.path(bucket, tensor)
        if not tensor.is_cpu:
            return super()._reduce_coded(tensor, bucket)
        self._use(bucket.pieces, bucket, tensor)
        how: dict[str, Any] = {"seed": self.seed, "step": self.step}
        finite = self._exchange(tensor, bucket, self.process_group, **how)
        self._current.checks.append(lambda: bool(finite))
        return completed(tensor)

    def _exchange(
        self,
        tensor: torch.Tensor,
        bucket: Bucket,
        group: dist.ProcessGroup,
        finish: Callable[[torch.Tensor], object] | None = None,
        **options: Any,
    ) -> torch.Tensor | None:
        single: SingleCoding = bucket.single  # which `_reduce_coded` has asked for
        if not single:
            return super()._exchange(tensor, bucket, group, finish, **options)
        values, encoded = tensor.contiguous(), self._encoded
        self._encoded = None
        finite = single.average(values, bucket, encoded=encoded, **options)
        if values is not tensor:
            tensor.copy_(values)
        return finite

    def on_any_rank(self, found: bool) -> bool:
        """Return whether any rank has found something; collective."""
        return any(one for (one,) in gather([found], self.process_group, self._device))

    def held(self, pieces: Sequence[BucketPiece], nodes: Nodes | None) -> list[Spans]:
        """See `BucketReducer`; a coarse payload has all values, by nodes, too."""
        return super().held(pieces, None) if nodes is None else [ALL] * len(pieces)

    @property
    def shards(self) -> int:
        """See `BucketReducer`; likewise."""
        return 1

    def residual_before(self, piece: BucketPiece, bucket: Bucket) -> torch.Tensor | None:
        """Return a copy of a worker residual that the coding of this step overwrites; else None.

        It does so if the bucket has another layout than the last one: `Residual.use` writes what
        the worker and the owner residual are together to where the new one is written.

        Args:
            piece: one of the bucket.
            bucket: a bucket that is reduced next, without levels.

        Returns:
            The residual as it is stored.
        """
        residual = piece.residual
        if residual is None or residual.worker is None:
            return None
        ranks = self.process_group.size()
        residual.use(bucket.layout, ranks, spans=bucket.spans[piece.name])
        bucket.follow_memory()
        return residual.stored_worker().clone() if residual.in_place else None
