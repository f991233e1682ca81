"""Helpers shared by the references of the block codecs; the wire pages have the same steps."""

from __future__ import annotations

import torch

TINY = 2.0**-100  # blocks with amax at or below this are sent as zeros
HUGE = 2.0**127  # blocks whose amax is not below this are sent as NaN
NAN = 0x7FC00000  # bits of every NaN that an encoder writes
INF = 0x7F800000  # bits of infinity: all of the exponent
SIZES = tuple(2**k for k in range(5, 12))


def check_block(name: str, block: int) -> None:
    """Raise ValueError unless ``block`` is an allowed block size."""
    if block not in SIZES:
        raise ValueError(f"{name}: block={block}: use one of {', '.join(map(str, SIZES))}")


def num_blocks(numel: int, block: int) -> int:
    """Return the number of blocks, including a short last one."""
    return -(-numel // block)


def padded(size: int) -> int:
    """Return the padded size of a section: the next multiple of 4."""
    return -(-size // 4) * 4


def split(p: torch.Tensor, block: int) -> torch.Tensor:
    """Return ``p`` (float32 [numel]) as rows of one block each; zeros pad the last row."""
    rows = p.new_zeros(num_blocks(p.numel(), block) * block)
    rows[: p.numel()] = p
    return rows.view(-1, block)


def scales_of(amax: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (scale, inverse scale, used) of blocks whose largest magnitude is ``amax``.

    Blocks that are not used have zero codes only.
    """
    used = (amax > TINY) & (amax < HUGE)
    # Tensor by tensor: torch turns division by a scalar into multiplication by its reciprocal.
    tops = torch.full_like(amax, top)
    nan = torch.full_like(amax, NAN, dtype=torch.int32).view(torch.float32)
    zero = torch.zeros_like(amax)
    scale = torch.where(used, amax / tops, torch.where(amax <= TINY, zero, nan))
    return scale, torch.where(used, tops / amax, zero), used


def scales(rows: torch.Tensor, top: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (scale, inverse scale, used) of each row, [blocks] each."""
    return scales_of(rows.abs().amax(dim=1), top)


def add_halves(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row: its halves are added to each other until one number remains."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows.view(-1)


def mean_scales(rows: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, used) of each row, [blocks] each; the scale is a block's mean magnitude."""
    block = rows.shape[1]
    begin = block * torch.arange(len(rows), device=rows.device, dtype=torch.int64)
    mean = add_halves(rows.abs()) / (numel - begin).clamp(max=block).to(torch.float32)
    scale, _, used = scales_of(mean, 1.0)
    return scale, used


def payload(*sections: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the sections one after the other, each padded with zeros.

    Sections of several records have a row for each, and so have their bytes.
    """
    parts = []
    for section in sections:
        data = section.contiguous().view(torch.uint8)
        size = data.shape[-1]
        parts += [data, data.new_zeros((*data.shape[:-1], padded(size) - size))]
    return torch.cat(parts, dim=-1)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the little-endian bit string (uint8) of codes of ``bits`` bits each.

    Args:
        codes: uint8 [numel], or of each row one string; the lowest ``bits`` bits of each are used.
        bits: 1 to 8.
    """
    if bits == 8:
        return codes
    places = torch.arange(8, dtype=torch.uint8, device=codes.device)
    ones = (codes[..., None] >> places[:bits] & 1).flatten(-2)
    string = ones.new_zeros((*ones.shape[:-1], -(-ones.shape[-1] // 8) * 8))
    string[..., : ones.shape[-1]] = ones
    return (string.view(*string.shape[:-1], -1, 8) << places).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(data: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """Return the codes (uint8 [numel], 0 to 2^bits - 1) of bit strings of `pack_bits`."""
    if bits == 8:
        return data[..., :numel]
    places = torch.arange(8, dtype=torch.uint8, device=data.device)
    ones = (data[..., None] >> places & 1).flatten(-2)[..., : numel * bits]
    codes = ones.reshape(*ones.shape[:-1], numel, bits) << places[:bits]
    return codes.sum(dim=-1, dtype=torch.uint8)
