"""quant in Triton. Wire format: docs/wire/quant.md; arithmetic as in csrc/codecs/quant.h.

A program processes a tile of whole blocks, one per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import as_int32, launch, sections
from pycomm.triton_kernels._math import (
    add_or_not,
    bits_float,
    error_after,
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


@triton.jit(
    do_not_specialize=[
        "seed_low",
        "seed_high",
        "step",
        "tensor",
        "group_low",
        "group_high",
    ]
)
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, scale_ptr, code_ptr, numel, code_bytes,
    seed_low, seed_high, step, tensor, group_low, group_high,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = (1 << (BITS - 1)) - 1
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    scale, inv, used = scales(p, TOP * 1.0)
    v = tl.where(used, p * inv, 0.0)
    words = offsets
    if STOCHASTIC:
        group = group_high.to(tl.int64) << 32 | group_low.to(tl.uint32, bitcast=True).to(tl.int64)
        group += tl.program_id(0).to(tl.int64) * (ROWS * BLOCK // 4)
        words = random_words(seed_low, seed_high, step, tensor, group, ROWS, BLOCK)
    q = quantize(v, words, TOP, STOCHASTIC)

    tl.store(scale_ptr + row, scale, mask=row * BLOCK < numel)
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
        tl.store(new_residual_ptr + offsets, error_after(p, value, residual), mask=mask)


@triton.jit
def decode_kernel(
    scale_ptr, code_ptr, out_ptr, numel, code_bytes,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
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
    q = (q ^ (1 << (BITS - 1))) - (1 << (BITS - 1))
    value = q.to(tl.float32) * tl.load(scale_ptr + row, mask=row * BLOCK < numel, other=0.0)
    add_or_not(out_ptr, offsets, mask, value, ADD)


# -------------------------------------------------------------- launchers


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    scale, codes = sections(codec, args.out, numel)
    rows = TILE // codec.block
    key, group = args.key, args.index // 4
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, scale, codes),
        *(numel, codes.numel()),
        *(as_int32(key.seed & 0xFFFFFFFF), as_int32(key.seed >> 32)),
        *(as_int32(key.step), as_int32(key.tensor)),
        *(as_int32(group & 0xFFFFFFFF), as_int32(group >> 32)),
        BITS=codec.bits,
        BLOCK=codec.block,
        ROWS=rows,
        STOCHASTIC=codec.rounding != "nearest",
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    scale, codes = sections(codec, payload, numel)
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(scale, codes, out, numel, codes.numel()),
        BITS=codec.bits,
        BLOCK=codec.block,
        ROWS=TILE // codec.block,
        ADD=add,
    )
