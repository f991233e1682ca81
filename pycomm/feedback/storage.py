"""Storage of residuals: float32, or int8 with a scale for each block of 32 values.

Stored values are tensors whose dtype is the format: float32 [numel], or uint8 [blocks, 36], where a
block is a float32 scale followed by its codes. The bits are those of `load` and `store` in
csrc/codecs/base/feedback.cpp.
"""

from __future__ import annotations

import mmap

import torch

from pycomm.feedback.rule import StorageName

BLOCK = 32
BLOCK_BYTES = 4 + BLOCK
DTYPES: dict[StorageName, torch.dtype] = {"float32": torch.float32, "int8": torch.uint8}

_TINY, _HUGE, _TOP = 2.0**-100, 2.0**127, 127.0
_PAGES = 1 << 17  # bytes from which zeros are mapped from the kernel


def name_of(stored: torch.Tensor) -> StorageName:
    """Return the storage of stored values."""
    return "int8" if stored.dtype == torch.uint8 else "float32"


def shape(storage: StorageName, numel: int, rows: int = 1) -> tuple[int, ...]:
    """Return the shape of `rows` rows of `numel` stored values each."""
    return (rows * -(-numel // BLOCK), BLOCK_BYTES) if storage == "int8" else (rows * numel,)


def count(storage: StorageName, numel: int, rows: int = 1) -> int:
    """Return the bytes of `rows` rows of `numel` stored values each."""
    return torch.Size(shape(storage, numel, rows)).numel() * DTYPES[storage].itemsize


def zeros(storage: StorageName, numel: int, device: torch.device, rows: int = 1) -> torch.Tensor:
    """Return stored zeros; on the CPU they take no memory before they are written."""
    size, dtype = shape(storage, numel, rows), DTYPES[storage]
    total = count(storage, numel, rows)
    if device.type != "cpu" or total < _PAGES:  # torch.zeros writes all bytes, a mapping none
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def part(stored: torch.Tensor, numel: int, row: int, begin: int, end: int) -> torch.Tensor:
    """Return the stored values begin <= i < end of a row of `numel` values.

    Args:
        stored: rows of `numel` values each.
        numel: values of a row.
        row: number of the row.
        begin: a multiple of 32.
        end: a multiple of 32, or `numel`.
    """
    if stored.dtype == torch.uint8:
        first = row * -(-numel // BLOCK)
        return stored[first + begin // BLOCK : first + -(-end // BLOCK)]
    return stored[row * numel + begin : row * numel + end]


def load(stored: torch.Tensor, numel: int) -> torch.Tensor:
    """Return stored values as float32 [numel]; float32 itself is not copied."""
    if stored.dtype != torch.uint8:
        return stored.float()
    scales = stored[:, :4].contiguous().view(torch.float32)
    return (stored[:, 4:].view(torch.int8).float() * scales).view(-1)[:numel]


def store(values: torch.Tensor, stored: torch.Tensor) -> None:
    """Store float32 values. A block that is too large for its scale becomes zero."""
    if stored.dtype == torch.float32:
        stored.copy_(values)
    else:
        blocks = values.new_zeros(len(stored), BLOCK)
        blocks.view(-1)[: values.numel()] = values
        amax = blocks.abs().amax(1, keepdim=True) if len(stored) else blocks[:, :1]
        used = (amax > _TINY) & (amax < _HUGE)
        top = torch.full_like(amax, _TOP)  # a tensor: for a number torch uses its reciprocal
        scales = torch.where(used, amax / top, torch.zeros_like(amax))
        codes = torch.where(used, blocks * torch.where(used, top / amax, 0.0), 0.0).round()
        stored[:, :4] = scales.view(torch.uint8)
        stored[:, 4:] = codes.to(torch.int8).view(torch.uint8)


def scale(stored: torch.Tensor, factor: float) -> None:
    """Multiply stored values; int8 codes stay as they are."""
    floats = stored
    if stored.dtype == torch.uint8:
        floats = stored[:, :4].contiguous().view(torch.float32)
    floats.mul_(factor)
    if floats is not stored:
        stored[:, :4] = floats.view(torch.uint8)


def powers(exponents: torch.Tensor) -> torch.Tensor:
    """Return two to the power of small whole numbers, float32, exactly: torch's own pow rounds."""
    return ((exponents.int() + 127) << 23).view(torch.float32)
