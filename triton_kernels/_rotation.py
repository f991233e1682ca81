"""The random rotation of eden: docs/wire/eden.md, csrc/codecs/rotation/rotation.h.

A program processes a tile of whole rotations, one per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import as_int32
from pycomm.triton_kernels._math import bits_float, float_bits

TILE = 4096  # values per program, the largest rotation: 16 per thread
WARPS = 8
HEADER = 16  # bytes: the key of the signs, the number of their first word
# Slopes of the first transform's first steps, and the inverse of both transforms' gain.
SLOPE_0 = tl.constexpr(0.70710678)
SLOPE_1 = tl.constexpr(0.8660254)
SLOPE_2 = tl.constexpr(0.91287093)
INVERSE = tl.constexpr(128 / 77)


@triton.jit
def load_header(payload_ptr):
    """Return the four words of the header, for `random_bits`."""
    return (
        tl.load(payload_ptr),
        tl.load(payload_ptr + 1),
        tl.load(payload_ptr + 2),
        tl.load(payload_ptr + 3),
    )


@triton.jit
def store_header(payload_ptr, key_low, key_high, first_low, first_high):
    """Store the header, from the first program."""
    if tl.program_id(0) == 0:
        tl.store(payload_ptr, key_low)
        tl.store(payload_ptr + 1, key_high)
        tl.store(payload_ptr + 2, first_low)
        tl.store(payload_ptr + 3, first_high)


@triton.jit
def random_bits(
    key_low, key_high, first_low, first_high,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STREAM: tl.constexpr,
):  # fmt: skip
    """Return a random bit for each value of this program's tile, int32 [ROWS, SIZE]."""
    WORDS: tl.constexpr = ROWS * SIZE // 32
    key = key_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    key = key | key_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    first = first_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    first = first | first_low.to(tl.uint32, bitcast=True).to(tl.uint64)
    place = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    number = first + place.to(tl.uint64)  # modulo 2**64
    group = number >> 2
    low = (group & 0xFFFFFFFF).to(tl.uint32)
    high = (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(key, low, high, zero + STREAM, zero)
    which = (number & 3).to(tl.int32)
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    bits = (word.to(tl.int32, bitcast=True)[:, None] >> tl.arange(0, 32)[None, :]) & 1
    return tl.reshape(bits, (ROWS, SIZE))


@triton.jit
def hadamard(x, ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Transform each row, in the natural order of the wire page.

    Each of log2(SIZE) steps makes values half a row apart neighbours, as their sum and their
    difference, so all steps are one loop; unrolled they are a megabyte of instructions.
    """
    for _ in range(STEPS):
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, SIZE // 2)), (0, 2, 1)))
        x = tl.reshape(tl.join(a + b, a - b), (ROWS, SIZE))
    return x


@triton.jit
def sums(x, ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Return the sum of each row [ROWS, 1]: halves are added until one number remains.

    The loop keeps every sum twice, so that at the end all values are the final sum.
    """
    for _ in range(STEPS):
        a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, SIZE // 2)), (0, 2, 1)))
        x = tl.reshape(tl.join(a + b, a + b), (ROWS, SIZE))
    return tl.max(x, axis=1, keep_dims=True)


@triton.jit
def spread(x, ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Apply the first transform: six steps, or all for small rotations; three have a slope."""
    SPREAD: tl.constexpr = STEPS if STEPS < 10 else 6
    REST: tl.constexpr = SIZE >> SPREAD
    for i in range(SPREAD):
        t = tl.where(i == 1, SLOPE_1, tl.where(i == 2, SLOPE_2, 1.0))
        t = tl.where(i == 0, SLOPE_0, t)
        pairs = tl.reshape(x, (ROWS, 2, SIZE // REST // 2, REST))
        a, b = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
        pairs = tl.permute(tl.join(a + t * b, t * a - b), (0, 1, 3, 2))
        x = tl.reshape(pairs, (ROWS, SIZE))
    return x


@triton.jit
def flip(x, signs):
    return bits_float(float_bits(x) ^ (signs << 31))


@triton.jit
def rotation_signs(
    key_low, key_high, first_low, first_high, ROWS: tl.constexpr, SIZE: tl.constexpr
):
    """Return both signs of each value of this program's tile: bits 0 and 1, [ROWS, SIZE]."""
    first = random_bits(key_low, key_high, first_low, first_high, ROWS, SIZE, 0)
    second = random_bits(key_low, key_high, first_low, first_high, ROWS, SIZE, 2)
    return first | second << 1


@triton.jit
def rotate(p, signs, ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    BITS: tl.constexpr = STEPS + (STEPS if STEPS < 10 else 6)
    SCALE: tl.constexpr = 1.0 / (1 << (BITS // 2))
    y = spread(flip(p * SCALE, signs), ROWS, SIZE, STEPS)
    return hadamard(flip(y, signs >> 1), ROWS, SIZE, STEPS)


@triton.jit
def unrotate(y, signs, ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr):
    BITS: tl.constexpr = STEPS + (STEPS if STEPS < 10 else 6)
    BETWEEN: tl.constexpr = (STEPS + 1) // 2
    SCALE: tl.constexpr = INVERSE / (1 << ((BITS + 1) // 2 - BETWEEN))
    y = flip(hadamard(y, ROWS, SIZE, STEPS) * (1.0 / (1 << BETWEEN)), signs >> 1)
    return flip(spread(y, ROWS, SIZE, STEPS) * SCALE, signs)


def shape(size: int) -> dict[str, int]:
    """Return the constants of every kernel: rotations of a tile, their size and its logarithm."""
    return {"ROWS": TILE // size, "SIZE": size, "STEPS": size.bit_length() - 1}


def header_words(codec: Any, args: Any) -> tuple[int, ...]:
    """Return the words of the header that an encoder writes, from its EncodeArgs."""
    numbers = (codec.sign_key(args.key), args.index // 32)
    return tuple(as_int32(word) for n in numbers for word in (n & 0xFFFFFFFF, n >> 32))


def header_of(payload: torch.Tensor) -> torch.Tensor:
    return payload[:HEADER].view(torch.int32)
