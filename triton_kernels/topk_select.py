"""Selection of the k largest magnitudes in Triton, exactly, in index order.

The bits of the magnitude are a radix key of 11, 11 and 9 bits: each digit of the k-th largest comes
from a histogram. With chunks one program processes a whole record. For whole tensors the programs
synchronise through scratch memory, between launches: after each of three histograms, after counting
values at the cut, and after a scan of the counts. So they read the values five times; the CUDA
kernels keep candidates and read them three times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pycomm.triton_kernels._math import load_sum, magnitude_bits

BINS = tl.constexpr(2048)
# State of a record, int32: whether it is void, the cut (the smallest magnitude of which some are
# sent), and how many equal to it are sent.
STATE = tl.constexpr(3)
VOID, CUT, TIES = (tl.constexpr(i) for i in range(3))


@triton.jit
def load_tile(x_ptr, residual_ptr, start, at, n, FEEDBACK: tl.constexpr, TILE: tl.constexpr):
    """Return (p, residual, index in the record, mask) of a tile of a record of n values."""
    place = at + tl.arange(0, TILE).to(tl.int64)
    mask = place < n
    p, residual = load_sum(x_ptr, residual_ptr, start + place, mask, FEEDBACK)
    return p, residual, place, mask


@triton.jit
def count_digits(bits, mask, prefix, LEVEL: tl.constexpr):
    """Return the histogram of a digit, over values whose higher digits are ``prefix``."""
    if LEVEL == 0:
        digit = bits >> 20
    elif LEVEL == 1:
        digit = (bits >> 9) & 2047
        mask = mask & (bits >> 20 == prefix)
    else:
        digit = bits & 511
        mask = mask & (bits >> 9 == prefix)
    return tl.histogram(digit, BINS, mask=mask)


@triton.jit
def find_digit(bins, place):
    """Return the bin of the place-th largest, and its place among those in the bin."""
    count = bins.to(tl.int64) & 0xFFFFFFFF
    from_here_up = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count
    found = tl.sum((from_here_up >= place).to(tl.int32), axis=0) - 1
    above = tl.sum(tl.where(tl.arange(0, BINS) == found, from_here_up - count, 0), axis=0)
    return found, place - above


@triton.jit
def any_beyond(bins, LIMIT: tl.constexpr):
    """Return whether a magnitude makes the record void: both limits, 2^127 and Inf, begin a bin."""
    return tl.sum(tl.where(tl.arange(0, BINS) >= LIMIT >> 20, bins, 0), axis=0) != 0


@triton.jit
def choose_tile(
    p, place, mask, cut, ties, equals, count, start, room,
    p_ptr, index_ptr, new_residual_ptr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Write the chosen values of a tile to their slots, and the others to the new residual.

    ``equals`` counts earlier values equal to the cut, ``count`` earlier chosen ones. Returns both,
    updated. Of a record whose values change after they were counted, no more than ``room`` are
    written.
    """
    bits = magnitude_bits(p)
    equal = mask & (bits == cut)
    rank = equals + tl.cumsum(equal.to(tl.int64), axis=0)  # counts from 1
    chosen = mask & ((bits > cut) | (equal & (rank <= ties)))
    to = count + tl.cumsum(chosen.to(tl.int64), axis=0) - 1
    fits = chosen & (to < room)
    tl.store(p_ptr + to, p, mask=fits)
    tl.store(index_ptr + to, place.to(tl.int32), mask=fits)
    if FEEDBACK:
        tl.store(new_residual_ptr + start + place, p, mask=mask & (chosen == 0))
    equals += tl.sum(equal.to(tl.int64), axis=0)
    return equals, count + tl.sum(chosen.to(tl.int64), axis=0)


# ---------------------------------------------------------------- kernels


@triton.jit(do_not_specialize=["k", "last_k"])
def chunks_kernel(
    x_ptr, residual_ptr, new_residual_ptr, state_ptr, p_ptr, index_ptr, numel, k, last_k, room,
    LENGTH: tl.constexpr, LIMIT: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose the values of one record."""
    record = tl.program_id(0).to(tl.int64)
    start = record * LENGTH
    n = tl.minimum(numel - start, LENGTH)
    here = tl.where(n == LENGTH, k, last_k).to(tl.int64)
    prefix = tl.zeros((), tl.int32)
    left = here
    void = tl.zeros((), tl.int1)
    for level in tl.static_range(3):
        bins = tl.zeros((BINS,), tl.int32)
        at = tl.zeros((), tl.int64)
        while at < n:
            p, _, _, mask = load_tile(x_ptr, residual_ptr, start, at, n, FEEDBACK, TILE)
            bins += count_digits(magnitude_bits(p), mask, prefix, level)
            at += TILE
        digit, left = find_digit(bins, left)
        if level == 0:
            void = any_beyond(bins, LIMIT)
            prefix = digit
        else:
            prefix = prefix << (11 if level == 1 else 9) | digit
    state_ptr += record * STATE
    tl.store(state_ptr + VOID, void.to(tl.int32))
    # A void record has no value above the cut and no ties.
    cut = tl.where(void, 0x7FFFFFFF, prefix)
    ties = tl.where(void, 0, left)
    equals = tl.zeros((), tl.int64)
    count = tl.zeros((), tl.int64)
    at = tl.zeros((), tl.int64)
    while at < n:
        p, residual, place, mask = load_tile(x_ptr, residual_ptr, start, at, n, FEEDBACK, TILE)
        equals, count = choose_tile(
            tl.where(void, residual, p), place, mask, cut, ties, equals, count, start, room,
            p_ptr + record * room, index_ptr + record * room, new_residual_ptr, FEEDBACK,
        )  # fmt: skip
        at += TILE


@triton.jit(do_not_specialize=["k"])
def histogram_kernel(
    x_ptr, residual_ptr, bins_ptr, n, k,
    LEVEL: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add a tile to the histogram of a digit; the histograms of higher digits are complete."""
    prefix = tl.zeros((), tl.int32)
    left = tl.zeros((), tl.int64) + k
    for level in tl.static_range(LEVEL):
        bins = tl.load(bins_ptr + level * BINS + tl.arange(0, BINS))
        digit, left = find_digit(bins, left)
        prefix = prefix << 11 | digit
    at = tl.program_id(0).to(tl.int64) * TILE
    p, _, _, mask = load_tile(x_ptr, residual_ptr, 0, at, n, FEEDBACK, TILE)
    counts = count_digits(magnitude_bits(p), mask, prefix, LEVEL)
    to = bins_ptr + LEVEL * BINS + tl.arange(0, BINS)
    tl.atomic_add(to, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def count_kernel(
    x_ptr, residual_ptr, state_ptr, bins_ptr, around_ptr, tiles, n, k,
    LIMIT: tl.constexpr, FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count the values of a tile above the cut, and those equal to it."""
    prefix = tl.zeros((), tl.int32)
    left = tl.zeros((), tl.int64) + k
    for level in tl.static_range(3):
        bins = tl.load(bins_ptr + level * BINS + tl.arange(0, BINS))
        digit, left = find_digit(bins, left)
        prefix = prefix << (9 if level == 2 else 11) | digit
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE
    p, _, _, mask = load_tile(x_ptr, residual_ptr, 0, at, n, FEEDBACK, TILE)
    bits = magnitude_bits(p)
    tl.store(around_ptr + tile, tl.sum((mask & (bits > prefix)).to(tl.int32), axis=0))
    tl.store(around_ptr + tiles + tile, tl.sum((mask & (bits == prefix)).to(tl.int32), axis=0))
    if tile == 0:
        tl.store(state_ptr + CUT, prefix)
        tl.store(state_ptr + TIES, left.to(tl.int32))
        bins = tl.load(bins_ptr + tl.arange(0, BINS))
        tl.store(state_ptr + VOID, any_beyond(bins, LIMIT).to(tl.int32))


@triton.jit
def scan_kernel(around_ptr, tiles, SIZE: tl.constexpr):
    """Turn the counts of each tile into prefix sums. One program."""
    greater = tl.zeros((), tl.int64)
    equal = tl.zeros((), tl.int64)
    at = tl.zeros((), tl.int64)
    while at < tiles:
        place = at + tl.arange(0, SIZE)
        mask = place < tiles
        above = tl.load(around_ptr + place, mask=mask, other=0).to(tl.int64)
        ties = tl.load(around_ptr + tiles + place, mask=mask, other=0).to(tl.int64)
        before = greater + tl.cumsum(above, axis=0) - above
        tl.store(around_ptr + place, before.to(tl.int32), mask=mask)
        before = equal + tl.cumsum(ties, axis=0) - ties
        tl.store(around_ptr + tiles + place, before.to(tl.int32), mask=mask)
        greater += tl.sum(above, axis=0)
        equal += tl.sum(ties, axis=0)
        at += SIZE


@triton.jit
def choose_kernel(
    x_ptr, residual_ptr, new_residual_ptr, state_ptr, around_ptr, tiles, p_ptr, index_ptr, n, room,
    FEEDBACK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the chosen values of a tile to their slots."""
    tile = tl.program_id(0)
    void = tl.load(state_ptr + VOID) != 0
    cut = tl.where(void, 0x7FFFFFFF, tl.load(state_ptr + CUT))
    ties = tl.load(state_ptr + TIES).to(tl.int64) & 0xFFFFFFFF
    ties = tl.where(void, 0, ties)
    greater = tl.load(around_ptr + tile).to(tl.int64) & 0xFFFFFFFF
    equals = tl.load(around_ptr + tiles + tile).to(tl.int64) & 0xFFFFFFFF
    p, residual, place, mask = load_tile(
        x_ptr, residual_ptr, 0, tile.to(tl.int64) * TILE, n, FEEDBACK, TILE
    )
    choose_tile(
        tl.where(void, residual, p), place, mask, cut, ties,
        equals, greater + tl.minimum(equals, ties), 0, room,
        p_ptr, index_ptr, new_residual_ptr, FEEDBACK,
    )  # fmt: skip
