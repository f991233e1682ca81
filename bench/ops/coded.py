"""Collectives with codecs: the calls, the expected results, and the loss of one encoding.

Values are near a normal distribution, as gradients are. A lossy codec has no bit-exact result, so
the error is compared with the codec's own loss, and all ranks must agree.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycomm import _C
from pycomm.bench.ops.operations import Case

SAMPLE = 1 << 16  # values on which a codec's loss is estimated, besides those of the case
SLACK = 1.5  # ratio between the losses of two samples
# Relative tolerances of float32 sums and of stored results.
ROUNDING = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7}


CORE = ("all_reduce", "reduce_scatter")
"""The operations that have a coded form."""


def gradient(count: int, rank: int) -> np.ndarray[Any, Any]:
    """Return gradient-like float32 values, different on each rank."""
    return np.random.default_rng(rank).standard_normal(count, dtype=np.float32)


def inputs(case: Case, rank: int) -> Tensor:
    """Return a rank's input."""
    values = gradient(case.op.parts(case.ranks)[0] * case.count, rank)
    return torch.from_numpy(values).to(case.type)


def expected(case: Case) -> Tensor:
    """Return the exact result on this rank, in float64: reductions average."""
    average = replace(case, redop="avg")
    return case.op.expected(average, lambda rank: inputs(case, rank).double())


@cache
def one_coding(spec: str, count: int, rank: int) -> tuple[float, int]:
    """Return the relative L2 error of encoding a rank's values once, and the payload's bytes."""
    x = gradient(count, rank)
    codec = _C.Codec(spec)
    payload, decoded = np.zeros(codec.encoded_bytes(count), np.uint8), np.zeros_like(x)
    codec.encode(x.ctypes.data, count, payload.ctypes.data)
    codec.decode(payload.ctypes.data, decoded.ctypes.data, count)
    used = int(payload[:4].view(np.uint32)[0]) if codec.variable else payload.nbytes
    return float(np.linalg.norm(decoded - x) / np.linalg.norm(x)), used


def most_error(case: Case, spec: str) -> float:
    """Return the largest relative error of a correct result.

    A mean of independent values has the relative error of one of them, v, and is encoded once more:
    v + v (1 + v).
    """
    v = max(one_coding(spec, case.count, case.rank)[0], one_coding(spec, SAMPLE, 0)[0])
    return SLACK * (2 * v + v * v) + ROUNDING[case.dtype]


def ratio(case: Case, spec: str) -> float:
    """Return plain bytes over payload bytes, for what one call encodes at once."""
    return case.count * case.type.itemsize / one_coding(spec, case.count, case.rank)[1]
