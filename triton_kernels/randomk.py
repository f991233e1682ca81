"""randomk in Triton. Wire format: docs/wire/randomk.md; choices as in csrc/codecs/randomk.h.

A program processes a few stretches, one per row. An encoder reads them twice, because a stretch
with an Inf or NaN anywhere is sent as NaN.
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
    add_or_not,
    bits_float,
    error_after,
    load_sum,
    magnitude_bits,
)

TILE = 1024  # values that a program holds at once
HEADER = 24  # bytes: seed and number of the first stretch, 8 each, then step and tensor

# ---------------------------------------------------------------- kernels


@triton.jit
def unsigned(low, high):
    """Return the 64-bit integer with these halves, each an int32."""
    return high.to(tl.int64) << 32 | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def choose(
    seed_low, seed_high, step, tensor, first_low, first_high, row, length, BLOCK: tl.constexpr
):
    """Return (blocks, begin, end) of each row: its number of blocks, and the range to send."""
    seed = unsigned(seed_low, seed_high).to(tl.uint64, bitcast=True)
    stretch = unsigned(first_low, first_high) + row
    group = (stretch >> 2) & 0x3FFFFFFFFFFFFFFF
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(
        seed,
        low,
        high,
        zero + tensor.to(tl.uint32, bitcast=True),
        zero + step.to(tl.uint32, bitcast=True),
    )
    lane = stretch & 3
    word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    blocks = (length + (BLOCK - 1)) // BLOCK
    begin = ((word.to(tl.int64) * blocks) >> 32) * BLOCK
    return blocks, begin, tl.minimum(begin + BLOCK, length)


@triton.jit
def lengths(numel, row, EVERY: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of values in each row's stretch; 0 beyond the end."""
    left = numel - row * (EVERY * BLOCK)
    return tl.maximum(tl.minimum(left, EVERY * BLOCK), 0)


@triton.jit(
    do_not_specialize=["seed_low", "seed_high", "step", "tensor", "first_low", "first_high"]
)
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, header_ptr, value_ptr, numel,
    seed_low, seed_high, step, tensor, first_low, first_high,
    EVERY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    SCALES: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:  # not copied from the host, which a CUDA graph could not capture
        tl.store(header_ptr, seed_low)
        tl.store(header_ptr + 1, seed_high)
        tl.store(header_ptr + 2, first_low)
        tl.store(header_ptr + 3, first_high)
        tl.store(header_ptr + 4, step)
        tl.store(header_ptr + 5, tensor)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    length = lengths(numel, row, EVERY, BLOCK)
    blocks, begin, end = choose(
        seed_low, seed_high, step, tensor, first_low, first_high, row, length, BLOCK
    )
    start = row * (EVERY * BLOCK)
    slot = value_ptr + row * BLOCK

    top = tl.zeros((ROWS, SIZE), tl.int32)
    for at in range(0, EVERY * BLOCK, SIZE):
        place = at + tl.arange(0, SIZE)[None, :]
        p, residual = load_sum(x_ptr, residual_ptr, start + place, place < length, FEEDBACK)
        top = tl.maximum(top, magnitude_bits(p))
    bad = tl.max(top, axis=1, keep_dims=True) >= INF_BITS
    nan = bits_float(tl.full((ROWS, SIZE), NAN_BITS, tl.int32))

    for at in range(0, EVERY * BLOCK, SIZE):
        place = at + tl.arange(0, SIZE)[None, :]
        mask = place < length
        p, residual = load_sum(x_ptr, residual_ptr, start + place, mask, FEEDBACK)
        value = p
        if SCALES:
            value = p * blocks.to(tl.float32)
        value = tl.where(bad, nan, value)
        chosen = (place >= begin) & (place < end)
        tl.store(slot + (place - begin), value, mask=mask & chosen)
        if FEEDBACK:
            decoded = tl.where(bad, nan, tl.where(chosen, value, 0.0))
            tl.store(new_residual_ptr + start + place, error_after(p, decoded, residual), mask=mask)

    # The rest of the slot of a short block.
    for at in range(0, BLOCK, SIZE):
        place = at + tl.arange(0, SIZE)[None, :]
        rest = (place >= end - begin) & (place < tl.minimum(length, BLOCK))
        tl.store(slot + place, tl.where(bad, nan, 0.0), mask=rest)


@triton.jit
def decode_kernel(
    header_ptr, value_ptr, out_ptr, numel,
    EVERY: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    seed_low, seed_high = tl.load(header_ptr), tl.load(header_ptr + 1)
    first_low, first_high = tl.load(header_ptr + 2), tl.load(header_ptr + 3)
    step, tensor = tl.load(header_ptr + 4), tl.load(header_ptr + 5)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    length = lengths(numel, row, EVERY, BLOCK)
    _, begin, end = choose(
        seed_low, seed_high, step, tensor, first_low, first_high, row, length, BLOCK
    )
    start = row * (EVERY * BLOCK)
    slot = value_ptr + row * BLOCK
    bad = magnitude_bits(tl.load(slot, mask=length > 0, other=0.0)) > INF_BITS
    nan = bits_float(tl.full((ROWS, SIZE), NAN_BITS, tl.int32))

    for at in range(0, EVERY * BLOCK, SIZE):
        place = at + tl.arange(0, SIZE)[None, :]
        mask = place < length
        chosen = (place >= begin) & (place < end)
        value = tl.load(slot + (place - begin), mask=mask & chosen, other=0.0)
        value = tl.where(bad, nan, value)
        if ADD:
            mask = mask & (chosen | bad)
        add_or_not(out_ptr, start + place, mask, value, ADD)


# -------------------------------------------------------------- launchers


def _shape(codec: Any, numel: int) -> tuple[int, dict[str, int]]:
    """Return the number of programs, and the codec's constants for every kernel."""
    size = min(triton.next_power_of_2(codec.granule), TILE)
    rows = TILE // size
    constants = {"EVERY": codec.every, "BLOCK": codec.block, "ROWS": rows, "SIZE": size}
    return triton.cdiv(triton.cdiv(numel, codec.granule), rows), constants


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    if numel == 0:
        return
    programs, constants = _shape(codec, numel)
    key, first = args.key, args.index // codec.granule
    words = (key.seed & 0xFFFFFFFF, key.seed >> 32, key.step, key.tensor)
    launch(
        encode_kernel,
        programs,
        *(args.x, args.residual, args.new_residual),
        args.out[:HEADER].view(torch.int32),
        *(args.out[HEADER:].view(torch.float32), numel),
        *(as_int32(word) for word in (*words, first & 0xFFFFFFFF, first >> 32)),
        **constants,
        SCALES=codec.scale == "unbiased" and not args.summed,
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    if numel == 0:
        return
    programs, constants = _shape(codec, numel)
    launch(
        decode_kernel,
        programs,
        payload[:HEADER].view(torch.int32),
        payload[HEADER:].view(torch.float32),
        out,
        numel,
        **constants,
        ADD=add,
    )
