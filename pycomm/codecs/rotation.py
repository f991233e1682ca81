"""The random rotation that rotate and eden begin with, in plain torch: docs/wire/rotate.md."""

from __future__ import annotations

import struct

import torch

from pycomm.codecs.base import RandomKey
from pycomm.codecs.philox import derived_seed, random_words

SIZES = tuple(2**k for k in range(5, 13))
HEADER = 16  # bytes: the key of the signs, the number of their first word


def check_size(name: str, size: int) -> None:
    """Raise ValueError unless ``size`` is an allowed size of a rotation."""
    if size not in SIZES:
        raise ValueError(f"{name}: size={size}: use one of {', '.join(map(str, SIZES))}")


def header(key: RandomKey, index: int, device: torch.device) -> torch.Tensor:
    """Return the first bytes of a payload whose values begin at ``index`` of a tensor."""
    data = struct.pack("<QQ", derived_seed(key, 0), index // 32)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def random_bits(header: torch.Tensor, numel: int, stream: int = 0) -> torch.Tensor:
    """Return one random bit for each value of a payload, int64 [numel]; 0 are those of signs."""
    seed, first = struct.unpack("<QQ", bytes(header.tolist()))
    skip = first % 4
    words = random_words(
        RandomKey(seed=seed, tensor=stream), first - skip, skip + -(-numel // 32), header.device
    )
    places = torch.arange(32, device=header.device)
    return (words[skip:, None] >> places & 1).view(-1)[:numel]


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Transform each row: values half a row apart are added and subtracted, then a quarter, ..."""
    count, size = rows.shape
    apart = size // 2
    while apart:
        pairs = rows.view(count, -1, 2, apart)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        rows = torch.stack((a + b, a - b), dim=2).view(count, size)
        apart //= 2
    return rows


def rotate(p: torch.Tensor, header: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rotation of ``p`` (float32 [numel]) as rows of ``size`` values."""
    rows = p.new_zeros(-(-p.numel() // size) * size)
    rows[: p.numel()] = p
    flipped = _flip(rows * 2.0 ** -((size.bit_length() - 1) // 2), header)
    return hadamard(flipped.view(-1, size))


def unrotate(rows: torch.Tensor, header: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the values (float32 [numel]) that `rotate` made the rows of."""
    scaled = hadamard(rows).view(-1) * 2.0 ** -(rows.shape[1].bit_length() // 2)
    return _flip(scaled, header)[:numel]


def _flip(x: torch.Tensor, header: torch.Tensor) -> torch.Tensor:
    return torch.where(random_bits(header, x.numel()) == 1, -x, x)
