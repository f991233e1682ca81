"""eden in Triton. Wire format: docs/wire/eden.md; arithmetic as in csrc/codecs/eden.h.

A program processes a tile of whole rotations, one per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm import eden_levels
from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import (
    HUGE,
    INF_BITS,
    NAN_BITS,
    TINY,
    add_or_not,
    bits_float,
    error_after,
    float_bits,
    load_codes,
    load_sum,
    magnitude_bits,
    store_codes,
)
from pycomm.triton_kernels._rotation import (
    HEADER,
    TILE,
    WARPS,
    header_of,
    header_words,
    load_header,
    rotate,
    rotation_signs,
    shape,
    store_header,
    sums,
    unrotate,
)

LEVELS = tl.constexpr(eden_levels.LEVELS)
BORDERS = tl.constexpr(eden_levels.BORDERS)

# ---------------------------------------------------------------- kernels


@triton.jit
def level_of(place, BITS: tl.constexpr):
    value = tl.full(place.shape, LEVELS[BITS][0], tl.float32)
    for i in tl.static_range((1 << BITS) // 2 - 1):
        value = tl.where(place > i, LEVELS[BITS][i + 1], value)
    return value


@triton.jit
def quantize(u, inv, BITS: tl.constexpr):
    """Return codes (int32), a level's index with the sign on top, and the values they represent."""
    z = bits_float(magnitude_bits(u * inv))
    place = tl.zeros_like(float_bits(u))
    for i in tl.static_range((1 << BITS) // 2 - 1):
        place += (z >= BORDERS[BITS][i]).to(tl.int32)
    negative = (float_bits(u) >> 31) & 1
    code = place | negative << (BITS - 1)
    value = bits_float(float_bits(level_of(place, BITS)) | negative << 31)
    return code, value


@triton.jit
def dequantize(code, BITS: tl.constexpr):
    """Return the values of the lowest BITS bits of codes (int32)."""
    level = level_of(code & ((1 << (BITS - 1)) - 1), BITS)
    return bits_float(float_bits(level) | (code >> (BITS - 1) & 1) << 31)


@triton.jit(do_not_specialize=["key_low", "key_high", "first_low", "first_high"])
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, payload_ptr, scale_ptr, code_ptr, numel, code_bytes,
    key_low, key_high, first_low, first_high,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    BITS: tl.constexpr, MMSE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    store_header(payload_ptr, key_low, key_high, first_low, first_high)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * SIZE + tl.arange(0, SIZE)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    signs = rotation_signs(key_low, key_high, first_low, first_high, ROWS, SIZE)
    y = rotate(p, signs, ROWS, SIZE, STEPS)

    amax = bits_float(tl.max(magnitude_bits(y), axis=1, keep_dims=True))
    used = (amax > TINY) & (amax < HUGE)
    exponent = float_bits(tl.where(used, amax, 1.0)) & INF_BITS
    u = tl.where(used, y * bits_float((254 << 23) - exponent), 0.0)
    energy = tl.where(used, sums(u * u, ROWS, SIZE, STEPS), 1.0)
    inv = tl.math.sqrt_rn(tl.math.div_rn(SIZE * 1.0, energy))
    code, value = quantize(u, inv, BITS)
    total = tl.where(used, sums(value * u, ROWS, SIZE, STEPS), 1.0)
    if MMSE:
        square = sums(value * value, ROWS, SIZE, STEPS)
        ratio = tl.math.div_rn(total, tl.where(used, square, 1.0))
    else:
        ratio = tl.math.div_rn(energy, total)
    nan = bits_float(tl.full(amax.shape, NAN_BITS, tl.int32))
    unused = tl.where(amax <= TINY, 0.0, nan)
    scale = tl.where(used, ratio * bits_float(exponent), unused)
    code = tl.where(used, code, 0)

    tl.store(scale_ptr + row, scale, mask=row * SIZE < numel)
    store_codes(code_ptr, row, code, code_bytes, BITS, SIZE, ROWS)
    if FEEDBACK:
        y = dequantize(code, BITS) * scale
        left = error_after(p, unrotate(y, signs, ROWS, SIZE, STEPS), residual)
        tl.store(new_residual_ptr + offsets, left, mask=mask)


@triton.jit
def decode_kernel(
    payload_ptr, scale_ptr, code_ptr, out_ptr, numel, code_bytes,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    BITS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    key_low, key_high, first_low, first_high = load_header(payload_ptr)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * SIZE + tl.arange(0, SIZE)[None, :]
    signs = rotation_signs(key_low, key_high, first_low, first_high, ROWS, SIZE)
    scale = tl.load(scale_ptr + row, mask=row * SIZE < numel, other=0.0)
    code = load_codes(code_ptr, row, code_bytes, BITS, SIZE, ROWS)
    y = dequantize(code, BITS) * scale
    value = unrotate(y, signs, ROWS, SIZE, STEPS)
    add_or_not(out_ptr, offsets, offsets < numel, value, ADD)


# -------------------------------------------------------------- launchers


def _sections(
    codec: Any, payload: torch.Tensor, numel: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the header, as words; the scales; the codes."""
    end = HEADER + 4 * triton.cdiv(numel, codec.size)
    return header_of(payload), payload[HEADER:end].view(torch.float32), payload[end:]


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    header, scale, codes = _sections(codec, args.out, numel)
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, header, scale, codes),
        *(numel, codes.numel()),
        *header_words(codec, args),
        **shape(codec.size),
        num_warps=WARPS,
        BITS=codec.bits,
        MMSE=codec.scale == "mmse",
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    header, scale, codes = _sections(codec, payload, numel)
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(header, scale, codes, out, numel, codes.numel()),
        **shape(codec.size),
        num_warps=WARPS,
        BITS=codec.bits,
        ADD=add,
    )
