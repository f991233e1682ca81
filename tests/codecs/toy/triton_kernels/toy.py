"""toy in Triton. Wire format: docs/wire/toy.md."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import add_or_not, bits_float, error_after, float_bits, load_sum

TILE = 2048


@triton.jit
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, code_ptr, numel, codes,
    SIZE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    half = tl.where(p != p, 0x7FC0, float_bits(p) >> 16)
    tl.store(code_ptr + offsets, tl.where(mask, half, 0).to(tl.int16), mask=offsets < codes)
    if FEEDBACK:
        value = bits_float(half << 16)
        tl.store(new_residual_ptr + offsets, error_after(p, value, residual), mask=mask)


@triton.jit
def decode_kernel(code_ptr, out_ptr, numel, SIZE: tl.constexpr, ADD: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    half = tl.load(code_ptr + offsets, mask=offsets < numel, other=0).to(tl.int32)
    add_or_not(out_ptr, offsets, offsets < numel, bits_float(half << 16), ADD)


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual."""
    numel, code = args.x.numel(), args.out.view(torch.int16)
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, code, numel, code.numel()),
        SIZE=TILE,
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(payload.view(torch.int16), out, numel),
        SIZE=TILE,
        ADD=add,
    )
