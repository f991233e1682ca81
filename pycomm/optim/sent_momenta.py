"""The exchange of coded momenta by ranks that each go on from what itself has sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pycomm.feedback import storage
from pycomm.hooks.coded_once import CodedOnce
from pycomm.optim.own_state import OwnState
from pycomm.reduction.state import CompressionState


class SentMomenta(CodedOnce, OwnState):
    """Codecs of the momenta, and what each rank has sent of them, `own`."""

    before: dict[str, torch.Tensor]
    """Residuals before the last coding, where that has overwritten them."""

    def reduce(
        self, tensor: torch.Tensor, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """See `BucketReducer`; fills `before`."""
        self.before = {}
        bucket = self._bucket(tuple(names), tensor.device)
        if self.process_group.size() > 1 and not bucket.levels:
            for piece in bucket.pieces:
                stored = self.residual_before(piece.residual, bucket)
                if stored is not None:
                    self.before[piece.name] = storage.load(stored, piece.numel)
        return super().reduce(tensor, names)

    def adopt_state(self, previous: CompressionState | None) -> None:
        """See `CompressionState`: ranks go on from the momentum, of which lost ones had a part."""
        super().adopt_state(previous)
        self.own = {}

    def codes_sums(self, names: Iterable[str], device: torch.device) -> bool:
        """Whether nodes code the sums of their ranks, of which none has sent anything of its own.

        Args:
            names: the parameters of a bucket.
            device: where they are.
        """
        if self.process_group.size() == 1:
            return False
        return bool(self._bucket(tuple(names), device).levels)
