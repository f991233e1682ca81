"""cast in Triton. Wire format: docs/wire/cast.md; arithmetic as in csrc/codecs/cast.h.

A program processes a tile of values; with blocks, each row of the tile is a block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import launch, sections
from pycomm.triton_kernels._math import (
    INF_BITS,
    NAN_BITS,
    add_or_not,
    bits_float,
    error_after,
    float_bits,
    from_bfloat16,
    from_small,
    load_sum,
    magnitude_bits,
    scales,
    to_bfloat16,
    to_small,
)

TILE = 2048  # values per program, the largest block: 16 per thread of four warps
FLOAT8 = {"float8_e4m3": (4, 3, 448.0), "float8_e5m2": (5, 2, 57344.0)}
CODE = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}

# ---------------------------------------------------------------- kernels


@triton.jit
def to_code(p, DTYPE: tl.constexpr):
    if DTYPE == "float32":
        code = tl.where(magnitude_bits(p) > INF_BITS, NAN_BITS, float_bits(p))
    elif DTYPE == "float16":
        code = p.to(tl.float16).to(tl.int16, bitcast=True)
        code = tl.where(magnitude_bits(p) > INF_BITS, 0x7E00, code).to(tl.int16)
    else:
        code = to_bfloat16(p)
    return code


@triton.jit
def from_code(code, DTYPE: tl.constexpr):
    if DTYPE == "float32":
        value = bits_float(code)
    elif DTYPE == "float16":
        value = code.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = from_bfloat16(code)
    return value


@triton.jit
def encode_plain_kernel(
    x_ptr, residual_ptr, new_residual_ptr, code_ptr, numel, codes,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    code = to_code(p, DTYPE)
    tl.store(code_ptr + offsets, code, mask=offsets < codes)
    if FEEDBACK:
        left = error_after(p, from_code(code, DTYPE), residual)
        tl.store(new_residual_ptr + offsets, left, mask=mask)


@triton.jit
def decode_plain_kernel(
    code_ptr, out_ptr, numel, DTYPE: tl.constexpr, SIZE: tl.constexpr, ADD: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < numel
    value = from_code(tl.load(code_ptr + offsets, mask=mask, other=0), DTYPE)
    add_or_not(out_ptr, offsets, mask, value, ADD)


@triton.jit
def encode_block_kernel(
    x_ptr, residual_ptr, new_residual_ptr, scale_ptr, code_ptr, numel, code_bytes,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    scale, inv, used = scales(p, TOP)
    code, value = to_small(tl.where(used, p * inv, 0.0), EXPONENT, MANTISSA)

    tl.store(scale_ptr + row, scale, mask=row * BLOCK < numel)
    tl.store(code_ptr + offsets, code, mask=offsets < code_bytes)
    if FEEDBACK:
        tl.store(new_residual_ptr + offsets, error_after(p, value * scale, residual), mask=mask)


@triton.jit
def decode_block_kernel(
    scale_ptr, code_ptr, out_ptr, numel,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    code = tl.load(code_ptr + offsets, mask=offsets < numel, other=0)
    scale = tl.load(scale_ptr + row, mask=row * BLOCK < numel, other=0.0)
    value = from_small(code, EXPONENT, MANTISSA) * scale
    add_or_not(out_ptr, offsets, offsets < numel, value, ADD)


# -------------------------------------------------------------- launchers


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    feedback = args.residual is not None
    if codec.dtype in FLOAT8:
        exponent, mantissa, top = FLOAT8[codec.dtype]
        scale, codes = sections(codec, args.out, numel)
        launch(
            encode_block_kernel,
            triton.cdiv(numel, TILE),
            *(args.x, args.residual, args.new_residual, scale, codes, numel, codes.numel()),
            EXPONENT=exponent,
            MANTISSA=mantissa,
            TOP=top,
            BLOCK=codec.block,
            ROWS=TILE // codec.block,
            FEEDBACK=feedback,
        )
        return
    codes = args.out.view(CODE[codec.dtype])
    launch(
        encode_plain_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, codes, numel, codes.numel()),
        DTYPE=codec.dtype,
        SIZE=TILE,
        FEEDBACK=feedback,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    if codec.dtype in FLOAT8:
        exponent, mantissa, _ = FLOAT8[codec.dtype]
        launch(
            decode_block_kernel,
            triton.cdiv(numel, TILE),
            *(*sections(codec, payload, numel), out, numel),
            EXPONENT=exponent,
            MANTISSA=mantissa,
            BLOCK=codec.block,
            ROWS=TILE // codec.block,
            ADD=add,
        )
        return
    launch(
        decode_plain_kernel,
        triton.cdiv(numel, TILE),
        *(payload.view(CODE[codec.dtype]), out, numel),
        DTYPE=codec.dtype,
        SIZE=TILE,
        ADD=add,
    )
