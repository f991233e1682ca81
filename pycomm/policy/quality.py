"""How good and how small codecs are, measured on values that are the same everywhere."""

from __future__ import annotations

from functools import cache
from math import sqrt

import torch

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec

_SIDE = 128  # of a matrix on which errors are measured
_LARGE = 1024

LADDER = ("int4", "int8", "bf16", "fp32")
"""Where a parameter goes for which its codec is too coarse."""


@cache
def nominal_error(codec: Codec) -> float:
    """Return the relative L2 error of one coding of normal values.

    Equal on all ranks, since codecs are exact to the bit.
    """
    codec = codec.fit((_SIDE, _SIDE))
    values = torch.randn(_SIDE**2, generator=torch.Generator().manual_seed(0))
    decoded = codec.decode(codec.encode(values), _SIDE**2)
    return float((decoded - values).double().norm() / values.double().norm())


def reduced_error(codec: Codec) -> float:
    """Return the same of an all-reduce: with an owner that codes again, errors of two codings."""
    return nominal_error(codec) * (sqrt(2) if codec.combine == "recode" else 1)


@cache
def bits(codec: Codec) -> float:
    """Return the bits per value of a large matrix."""
    return 8 * codec.fit((_LARGE, _LARGE)).encoded_bytes(_LARGE**2) / _LARGE**2


def finer(codec: Codec) -> Codec | None:
    """Return the next codec of the ladder whose error is clearly smaller, or None after exact."""
    error = nominal_error(codec)
    better = (parse_codec(spec) for spec in LADDER)
    return next((c for c in better if nominal_error(c) < 0.6 * error), None)
