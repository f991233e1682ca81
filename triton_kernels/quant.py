"""quant in Triton. Wire format: docs/wire/quant.md; numbers as in csrc/codecs/quant.h.

A program takes a tile of whole blocks, a row each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import as_int32, launch
from pycomm.triton_kernels._math import (
    add_or_not,
    bits_float,
    load_sum,
    magnitude_bits,
    owed,
    scales,
)

TILE = 2048  # values per program, the largest block: 16 per thread of four warps
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to nearest even

# ---------------------------------------------------------------- kernels


@triton.jit
def random_words(seed_low, seed_high, step, tensor, group, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the words of a tile as uint32 [ROWS, BLOCK]; ``group`` is its place divided by 4."""
    seed = seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    seed = seed | seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    groups = group + tl.arange(0, ROWS * BLOCK // 4)
    low = (groups & 0xFFFFFFFF).to(tl.uint32)
    high = (groups >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(
        seed,
        low,
        high,
        zero + tensor.to(tl.uint32, bitcast=True),
        zero + step.to(tl.uint32, bitcast=True),
    )
    # [group, 2, 2]: the last dimension is the fastest.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (ROWS, BLOCK))


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
    do_not_specialize=["seed_low", "seed_high", "step", "tensor", "group_low", "group_high"]
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
    else:
        even, odd = tl.split(tl.reshape(q, (ROWS, BLOCK // 2, 2)))
        pairs = row * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        packed = ((even & 15) | (odd & 15) << 4).to(tl.uint8)
        tl.store(code_ptr + pairs, packed, mask=pairs < code_bytes)
    if FEEDBACK:
        left = owed(p, q.to(tl.float32) * scale, residual)
        tl.store(new_residual_ptr + offsets, left, mask=mask)


@triton.jit
def decode_kernel(
    scale_ptr, code_ptr, out_ptr, numel,
    BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    if BITS == 8:
        q = tl.load(code_ptr + offsets, mask=mask, other=0).to(tl.int8, bitcast=True).to(tl.int32)
    else:
        pairs = row * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        packed = tl.load(code_ptr + pairs, mask=pairs * 2 < numel, other=0).to(tl.int32)
        q = tl.reshape(tl.join(packed & 15, packed >> 4), (ROWS, BLOCK))
        q = (q ^ 8) - 8
    scale = tl.load(scale_ptr + row, mask=row * BLOCK < numel, other=0.0)
    add_or_not(out_ptr, offsets, mask, q.to(tl.float32) * scale, ADD)


# -------------------------------------------------------------- launchers


def _sections(codec: Any, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = 4 * triton.cdiv(numel, codec.block)
    return payload[:start].view(torch.float32), payload[start:]


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    scale, codes = _sections(codec, args.out, numel)
    rows = TILE // codec.block
    key, group = args.key, args.index // 4
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, scale, codes, numel, codes.numel()),
        *(as_int32(key.seed & 0xFFFFFFFF), as_int32(key.seed >> 32)),
        *(as_int32(key.step), as_int32(key.tensor)),
        *(as_int32(group & 0xFFFFFFFF), as_int32(group >> 32)),
        BITS=codec.bits,
        BLOCK=codec.block,
        ROWS=rows,
        STOCHASTIC=codec.rounding == "stochastic",
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor) -> None:
    """out = decode(payload)."""
    _decode(codec, payload, out, add=False)


def decode_add(codec: Any, payload: torch.Tensor, out: torch.Tensor) -> None:
    """out = out + decode(payload)."""
    _decode(codec, payload, out, add=True)


def _decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    numel = out.numel()
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(*_sections(codec, payload, numel), out, numel),
        BITS=codec.bits,
        BLOCK=codec.block,
        ROWS=TILE // codec.block,
        ADD=add,
    )
