"""quant in Triton. Wire format: docs/wire/quant.md; arithmetic as in csrc/codecs/quant.h.

A program processes a tile of whole blocks, one per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import as_int32, launch
from pycomm.triton_kernels._math import (
    HUGE,
    NAN_BITS,
    TINY,
    add_or_not,
    bits_float,
    error_after,
    float_bits,
    load_codes,
    load_sum,
    magnitude_bits,
    random_words,
    scales,
    store_codes,
)

TILE = 2048  # values per program, the largest block: 16 per thread of four warps
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to nearest even

# ---------------------------------------------------------------- kernels


@triton.jit
def quantize(v, words, TOP: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        a = bits_float(magnitude_bits(v))
        down = a.to(tl.int32)
        threshold = ((a - down.to(tl.float32)) * 2147483648.0).to(tl.int32)
        q = down + ((words >> 1).to(tl.int32) < threshold).to(tl.int32)
        q = tl.where(q < TOP, q, TOP)
        q = tl.where(v < 0.0, -q, q)
    else:
        q = ((v + ROUND) - ROUND).to(tl.int32)
    return q


@triton.jit
def to_order(x):
    """Map floats to integers in the values' order, -0 below +0; `from_order` is the inverse."""
    bits = float_bits(x)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order(order):
    return bits_float(order ^ ((order >> 31) & 0x7FFFFFFF))


@triton.jit
def bfloat16_above(x):
    return bits_float((float_bits(x) + 0xFFFF) & -65536)


@triton.jit
def bfloat16_below(x):
    bits = float_bits(x)
    return bits_float(tl.where(bits < 0, bits + 0xFFFF, bits) & -65536)


@triton.jit
def minmax_scales(p, mask, TOP: tl.constexpr, BFLOAT16: tl.constexpr):
    """Return (unit, inverse unit, low, used) of each row of ``p``, with a second dimension of 1."""
    order = to_order(p)
    low = from_order(tl.min(tl.where(mask, order, 0x7FFFFFFF), axis=1, keep_dims=True))
    high = from_order(tl.max(tl.where(mask, order, -0x7FFFFFFF), axis=1, keep_dims=True))
    amax = bits_float(tl.maximum(magnitude_bits(low), magnitude_bits(high)))
    used = amax < HUGE / 2
    if BFLOAT16:
        low = bfloat16_below(low)
    span = high - low
    spans = used & (span > TINY)
    unit = tl.where(spans, tl.math.div_rn(tl.where(spans, span, 1.0), TOP), 0.0)
    if BFLOAT16:
        unit = bfloat16_above(unit)
    inv = tl.where(spans, tl.math.div_rn(1.0, tl.where(spans, unit, 1.0)), 0.0)
    top = high
    if BFLOAT16:
        top = bits_float(float_bits(high) & -65536)
    next_to_zero = tl.where(high < 0, top, tl.where(low > 0, low, 0.0))
    low = tl.where(spans, low, next_to_zero)
    nan = bits_float(tl.full(amax.shape, NAN_BITS, tl.int32))
    return tl.where(used, unit, nan), inv, tl.where(used, low, nan), used


@triton.jit
def store_scale(scale_ptr, place, value, mask, BFLOAT16: tl.constexpr):
    if BFLOAT16:
        tl.store(scale_ptr + place, (float_bits(value) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(scale_ptr + place, value, mask=mask)


@triton.jit
def load_scale(scale_ptr, place, mask, BFLOAT16: tl.constexpr):
    if BFLOAT16:
        code = tl.load(scale_ptr + place, mask=mask, other=0)
        value = bits_float(code.to(tl.int32) << 16)
    else:
        value = tl.load(scale_ptr + place, mask=mask, other=0.0)
    return value


@triton.jit(
    do_not_specialize=[
        "seed_low",
        "seed_high",
        "step",
        "tensor",
        "group_low",
        "group_high",
        "shift",
    ]
)
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, scale_ptr, code_ptr, numel, scale_numbers, code_bytes,
    seed_low, seed_high, step, tensor, group_low, group_high, shift,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STOCHASTIC: tl.constexpr,
    MINMAX: tl.constexpr, BFLOAT16: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = (1 << BITS) - 1 if MINMAX else (1 << (BITS - 1)) - 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    if MINMAX:
        scale, inv, low, used = minmax_scales(p, mask, TOP * 1.0, BFLOAT16)
        v = tl.where(used & mask, (p - low) * inv, 0.0)
    else:
        scale, inv, used = scales(p, TOP * 1.0)
        if BFLOAT16:
            scale = bfloat16_above(scale)
            inv = tl.where(used, tl.math.div_rn(1.0, tl.where(used, scale, 1.0)), 0.0)
        v = tl.where(used, p * inv, 0.0)
    words = offsets
    if STOCHASTIC:
        group = group_high.to(tl.int64) << 32 | group_low.to(tl.uint32, bitcast=True).to(tl.int64)
        group += tl.program_id(0).to(tl.int64) * (ROWS * BLOCK // 4)
        words = random_words(seed_low, seed_high, step, tensor, group, ROWS, BLOCK)
        words += shift.to(tl.uint32, bitcast=True)
    q = quantize(v, words, TOP, STOCHASTIC)

    if MINMAX:
        store_scale(scale_ptr, 2 * row, scale, row * BLOCK < numel, BFLOAT16)
        store_scale(scale_ptr, 2 * row + 1, low, row * BLOCK < numel, BFLOAT16)
    else:
        store_scale(scale_ptr, row, scale, row * BLOCK < numel, BFLOAT16)
        # Two bfloat16 scales make a word; the last may need a zero scale beside it.
        last = (row * BLOCK < numel) & ((row + 1) * BLOCK >= numel) & (row + 1 < scale_numbers)
        store_scale(scale_ptr, row + 1, tl.zeros_like(scale), last, BFLOAT16)
    if BITS == 8:
        tl.store(code_ptr + offsets, q.to(tl.uint8), mask=offsets < code_bytes)
    elif BITS == 4:
        even, odd = tl.split(tl.reshape(q, (ROWS, BLOCK // 2, 2)))
        pairs = row * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        packed = ((even & 15) | (odd & 15) << 4).to(tl.uint8)
        tl.store(code_ptr + pairs, packed, mask=pairs < code_bytes)
    else:
        store_codes(code_ptr, row, q, code_bytes, BITS, BLOCK, ROWS)
    if FEEDBACK:
        value = q.to(tl.float32) * scale
        if MINMAX:
            value = value + low
        tl.store(new_residual_ptr + offsets, error_after(p, value, residual), mask=mask)


@triton.jit
def decode_kernel(
    scale_ptr, code_ptr, out_ptr, numel, code_bytes,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, MINMAX: tl.constexpr,
    BFLOAT16: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    if BITS == 8:
        q = tl.load(code_ptr + offsets, mask=mask, other=0).to(tl.int32)
    elif BITS == 4:
        pairs = row * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        packed = tl.load(code_ptr + pairs, mask=pairs * 2 < numel, other=0).to(tl.int32)
        q = tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, BLOCK))
    else:
        q = load_codes(code_ptr, row, code_bytes, BITS, BLOCK, ROWS)
    if MINMAX:
        scale = load_scale(scale_ptr, 2 * row, row * BLOCK < numel, BFLOAT16)
        value = q.to(tl.float32) * scale
        value += load_scale(scale_ptr, 2 * row + 1, row * BLOCK < numel, BFLOAT16)
    else:
        q = (q ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
        value = q.to(tl.float32) * load_scale(scale_ptr, row, row * BLOCK < numel, BFLOAT16)
    add_or_not(out_ptr, offsets, mask, value, ADD)


# -------------------------------------------------------------- launchers


def _sections(codec: Any, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = -(-codec.scale_bytes(numel) // 4) * 4
    dtype = torch.int16 if codec.scale == "bfloat16" else torch.float32
    return payload[:start].view(dtype), payload[start:]


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    scale, codes = _sections(codec, args.out, numel)
    rows = TILE // codec.block
    key, group = args.key, args.index // 4
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, scale, codes),
        *(numel, scale.numel(), codes.numel()),
        *(as_int32(key.seed & 0xFFFFFFFF), as_int32(key.seed >> 32)),
        *(as_int32(key.step), as_int32(key.tensor)),
        *(as_int32(group & 0xFFFFFFFF), as_int32(group >> 32)),
        as_int32(codec.shift(key)),
        BITS=codec.bits,
        BLOCK=codec.block,
        ROWS=rows,
        STOCHASTIC=codec.rounding != "nearest",
        MINMAX=codec.range == "minmax",
        BFLOAT16=codec.scale == "bfloat16",
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    scale, codes = _sections(codec, payload, numel)
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(scale, codes, out, numel, codes.numel()),
        BITS=codec.bits,
        BLOCK=codec.block,
        ROWS=TILE // codec.block,
        MINMAX=codec.range == "minmax",
        BFLOAT16=codec.scale == "bfloat16",
        ADD=add,
    )
