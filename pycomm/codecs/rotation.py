"""The random rotation of eden, in plain torch: docs/wire/eden.md."""

from __future__ import annotations

import struct

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.philox import derived_seed, words_of_groups

SIZES = tuple(2**k for k in range(5, 13))
HEADER = 16  # bytes: the key of the signs, the number of their first word
SECOND = 2  # the stream of the signs between the two transforms
# Slopes of the first transform's steps, by size / distance; all other steps have slope 1.
# They give the parts of one large value eight magnitudes that no common step divides, so that after
# the second transform a single value, too, is close to normal.
SLOPES = {2: 0.70710678, 4: 0.8660254, 8: 0.91287093}


def header(key: RandomKey, index: int, device: torch.device) -> torch.Tensor:
    """Return the first bytes of a payload whose values start at ``index`` of a tensor."""
    data = struct.pack("<QQ", derived_seed(key), index // 32)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def random_bits(header: torch.Tensor, numel: int, stream: int = 0) -> torch.Tensor:
    """Return one random bit for each value of a payload, int64 [numel]; stream 0 has the signs."""
    seed, first = header.clone().view(torch.int64).unbind()
    number = first + torch.arange(-(-numel // 32), device=header.device, dtype=torch.int64)
    words = words_of_groups(seed, number >> 2, stream).gather(1, number[:, None] & 3)
    places = torch.arange(32, device=header.device, dtype=torch.int64)
    return (words >> places & 1).view(-1)[:numel]


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Transform each row: values half a row apart are added and subtracted, then a quarter, ..."""
    apart = rows.shape[1] // 2
    while apart:
        rows = _step(rows, apart)
        apart //= 2
    return rows


def spread_over(size: int) -> int:
    """Return the number of values over which the first transform spreads each one."""
    return min(size, 64) if size >= 1024 else size


def spread(rows: torch.Tensor) -> torch.Tensor:
    """Transform each row by the first steps of `hadamard`, three of them with a slope."""
    size = rows.shape[1]
    apart = size // 2
    while apart >= size // spread_over(size):
        rows = _step(rows, apart, SLOPES.get(size // apart))
        apart //= 2
    return rows


def _step(rows: torch.Tensor, apart: int, slope: float | None = None) -> torch.Tensor:
    """Replace values a and b by a + t b and t a - b, where t is ``slope``, or 1."""
    count, size = rows.shape
    a, b = rows.view(count, -1, 2, apart).unbind(2)
    if slope is None:
        pairs = (a + b, a - b)
    else:
        t = torch.tensor(slope, dtype=torch.float32, device=rows.device)
        pairs = (a + t * b, t * a - b)
    return torch.stack(pairs, dim=2).view(count, size)


def rotate(p: torch.Tensor, header: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rotation of ``p`` (float32 [numel]) as rows of ``size`` values."""
    rows = p.new_zeros(-(-p.numel() // size) * size)
    rows[: p.numel()] = p
    flipped = _flip(rows * 2.0 ** -(_steps(size) // 2), header)
    mixed = spread(flipped.view(-1, size)).view(-1)
    return hadamard(_flip(mixed, header, SECOND).view(-1, size))


def unrotate(rows: torch.Tensor, header: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the values (float32 [numel]) from which `rotate` made the rows."""
    size = rows.shape[1]
    between = size.bit_length() // 2
    mixed = _flip(hadamard(rows).view(-1) * 2.0**-between, header, SECOND)
    scale = torch.tensor(128 / 77, dtype=torch.float32, device=rows.device)
    scale = scale * 2.0 ** (between - (_steps(size) + 1) // 2)
    return _flip(spread(mixed.view(-1, size)).view(-1) * scale, header)[:numel]


def _steps(size: int) -> int:
    """Return the number of steps of both transforms together."""
    return size.bit_length() - 1 + spread_over(size).bit_length() - 1


def _flip(x: torch.Tensor, header: torch.Tensor, stream: int = 0) -> torch.Tensor:
    return torch.where(random_bits(header, x.numel(), stream) == 1, -x, x)
