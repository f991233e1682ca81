"""lossless: float32, or float32 rounded to bfloat16, with coded exponents.

Wire format: docs/wire/lossless.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pycomm.codecs.base import Codec, Combine, RandomKey
from pycomm.codecs.block import NAN, num_blocks, pack_bits, padded, payload, unpack_bits

BLOCK = 256
RAW = 8  # bits of an offset: the exponents stand there as they are
WIDTHS = (0, *range(2, 9))


@dataclass(frozen=True)
class Lossless(Codec):
    """Exponents of a block as offsets from its largest; the other bits as they are."""

    name: ClassVar[str] = "lossless"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 1

    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"lossless: dtype={self.dtype}: use one of float32, bfloat16")

    @property
    def granule(self) -> int:
        return BLOCK

    @property
    def variable(self) -> bool:
        return True

    def encoded_bytes(self, numel: int) -> int:
        return sum(self._sections(numel)) if numel else 0

    def _sections(self, numel: int) -> tuple[int, int, int, int, int]:
        """Bytes of the count, of the three sections of fixed size, and the most of the stream."""
        low = padded(2 * numel) if self.dtype == "float32" else 0
        return 4, padded(numel), low, padded(2 * num_blocks(numel, BLOCK)), padded(numel)

    def reference_encode(
        self, p: torch.Tensor, key: RandomKey, index: int, agreed: torch.Tensor | None = None
    ) -> torch.Tensor:
        if p.numel() == 0:
            return p.new_empty(0, dtype=torch.uint8)
        value = p if self.dtype == "float32" else p.to(torch.bfloat16).to(torch.float32)
        bits = value.view(torch.int32).clone()
        bits[p.isnan()] = NAN
        high = (bits >> 24 & 0x80 | bits >> 16 & 0x7F).to(torch.uint8)
        low = (bits & 0xFFFF).to(torch.int32).view(torch.uint8).view(-1, 4)[:, :2].reshape(-1)
        exponent = (bits >> 23 & 0xFF).to(torch.uint8)
        heads, stream = [], []
        for part in torch.split(exponent, BLOCK):
            width, coded = _code(part)
            heads += [int(part.max()), width]
            stream += coded
        count = p.new_zeros(4, dtype=torch.uint8)
        fixed = (count, high, low) if self.dtype == "float32" else (count, high)
        out = payload(*fixed, torch.tensor(heads, dtype=torch.uint8, device=p.device), *[
            torch.cat([high[:0], *stream])
        ])  # fmt: skip
        out[:4].view(torch.int32)[0] = out.numel()
        return torch.cat((out, out.new_zeros(self.encoded_bytes(p.numel()) - out.numel())))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, device=payload.device)
        count, high, low, heads, stream = torch.split(payload, list(self._sections(numel)))
        used = (int(count.view(torch.int32)) & 0xFFFFFFFF) - payload.numel() + stream.numel()
        stream = stream[: max(used, 0)]
        exponents = []
        for begin in range(0, numel, BLOCK):
            top, width = heads[begin // BLOCK * 2 :][:2].tolist()
            # Behind the end there are bytes of ones.
            part = torch.cat((stream[: 2 * BLOCK], stream.new_full((2 * BLOCK,), 0xFF)))
            exponent, taken = _decode(top, width, part, min(BLOCK, numel - begin))
            exponents.append(exponent)
            stream = stream[taken:]
        bits = (high[:numel].to(torch.int32) & 0x80) << 24 | torch.cat(exponents) << 23
        bits |= (high[:numel].to(torch.int32) & 0x7F) << 16
        if self.dtype == "float32":
            bits |= low[: 2 * numel].view(torch.int16).to(torch.int32) & 0xFFFF
        return bits.to(torch.int32).view(torch.float32)


def _code(exponent: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """Return the width of the offsets of a block, and its part of the stream."""
    offset = exponent.max() - exponent

    def escaped(width: int) -> torch.Tensor:
        return offset >= (1 << width) - 1

    def bits(width: int) -> int:
        if width == 0:
            return 0 if not bool(offset.any()) else 1 << 30
        extra = 0 if width == RAW else 8 * int(escaped(width).sum())
        return width * exponent.numel() + extra

    width = min(WIDTHS, key=bits)  # the first of equals
    if width == 0:
        return width, []
    if width == RAW:
        return width, [exponent]
    code = offset.clamp(max=(1 << width) - 1)
    return width, [pack_bits(code, width), exponent[escaped(width)]]


def _decode(top: int, width: int, part: torch.Tensor, numel: int) -> tuple[torch.Tensor, int]:
    """Return the exponents (int32) of a block, and how many bytes of the stream they took."""
    if width == 0:
        return torch.full((numel,), top, dtype=torch.int32, device=part.device), 0
    if width not in WIDTHS or width == RAW:
        return part[:numel].to(torch.int32), numel
    code = unpack_bits(part, width, numel).to(torch.int32)
    exponent = (top - code) & 0xFF
    escaped = code == (1 << width) - 1
    begin = -(-numel * width // 8)
    end = begin + int(escaped.sum())
    exponent[escaped] = part[begin:end].to(torch.int32)
    return exponent, end
