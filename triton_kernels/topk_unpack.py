"""Decoding of topk payloads in Triton: a record is checked before any of its values is used."""

from __future__ import annotations

import triton
import triton.language as tl

from pycomm.triton_kernels._math import INF_BITS, NAN_BITS, add_or_not, bits_float
from pycomm.triton_kernels.topk_pack import GROUP, sections


@triton.jit
def load_index(byte_ptr, word_ptr, at, j, mask, INDICES: tl.constexpr):
    if INDICES == "int32":
        index = tl.load(word_ptr + at // 4 + j, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    else:
        two = byte_ptr + at + j // 2 * 3 + j % 2
        low = tl.load(two, mask=mask, other=0).to(tl.int64)
        high = tl.load(two + 1, mask=mask, other=0).to(tl.int64)
        index = (low | high << 8) >> 4 * (j % 2) & 0xFFF
    return index


@triton.jit
def load_value(byte_ptr, word_ptr, at, values_at, j, mask, VALUES: tl.constexpr):
    if VALUES == "float32":
        value = bits_float(tl.load(word_ptr + at // 4 + j, mask=mask, other=0))
    elif VALUES == "int8":
        code = tl.load(byte_ptr + at + values_at + j, mask=mask, other=0).to(tl.int8, bitcast=True)
        scale = bits_float(tl.load(word_ptr + at // 4 + j // GROUP, mask=mask, other=0))
        value = code.to(tl.float32) * scale
    else:
        code = tl.load(byte_ptr + at + values_at + j // 4, mask=mask, other=0).to(tl.int32)
        code = code >> (2 * (j % 4)).to(tl.int32)
        level = word_ptr + at // 4 + j // GROUP * 2 + (code & 1)
        value = bits_float(tl.load(level, mask=mask, other=0) ^ (code & 2) << 30)
    return value


@triton.jit
def begins_with_nan(word_ptr, at):
    """Return whether the first scale, level or value is NaN."""
    return (tl.load(word_ptr + at // 4) & 0x7FFFFFFF) > INF_BITS


@triton.jit(do_not_specialize=["k", "last_k"])
def scatter_kernel(
    void_ptr, byte_ptr, word_ptr, out_ptr, numel, length, groups, k, last_k,
    VALUES: tl.constexpr, INDICES: tl.constexpr, SIZE: tl.constexpr,
    CHECK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """With CHECK, find out whether the record is void; else store its values at their indices."""
    record = tl.program_id(0).to(tl.int64) // groups
    group = tl.program_id(0).to(tl.int64) % groups
    n = tl.minimum(numel - record * length, length)
    _, _, whole = sections(tl.zeros((), tl.int64) + k, VALUES, INDICES)
    here = tl.zeros((), tl.int64) + tl.where(n == length, k, last_k)
    values_at, indices_at, _ = sections(here, VALUES, INDICES)
    at = record * whole
    j = group * SIZE + tl.arange(0, SIZE)
    mask = j < here
    if CHECK:
        index = load_index(byte_ptr, word_ptr, at + indices_at, j, mask, INDICES)
        before = load_index(byte_ptr, word_ptr, at + indices_at, j - 1, mask & (j > 0), INDICES)
        wrong = mask & ((index >= n) | ((j > 0) & (before >= index)))
        bad = tl.max(wrong.to(tl.int32), axis=0) > 0
        bad = bad | begins_with_nan(word_ptr, at)
        if bad:
            tl.atomic_max(void_ptr + record, 1)
    else:
        if tl.load(void_ptr + record) == 0:
            index = load_index(byte_ptr, word_ptr, at + indices_at, j, mask, INDICES)
            value = load_value(byte_ptr, word_ptr, at, values_at, j, mask, VALUES)
            add_or_not(out_ptr, record * length + index, mask, value, ADD)


@triton.jit
def fill_kernel(void_ptr, out_ptr, numel, length, SIZE: tl.constexpr, ADD: tl.constexpr):
    """Store zeros, or NaN in void records. With ADD, other records are left unchanged."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = place < numel
    void = tl.load(void_ptr + place // length, mask=mask, other=0) != 0
    nan = bits_float(tl.full((SIZE,), NAN_BITS, tl.int32))
    if ADD:
        mask = mask & void
    tl.store(out_ptr + place, tl.where(void, nan, 0.0), mask=mask)
