"""Kernels with the faults that the PTX test must find. Triton's interpreter detects none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def divide(x_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, 127.0 / x)


@triton.jit
def multiply_add(x_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    x = tl.load(x_ptr + offsets)
    tl.store(x_ptr + offsets, x * x + x)


@triton.jit
def exponential(x_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(x_ptr + offsets, tl.exp(tl.load(x_ptr + offsets)))


def calls() -> Iterator[tuple[str, Any]]:
    x = torch.zeros(128)
    yield "plain-division", lambda: divide[(1,)](x, SIZE=128, enable_fp_fusion=False)
    yield "fusion-on", lambda: multiply_add[(1,)](x, SIZE=128, enable_fp_fusion=True)
    yield "fusion-off", lambda: multiply_add[(1,)](x, SIZE=128, enable_fp_fusion=False)
    yield "exponential", lambda: exponential[(1,)](x, SIZE=128, enable_fp_fusion=False)
