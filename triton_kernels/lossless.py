"""lossless in Triton. Wire format: docs/wire/lossless.md; arithmetic as in csrc/codecs/lossless.h.

A program processes eight blocks. Encoding has three steps: write heads and fixed-size sections;
compute from the heads where each program's part of the stream starts; write the stream. Decoding
lacks the first step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import (
    INF_BITS,
    NAN_BITS,
    add_or_not,
    bits_float,
    error_after,
    float_bits,
    load_sum,
    magnitude_bits,
    to_bfloat16,
)

BLOCK = tl.constexpr(256)
GROUP = tl.constexpr(32)
HEAD = tl.constexpr(3)
WHOLE = tl.constexpr(8)
ROWS = tl.constexpr(8)  # blocks of a program
TILE = ROWS.value * BLOCK.value
SCAN = 1024  # number of programs whose sums are scanned together

# ---------------------------------------------------------------- kernels


@triton.jit
def rows_of(numel):
    """Return the numbers of this program's blocks [ROWS, 1], and of their values [ROWS, BLOCK]."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return block, block * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def width_of(byte):
    return tl.where((byte == 1) | (byte > WHOLE), WHOLE, byte)


@triton.jit
def groups_of(block, numel):
    """Return the number of groups of each block; a group's codes fill whole words."""
    left = numel - block * BLOCK
    left = tl.where(left < BLOCK, tl.where(left < 0, 0, left), BLOCK)
    return ((left + (GROUP - 1)) // GROUP).to(tl.int32)


@triton.jit
def load_head(head_ptr, block, blocks, numel):
    """Return (largest exponent, width, escaped, words of codes); beyond the end 0, 0, 0, 0."""
    mask = block < blocks
    top = tl.load(head_ptr + block * HEAD, mask=mask, other=0).to(tl.int32)
    width = width_of(tl.load(head_ptr + block * HEAD + 1, mask=mask, other=0).to(tl.int32))
    escaped = tl.load(head_ptr + block * HEAD + 2, mask=mask, other=0).to(tl.int32)
    return top, width, escaped, width * groups_of(block, numel)


@triton.jit
def head_kernel(
    x_ptr, residual_ptr, new_residual_ptr, high_ptr, low_ptr, head_ptr, exponent_ptr, numel,
    WIDE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Write the fixed-size sections, and the exponents to scratch memory."""
    block, offsets = rows_of(numel)
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    bits = float_bits(p) if WIDE else to_bfloat16(p).to(tl.int32) << 16
    bits = tl.where(magnitude_bits(p) > INF_BITS, NAN_BITS, bits)
    if FEEDBACK:
        tl.store(new_residual_ptr + offsets, error_after(p, bits_float(bits), residual), mask=mask)
    high = (bits >> 24) & 0x80 | (bits >> 16) & 0x7F
    tl.store(high_ptr + offsets, high.to(tl.uint8), mask=mask)
    if WIDE:
        tl.store(low_ptr + offsets, bits.to(tl.int16), mask=mask)
    exponent = tl.where(mask, (bits >> 23) & 0xFF, 0)
    tl.store(exponent_ptr + offsets, exponent.to(tl.uint8), mask=mask)

    top = tl.max(exponent, axis=1, keep_dims=True)
    offset = tl.where(mask, top - exponent, 0)
    width = tl.full(top.shape, WHOLE, tl.int32)
    escaped = tl.zeros(top.shape, tl.int32)
    words = groups_of(block, numel)
    least = 4 * WHOLE * words
    for tried in tl.static_range(7, 1, -1):
        count = tl.sum((offset >= (1 << tried) - 1).to(tl.int32), axis=1, keep_dims=True)
        size = 4 * tried * words + count
        better = size <= least
        least = tl.where(better, size, least)
        width = tl.where(better, tried, width)
        escaped = tl.where(better, count, escaped)
    equal = tl.max(offset, axis=1, keep_dims=True) == 0
    to = head_ptr + block * HEAD
    there = block * BLOCK < numel
    tl.store(to, top.to(tl.uint8), mask=there)
    tl.store(to + 1, tl.where(equal, 0, width).to(tl.uint8), mask=there)
    tl.store(to + 2, tl.where(equal, 0, escaped).to(tl.uint8), mask=there)


@triton.jit
def sum_kernel(head_ptr, sums_ptr, programs, blocks, numel, SIZE: tl.constexpr):
    """Write the sizes of each program's blocks: words of codes, and bytes of escaped exponents."""
    program = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    block = program[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    _, _, escaped, words = load_head(head_ptr, block, blocks, numel)
    mask = program < programs
    tl.store(sums_ptr + program, tl.sum(words, axis=1), mask=mask)
    tl.store(sums_ptr + programs + program, tl.sum(escaped, axis=1), mask=mask)


@triton.jit
def scan_kernel(sums_ptr, programs, SIZE: tl.constexpr):
    """Replace the sums by exclusive prefix sums, and store the totals after them. One program."""
    for which in tl.static_range(2):
        from_ptr = sums_ptr + which * programs
        total = tl.zeros((), tl.int64)
        at = tl.zeros((), tl.int64)
        while at < programs:
            place = at + tl.arange(0, SIZE)
            mask = place < programs
            here = tl.load(from_ptr + place, mask=mask, other=0).to(tl.int64)
            before = total + tl.cumsum(here, axis=0) - here
            tl.store(from_ptr + place, before.to(tl.int32), mask=mask)
            total += tl.sum(here, axis=0)
            at += SIZE
        tl.store(sums_ptr + 2 * programs + which, total.to(tl.int32))


@triton.jit
def load_sums(sums_ptr, place, stride):
    """Return two sums as int64; they are stored unsigned."""
    words = tl.load(sums_ptr + place).to(tl.int64) & 0xFFFFFFFF
    return words, tl.load(sums_ptr + place + stride).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def places(sums_ptr, programs, head_ptr, block, blocks, numel):
    """Return how many words and escaped exponents precede each block, [ROWS, 1]."""
    before_words, before_escaped = load_sums(sums_ptr, tl.program_id(0), programs)
    other = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :]
    _, _, escaped, words = load_head(head_ptr, other, blocks, numel)
    before_words += tl.sum(tl.where(other < block, words, 0), axis=1, keep_dims=True)
    before_escaped += tl.sum(tl.where(other < block, escaped, 0), axis=1, keep_dims=True)
    return before_words, before_escaped


@triton.jit
def clear(byte_ptr, begin, end):
    """Set up to 16 bytes to zero."""
    place = begin + tl.arange(0, 16)
    tl.store(byte_ptr + place, tl.zeros((16,), tl.uint8), mask=place < end)


@triton.jit
def pack_kernel(
    byte_ptr, word_ptr, exponent_ptr, sums_ptr, programs, blocks, numel,
    low_at, low_end, heads_at, stream_at, whole,
):  # fmt: skip
    """Write the stream, and zeros to the unused bytes."""
    block, offsets = rows_of(numel)
    head_ptr = byte_ptr + heads_at
    top, width, _, words = load_head(head_ptr, block, blocks, numel)
    before_words, before_escaped = places(sums_ptr, programs, head_ptr, block, blocks, numel)
    all_words, all_escaped = load_sums(sums_ptr, 2 * programs, 1)
    codes_end = stream_at + 4 * all_words
    used = (codes_end + all_escaped + 3) // 4 * 4
    largest = (1 << width) - 1

    # A byte contains parts of up to four codes.
    byte = tl.arange(0, BLOCK)[None, :]
    safe = tl.where(width == 0, 1, width)
    first = 8 * byte // safe
    code = tl.zeros((ROWS, BLOCK), tl.int32)
    there = byte < 4 * words
    for part in tl.static_range(4):
        inside = first + part
        at = block * BLOCK + inside
        mask = there & (inside < BLOCK) & (at < numel)
        exponent = tl.load(exponent_ptr + at, mask=mask, other=0).to(tl.int32)
        offset = tl.where(mask, tl.minimum(top - exponent, largest), 0)
        shift = inside * width - 8 * byte
        left = tl.where((shift > 0) & (shift < 8), shift, 0)
        right = tl.where(shift < 0, -shift, 0)
        code |= tl.where(shift < 8, (offset << left) >> right, 0)
    tl.store(byte_ptr + stream_at + 4 * before_words + byte, code.to(tl.uint8), mask=there)

    mask = offsets < numel
    exponent = tl.load(exponent_ptr + offsets, mask=mask, other=0)
    far = mask & (top - exponent.to(tl.int32) >= largest) & (width > 0) & (width < WHOLE)
    rank = tl.cumsum(far.to(tl.int32), axis=1)  # counts from 1
    tl.store(byte_ptr + used - before_escaped - rank, exponent, mask=far)

    # All programs together clear the unused bytes.
    word = used // 4 + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.zeros((), tl.int64)
    while used + 4 * at < whole:
        tl.store(word_ptr + word + at, 0, mask=4 * (word + at) < whole)
        at += programs * BLOCK
    if tl.program_id(0) == 0:
        clear(byte_ptr, 16 + numel, low_at)
        clear(byte_ptr, low_end, heads_at)
        clear(byte_ptr, heads_at + HEAD * blocks, stream_at)
        clear(byte_ptr, codes_end, used - all_escaped)
        lane = tl.arange(0, 4)
        tl.store(word_ptr + lane, tl.where(lane == 0, used, 0).to(tl.int32))


@triton.jit
def load_code_byte(byte_ptr, at, mask, end):
    """Load a byte of the codes; bytes beyond the end read as ones."""
    return tl.load(byte_ptr + at, mask=mask & (at < end), other=0xFF).to(tl.int32)


@triton.jit
def decode_kernel(
    byte_ptr, word_ptr, low_ptr, sums_ptr, out_ptr, programs, blocks, numel,
    heads_at, stream_at, whole,
    WIDE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    block, offsets = rows_of(numel)
    mask = offsets < numel
    head_ptr = byte_ptr + heads_at
    top, width, _, _ = load_head(head_ptr, block, blocks, numel)
    before_words, before_escaped = places(sums_ptr, programs, head_ptr, block, blocks, numel)
    end = tl.load(word_ptr).to(tl.int64) & 0xFFFFFFFC
    end = tl.minimum(tl.maximum(end, stream_at), whole)

    bit = tl.arange(0, BLOCK)[None, :] * width
    at = stream_at + 4 * before_words + bit // 8
    there = mask & (width > 0)
    low_byte = load_code_byte(byte_ptr, at, there, end)
    two = low_byte | load_code_byte(byte_ptr, at + 1, there & (bit % 8 + width > 8), end) << 8
    largest = (1 << width) - 1
    code = (two >> (bit % 8)) & largest
    exponent = (top - code) & 0xFF
    far = there & (code == largest) & (width < WHOLE)
    at = end - before_escaped - tl.cumsum(far.to(tl.int32), axis=1)
    escaped_exponent = tl.load(byte_ptr + at, mask=far & (at >= stream_at), other=0xFF)
    exponent = tl.where(far, escaped_exponent.to(tl.int32), exponent)

    high = tl.load(byte_ptr + 16 + offsets, mask=mask, other=0).to(tl.int32)
    bits = (high & 0x80) << 24 | exponent << 23 | (high & 0x7F) << 16
    if WIDE:
        bits |= tl.load(low_ptr + offsets, mask=mask, other=0).to(tl.int32) & 0xFFFF
    add_or_not(out_ptr, offsets, mask, bits_float(bits), ADD)


# -------------------------------------------------------------- launchers


def _scan(codec: Any, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, int, int]:
    """Scan the heads; return (sums before each program, programs, blocks)."""
    blocks, programs = triton.cdiv(numel, BLOCK.value), triton.cdiv(numel, TILE)
    sums = torch.empty(2 * programs + 2, dtype=torch.int32, device=payload.device)
    heads = payload[sum(codec.sections(numel)[:3]) :]
    launch(sum_kernel, triton.cdiv(programs, 128), heads, sums, programs, blocks, numel, SIZE=128)
    launch(scan_kernel, 1, sums, programs, SIZE=SCAN)
    return sums, programs, blocks


def _low(codec: Any, payload: torch.Tensor, numel: int) -> torch.Tensor:
    header, high, low, *_ = codec.sections(numel)
    return payload[header + high :][:low].view(torch.int16)


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    if numel == 0:
        return
    header, high, low, heads, stream = codec.sections(numel)
    wide = codec.dtype == "float32"
    low_at, heads_at = header + high, header + high + low
    exponents = torch.empty(numel, dtype=torch.uint8, device=args.x.device)
    launch(
        head_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual),
        *(args.out[header:], _low(codec, args.out, numel), args.out[heads_at:], exponents, numel),
        WIDE=wide,
        FEEDBACK=args.residual is not None,
    )
    sums, programs, blocks = _scan(codec, args.out, numel)
    launch(
        pack_kernel,
        programs,
        *(args.out, args.out.view(torch.int32), exponents, sums, programs, blocks, numel),
        *(low_at, low_at + (2 * numel if wide else 0), heads_at, heads_at + heads),
        heads_at + heads + stream,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    if numel == 0:
        return
    sums, programs, blocks = _scan(codec, payload, numel)
    header, high, low, heads, stream = codec.sections(numel)
    heads_at = header + high + low
    launch(
        decode_kernel,
        programs,
        *(payload, payload.view(torch.int32), _low(codec, payload, numel), sums, out),
        *(programs, blocks, numel, heads_at, heads_at + heads, heads_at + heads + stream),
        WIDE=codec.dtype == "float32",
        ADD=add,
    )
