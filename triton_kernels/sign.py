"""sign in Triton. Wire format: docs/wire/sign.md; arithmetic as in csrc/codecs/sign.h.

A program processes a tile of whole blocks, one per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import launch, sections
from pycomm.triton_kernels._math import (
    add_or_not,
    bits_float,
    error_after,
    float_bits,
    load_sum,
    mean_scales,
)

TILE = 2048  # values per program that decodes: 16 per thread of four warps
WARP = 1024  # values of a warp that encodes: it adds a block without the others

# ---------------------------------------------------------------- kernels


@triton.jit
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, scale_ptr, code_ptr, numel, codes,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    scale, used = mean_scales(p, row, numel, ROWS, BLOCK)
    negative = (p < 0.0).to(tl.int32)

    tl.store(scale_ptr + row, scale, mask=row * BLOCK < numel)
    places = tl.arange(0, 32)[None, None, :]
    words = tl.sum(tl.reshape(negative, (ROWS, BLOCK // 32, 32)) << places, axis=2)
    word = row * (BLOCK // 32) + tl.arange(0, BLOCK // 32)[None, :]
    # To mask words takes less than to mask the signs of all values.
    tl.store(code_ptr + word, tl.where(used, words, 0), mask=word < codes)
    if FEEDBACK:
        value = bits_float(float_bits(scale) ^ (negative << 31))
        tl.store(new_residual_ptr + offsets, error_after(p, value, residual), mask=mask)


@triton.jit
def decode_kernel(
    scale_ptr, code_ptr, out_ptr, numel,
    BLOCK: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < numel
    word = tl.load(code_ptr + offsets // 32, mask=mask, other=0)
    scale = tl.load(scale_ptr + offsets // BLOCK, mask=mask, other=0.0)
    negative = (word >> (offsets % 32).to(tl.int32)) & 1
    add_or_not(out_ptr, offsets, mask, bits_float(float_bits(scale) ^ (negative << 31)), ADD)


# -------------------------------------------------------------- launchers


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    scale, codes = sections(codec, args.out, numel, torch.int32)
    tile = max(WARP, codec.block)
    launch(
        encode_kernel,
        triton.cdiv(numel, tile),
        *(args.x, args.residual, args.new_residual, scale, codes, numel, codes.numel()),
        BLOCK=codec.block,
        ROWS=tile // codec.block,
        FEEDBACK=args.residual is not None,
        num_warps=tile // WARP,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(*sections(codec, payload, numel, torch.int32), out, numel),
        BLOCK=codec.block,
        SIZE=TILE,
        ADD=add,
    )
