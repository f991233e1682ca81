"""Error and size of codecs, measured on values that are equal on all ranks."""

from __future__ import annotations

from functools import cache
from math import sqrt

import torch

from pycomm.codecs import Codec
from pycomm.codecs import codec as parse_codec

_VALUES = 1 << 14  # on which errors are measured
_LARGE = 1 << 20

LADDER = ("int4", "int8", "bf16", "fp32")
"""Codecs to which a parameter moves if its codec is too coarse."""


@cache
def nominal_error(codec: Codec) -> float:
    """Return the relative L2 error of one coding of normal values.

    It is equal on all ranks, since codecs are bit-exact.
    """
    values = torch.randn(
        _VALUES, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu"
    )
    decoded = codec.decode(codec.encode(values), _VALUES)
    return float((decoded - values).double().norm() / values.double().norm())


def reduced_error(codec: Codec, spread: float = 1.0) -> float:
    """Return the relative L2 error of a whole all-reduce of normal values.

    Let v be the squared error of one coding, d_i the contributions and D their sum. The codings of
    the ranks have the squared error v * sum |d_i|^2. An owner that codes their sum again adds v
    times the square of what it codes, errors included. Relative to |D|^2, where
    sum |d_i|^2 = spread * |D|^2, the total is v * spread + v * (1 + v * spread): for independent
    contributions 2 v + v^2.

    Args:
        codec: the codec.
        spread: sum |d_i|^2 / |sum d_i|^2; 1 for independent contributions, 1 / ranks for equal
            ones. Below 1 contributions are alike, and codecs that round all of them the same way
            make like errors: only the errors of unbiased codecs shrink.
    """
    v = nominal_error(codec) ** 2
    first = v * (spread if codec.unbiased else max(spread, 1.0))
    return sqrt(first + v * (1 + first) if codec.combine == "recode" else first)


@cache
def bits(codec: Codec) -> float:
    """Return the bits per value of a large tensor."""
    return 8 * codec.encoded_bytes(_LARGE) / _LARGE


def finer(codec: Codec) -> Codec | None:
    """Return the next codec of the ladder whose error is clearly smaller, or None after exact."""
    error = nominal_error(codec)
    better = (parse_codec(spec) for spec in LADDER)
    return next((c for c in better if nominal_error(c) < 0.6 * error), None)
