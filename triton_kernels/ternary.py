"""ternary in Triton. Wire format: docs/wire/ternary.md; arithmetic as in csrc/codecs/ternary.h.

A program processes a tile of whole blocks, one per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import as_int32, launch
from pycomm.triton_kernels._math import (
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
    random_words,
    store_codes,
)

TILE = 2048  # values per program, the largest block: 16 per thread of four warps
LIMIT = tl.constexpr(2.0**120)  # from this scale on, 127 * scale could overflow
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to nearest even

# ---------------------------------------------------------------- kernels


@triton.jit
def amax_kernel(
    x_ptr, residual_ptr, out_ptr, numel,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    p, _ = load_sum(x_ptr, residual_ptr, offsets, offsets < numel, FEEDBACK)
    amax = tl.max(magnitude_bits(p), axis=1, keep_dims=True)
    amax = tl.where(amax < INF_BITS, amax, INF_BITS)
    tl.store(out_ptr + row, bits_float(amax), mask=row * BLOCK < numel)


@triton.jit(
    do_not_specialize=["seed_low", "seed_high", "step", "tensor", "group_low", "group_high"]
)
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, amax_ptr, scale_ptr, code_ptr, numel, code_bytes,
    seed_low, seed_high, step, tensor, group_low, group_high,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)

    amax = tl.load(amax_ptr + row, mask=row * BLOCK < numel, other=0.0)
    used = (amax > TINY) & (amax < LIMIT)
    nan = bits_float(tl.full(amax.shape, NAN_BITS, tl.int32))
    unit = bits_float((float_bits(amax) + 0xFFFF) & -65536)
    scale = tl.where(used, unit, tl.where(amax <= TINY, 0.0, nan))
    if SUM:
        v = tl.math.div_rn(p, tl.where(used, scale, 1.0) + tl.zeros_like(p))
        near = tl.where(v > -TOP * 1.0, v, -TOP * 1.0)  # NaN becomes -top
        near = tl.where(near < TOP * 1.0, near, TOP * 1.0)
        q = ((near + ROUND) - ROUND).to(tl.int32)
    else:
        group = group_high.to(tl.int64) << 32 | group_low.to(tl.uint32, bitcast=True).to(tl.int64)
        group += tl.program_id(0).to(tl.int64) * (ROWS * BLOCK // 4)
        words = random_words(seed_low, seed_high, step, tensor, group, ROWS, BLOCK)
        chance = (words >> 8).to(tl.int32).to(tl.float32) * (scale * 2.0**-24)
        away = (bits_float(magnitude_bits(p)) > chance).to(tl.int32)
        q = tl.where(p < 0.0, -away, away)
    q = tl.where(used & mask, q, 0)

    tl.store(scale_ptr + row, scale, mask=row * BLOCK < numel)
    store_codes(code_ptr, row, q, code_bytes, BITS, BLOCK, ROWS)
    if FEEDBACK:
        left = error_after(p, q.to(tl.float32) * scale, residual)
        tl.store(new_residual_ptr + offsets, left, mask=mask)


@triton.jit
def decode_kernel(
    scale_ptr, code_ptr, out_ptr, numel, code_bytes,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    q = load_codes(code_ptr, row, code_bytes, BITS, BLOCK, ROWS)
    q = (q ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
    scale = tl.load(scale_ptr + row, mask=row * BLOCK < numel, other=0.0)
    add_or_not(out_ptr, offsets, offsets < numel, q.to(tl.float32) * scale, ADD)


# -------------------------------------------------------------- launchers


def _sections(codec: Any, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = 4 * triton.cdiv(numel, codec.block)
    return payload[:start].view(torch.float32), payload[start:]


def compute_amax(
    codec: Any, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write the largest magnitude of each block of x + residual."""
    launch(
        amax_kernel,
        triton.cdiv(x.numel(), TILE),
        *(x, residual, out, x.numel()),
        BLOCK=codec.block,
        ROWS=TILE // codec.block,
        FEEDBACK=residual is not None,
    )


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    codec.check_ranks(args.key)
    numel = args.x.numel()
    scale, codes = _sections(codec, args.out, numel)
    key, group = args.key, args.index // 4
    seed = codec.rank_seed(key)
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, args.amax, scale, codes),
        *(numel, codes.numel()),
        *(as_int32(seed & 0xFFFFFFFF), as_int32(seed >> 32)),
        *(as_int32(key.step), as_int32(key.tensor)),
        *(as_int32(group & 0xFFFFFFFF), as_int32(group >> 32)),
        BITS=codec.bits,
        BLOCK=codec.block,
        ROWS=TILE // codec.block,
        SUM=args.summed,
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
        ADD=add,
    )
