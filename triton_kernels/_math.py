"""Arithmetic shared by kernels, as in csrc/codecs/base/block.h and csrc/core/floats.h."""

from __future__ import annotations

import triton
import triton.language as tl

NAN_BITS = tl.constexpr(0x7FC00000)
INF_BITS = tl.constexpr(0x7F800000)
TINY = tl.constexpr(2.0**-100)
HUGE = tl.constexpr(2.0**127)


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    return float_bits(x) & 0x7FFFFFFF


# -------------------------------------------------------------------- blocks


@triton.jit
def load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK: tl.constexpr):
    """Return p = x + residual, and the residual; 0 beyond the end."""
    p = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    residual = p
    if FEEDBACK:
        residual = tl.load(residual_ptr + offsets, mask=mask, other=0.0)
        p = p + residual
    return p, residual


@triton.jit
def error_after(p, decoded, residual):
    """Return p's residual after it was sent as ``decoded``; if that is not finite, the old one."""
    return tl.where(magnitude_bits(decoded) < INF_BITS, p - decoded, residual)


@triton.jit
def scales(p, TOP: tl.constexpr):
    """Return (scale, inverse scale, used) of each row of ``p``, with a second dimension of 1."""
    amax = bits_float(tl.max(magnitude_bits(p), axis=1, keep_dims=True))
    used = (amax > TINY) & (amax < HUGE)
    safe = tl.where(used, amax, 1.0)
    nan = bits_float(tl.full(amax.shape, NAN_BITS, tl.int32))
    scale = tl.where(used, tl.math.div_rn(safe, TOP), tl.where(amax <= TINY, 0.0, nan))
    return scale, tl.where(used, tl.math.div_rn(TOP, safe), 0.0), used


@triton.jit
def halves_added(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of each row [ROWS, 1]: halves are added until one number remains.

    The order of tl.sum depends on the layout, but not that of two numbers.
    """
    for bits in tl.static_range(12):
        if COLUMNS >> bits > 1:
            x = tl.sum(tl.reshape(x, (ROWS, 2, COLUMNS >> (bits + 1))), axis=1)
    return x


@triton.jit
def mean_scales(p, row, numel, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return (scale, used) of each row of ``p``, a block that may be short; [ROWS, 1].

    The scale is the mean magnitude.
    """
    total = halves_added(bits_float(magnitude_bits(p)), ROWS, BLOCK)
    left = numel - row * BLOCK
    count = tl.where(left < BLOCK, tl.where(left < 1, 1, left), BLOCK).to(tl.float32)
    mean = tl.math.div_rn(total, count)
    used = (mean > TINY) & (mean < HUGE)
    nan = bits_float(tl.full(mean.shape, NAN_BITS, tl.int32))
    return tl.where(used, mean, tl.where(mean <= TINY, 0.0, nan)), used


@triton.jit
def add_or_not(out_ptr, offsets, mask, value, ADD: tl.constexpr):
    """Store value in out, or add it to out."""
    if ADD:
        value = tl.load(out_ptr + offsets, mask=mask, other=0.0) + value
    tl.store(out_ptr + offsets, value, mask=mask)


# -------------------------------------------------------- random words, bit strings


@triton.jit
def random_words(seed_low, seed_high, step, tensor, group, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the words of a tile as uint32 [ROWS, BLOCK]; ``group`` is its index divided by 4."""
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
    # [group, 2, 2]: the last dimension varies fastest.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, (ROWS, BLOCK))


@triton.jit
def store_codes(
    code_ptr, row, q, code_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Store codes; eight codes take BITS bytes."""
    word = (q & ((1 << BITS) - 1)).to(tl.int64)
    even, odd = tl.split(tl.reshape(word, (ROWS, BLOCK // 2, 2)))
    even, odd = tl.split(tl.reshape(even | odd << BITS, (ROWS, BLOCK // 4, 2)))
    even, odd = tl.split(tl.reshape(even | odd << (2 * BITS), (ROWS, BLOCK // 8, 2)))
    word = even | odd << (4 * BITS)
    place = (row * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]) * BITS
    for byte in tl.static_range(BITS):
        at = place + byte
        tl.store(code_ptr + at, (word >> (8 * byte)).to(tl.uint8), mask=at < code_bytes)


@triton.jit
def load_codes(
    code_ptr, row, code_bytes, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    place = (row * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]) * BITS
    word = tl.zeros((ROWS, BLOCK // 8), tl.int64)
    for byte in tl.static_range(BITS):
        at = place + byte
        part = tl.load(code_ptr + at, mask=at < code_bytes, other=0).to(tl.int64)
        word = word | part << (8 * byte)
    LOW: tl.constexpr = (1 << 4 * BITS) - 1
    # With 8 bits the highest code reaches int64's sign bit, which the shift spreads.
    word = tl.reshape(tl.join(word & LOW, (word >> (4 * BITS)) & LOW), (ROWS, BLOCK // 4))
    word = tl.reshape(tl.join(word & ((1 << 2 * BITS) - 1), word >> (2 * BITS)), (ROWS, BLOCK // 2))
    word = tl.reshape(tl.join(word & ((1 << BITS) - 1), word >> BITS), (ROWS, BLOCK))
    return word.to(tl.int32)


# -------------------------------------------------------------- small floats


@triton.jit
def to_bfloat16(x):
    """Return the bits of x rounded to nearest even; every NaN is 0x7fc0."""
    bits = float_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(magnitude_bits(x) > INF_BITS, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def from_bfloat16(code):
    return bits_float(code.to(tl.int32) << 16)


@triton.jit
def to_small(v, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the code of v, in range, rounded to nearest even, and the value of that code.

    The float adder rounds, as in `round_in_range` of csrc/codecs/cast.h: sm_80 has no instruction
    for it.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    SMALLEST: tl.constexpr = (129 - (1 << (EXPONENT - 1))) << 23  # the smallest normal value
    magnitude = magnitude_bits(v)
    exponent = magnitude & INF_BITS
    binade = tl.where(exponent > SMALLEST, exponent, SMALLEST)
    anchor = binade + (SHIFT << 23)
    total = bits_float(magnitude) + bits_float(anchor)
    steps = float_bits(total) - anchor
    sign = float_bits(v) ^ magnitude
    SIGN: tl.constexpr = EXPONENT + MANTISSA
    code = steps + ((binade - SMALLEST) >> SHIFT) | ((sign >> (31 - SIGN)) & (1 << SIGN))
    return code.to(tl.uint8), bits_float(float_bits(total - bits_float(anchor)) | sign)


@triton.jit
def from_small(code, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    """Return the value of any code. 5 bits of exponent are e5m2, with Inf; e4m3 has one NaN."""
    SIGN: tl.constexpr = EXPONENT + MANTISSA
    MAGNITUDE: tl.constexpr = (1 << SIGN) - 1
    SHIFT: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = (1 << (EXPONENT - 1)) - 1
    SMALLEST: tl.constexpr = (128 - BIAS) << 23  # the smallest normal value
    code = code.to(tl.int32)
    wide = (code & MAGNITUDE) << SHIFT
    smallest = bits_float(tl.full(wide.shape, SMALLEST, tl.int32))
    subnormal = float_bits(bits_float(wide + SMALLEST) - smallest)
    bits = tl.where(wide < (1 << 23), subnormal, wide + ((127 - BIAS) << 23))
    if EXPONENT == 5:
        bits = tl.where((code & MAGNITUDE) >= 0x7C, wide | INF_BITS, bits)
    if EXPONENT == 4:
        bits = tl.where((code & MAGNITUDE) == 0x7F, NAN_BITS, bits)
    return bits_float(bits | (code >> SIGN) << 31)
