"""Encoding of chosen values in Triton: a program writes 256 of them, which share their levels."""

from __future__ import annotations

import triton
import triton.language as tl

from pycomm.triton_kernels._math import (
    INF_BITS,
    NAN_BITS,
    bits_float,
    error_after,
    float_bits,
    magnitude_bits,
    scales,
)
from pycomm.triton_kernels.topk_select import STATE, VOID

GROUP = tl.constexpr(256)
INT8_TOP = tl.constexpr(127.0)
TINY_BITS = tl.constexpr(0x0D800000)  # bits of 2^-100
HUGE_BITS = tl.constexpr(0x7F000000)  # bits of 2^127


@triton.jit
def padded(size):
    return (size + 3) // 4 * 4


@triton.jit
def sections(k, VALUES: tl.constexpr, INDICES: tl.constexpr):
    """Return the offsets of a record's values and indices, and its size in bytes."""
    groups = (k + (GROUP - 1)) // GROUP
    if VALUES == "float32":
        values_at, size = groups * 0, 4 * k
    elif VALUES == "int8":
        values_at, size = groups * 4, k
    else:
        values_at, size = groups * 8, (k + 3) // 4
    indices_at = values_at + padded(size)
    size = 4 * k if INDICES == "int32" else (3 * k + 1) // 2
    return values_at, indices_at, indices_at + padded(size)


@triton.jit
def bin_scale(top):
    """Return the bits of a group's scale and of its inverse, given those of its amax."""
    used = (top > TINY_BITS) & (top < HUGE_BITS)
    scale = (top & INF_BITS) - (14 << 23)
    inv = tl.where(used, (254 << 23) - scale, 0)
    return tl.where(used, scale, tl.where(top <= TINY_BITS, 0, NAN_BITS)), inv


@triton.jit
def bins(magnitude, mask, most, void):
    """Return the bits of both bins' mean magnitudes, and who is in the upper bin."""
    scale, inv = bin_scale(most)
    scaled = bits_float(magnitude) * bits_float(inv) + 12582912.0 - 12582912.0
    code = tl.where(mask & (void == 0), scaled, 0.0).to(tl.int32)
    total, count = tl.sum(code, axis=0), tl.sum(mask.to(tl.int32), axis=0)
    upper = mask & (code * count > total)
    upper_sum = tl.sum(tl.where(upper, code, 0), axis=0)
    n = tl.sum(upper.to(tl.int32), axis=0)
    low = tl.math.div_rn((total - upper_sum).to(tl.float32), (count - n).to(tl.float32))
    high = tl.math.div_rn(upper_sum.to(tl.float32), tl.where(n > 0, n, 1).to(tl.float32))
    low = float_bits(low * bits_float(scale))
    high = tl.where(n > 0, float_bits(high * bits_float(scale)), low)
    return tl.where(void, NAN_BITS, low), tl.where(void, NAN_BITS, high), upper


@triton.jit
def store_bytes(byte_ptr, at, first, end, value):
    """Store bytes at + first, at + first + 1, ... of a section of ``end`` bytes and its padding."""
    tl.store(byte_ptr + at + first, value.to(tl.uint8), mask=first < padded(end))


@triton.jit
def store_values(byte_ptr, word_ptr, at, values_at, group, p, mask, k, VALUES: tl.constexpr):
    """Write the codes of a group and return their values; p is NaN in a void record."""
    lane = tl.arange(0, GROUP)
    j = group * GROUP + lane
    nan = magnitude_bits(p) > INF_BITS
    if VALUES == "float32":
        value = p
        tl.store(word_ptr + at // 4 + j, tl.where(nan, NAN_BITS, float_bits(p)), mask=mask)
    elif VALUES == "int8":
        row = tl.reshape(tl.where(mask, p, 0.0), (1, GROUP))
        scale, inv, used = scales(row, INT8_TOP)
        tl.store(word_ptr + at // 4 + group, tl.sum(float_bits(tl.reshape(scale, (1,))), axis=0))
        q = tl.where(used, row * inv + 12582912.0 - 12582912.0, 0.0)
        value = tl.reshape(q * scale, (GROUP,))
        code = tl.reshape(q, (GROUP,)).to(tl.int32)
        store_bytes(byte_ptr, at + values_at, j, k, code & 0xFF)
    else:
        magnitude = magnitude_bits(p)
        most = tl.max(tl.where(mask, magnitude, 0), axis=0)
        void = most > INF_BITS
        low, high, upper = bins(magnitude, mask, most, void)
        tl.store(word_ptr + at // 4 + 2 * group, low)
        tl.store(word_ptr + at // 4 + 2 * group + 1, high)
        sign = (float_bits(p) >> 31) & 1
        value = bits_float(tl.where(upper, high, low) ^ sign << 31)
        code = tl.where(mask & (void == 0), upper.to(tl.int32) | sign << 1, 0)
        four = tl.reshape(code, (GROUP // 4, 4)) << 2 * tl.arange(0, 4)[None, :]
        first = group * (GROUP // 4) + tl.arange(0, GROUP // 4)
        store_bytes(byte_ptr, at + values_at, first, (k + 3) // 4, tl.sum(four, axis=1))
    return value


@triton.jit
def store_indices(byte_ptr, word_ptr, at, group, index, mask, k, INDICES: tl.constexpr):
    j = group * GROUP + tl.arange(0, GROUP)
    index = tl.where(mask, index, 0)
    if INDICES == "int32":
        tl.store(word_ptr + at // 4 + j, index, mask=mask)
    else:
        even, odd = tl.split(tl.reshape(index, (GROUP // 2, 2)))
        first = 3 * (group * (GROUP // 2) + tl.arange(0, GROUP // 2))
        both = even | odd << 12
        for byte in tl.static_range(3):
            store_bytes(byte_ptr, at, first + byte, (3 * k + 1) // 2, both >> 8 * byte & 0xFF)


@triton.jit(do_not_specialize=["k", "last_k"])
def pack_kernel(
    state_ptr, p_ptr, index_ptr, residual_ptr, new_residual_ptr, byte_ptr, word_ptr,
    numel, length, groups, k, last_k,
    VALUES: tl.constexpr, INDICES: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Write a group of the chosen values, and their residuals."""
    record = tl.program_id(0).to(tl.int64) // groups
    group = tl.program_id(0).to(tl.int64) % groups
    n = tl.minimum(numel - record * length, length)
    void = tl.load(state_ptr + record * STATE + VOID) != 0
    room = groups * GROUP
    _, _, whole = sections(tl.zeros((), tl.int64) + k, VALUES, INDICES)
    here = tl.zeros((), tl.int64) + tl.where(n == length, k, last_k)
    values_at, indices_at, _ = sections(here, VALUES, INDICES)
    at = record * whole
    if group * GROUP < here:
        j = group * GROUP + tl.arange(0, GROUP)
        mask = j < here
        there = mask & (void == 0)
        nan = bits_float(tl.full((GROUP,), NAN_BITS, tl.int32))
        p = tl.where(void, nan, tl.load(p_ptr + record * room + j, mask=there, other=0.0))
        index = tl.load(index_ptr + record * room + j, mask=there, other=0)
        # If values have changed after they were counted, a slot may have been left as it was.
        index = tl.where((index.to(tl.int64) & 0xFFFFFFFF) < n, index, 0)
        value = store_values(byte_ptr, word_ptr, at, values_at, group, p, mask, here, VALUES)
        store_indices(byte_ptr, word_ptr, at + indices_at, group, index, mask, here, INDICES)
        if FEEDBACK:
            place = record * length + (index.to(tl.int64) & 0xFFFFFFFF)
            kept = tl.load(residual_ptr + place, mask=there, other=0.0)
            tl.store(new_residual_ptr + place, error_after(p, value, kept), mask=there)
