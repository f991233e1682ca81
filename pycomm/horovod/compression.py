"""Horovod's `Compression`: formats of gradients between ranks, and pycomm's codecs among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pycomm.arguments import typed
from pycomm.feedback import Feedback
from pycomm.policy import Policy


@dataclass(frozen=True)
class Coded:
    """A codec of pycomm with its feedback, for `DistributedOptimizer`."""

    policy: Policy
    feedback: bool | str | Feedback = True


class _Uncompressed:
    """Gradients travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor


class _Half:
    """Floats travel in 16 bits, and are summed in 16 bits by `allreduce`."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor if context is None else tensor.to(context)


class Compression:
    """Choices for the argument `compression`; Horovod's `none` and `fp16`, and any codec."""

    none = _Uncompressed
    """exact"""
    fp16 = _Half
    """16 bits; a `DistributedOptimizer` sums in float32, and rounds once more"""

    @staticmethod
    def codec(codec: str | Policy = "int4", *, feedback: bool | str | Feedback = True) -> Coded:
        """Return a codec of pycomm for `DistributedOptimizer`: Compression.codec("int4").

        Args:
            codec: a codec or policy, as for `pycomm.compress`.
            feedback: error feedback, as for `pycomm.compress`.

        Raises:
            ValueError: an unknown codec, or bad options.
        """
        typed("codec", codec, str, Policy)
        return Coded(Policy.of(codec), feedback)
