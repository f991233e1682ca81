"""lossless: float32, or float32 rounded to bfloat16, with coded exponents.

Wire format: docs/wire/lossless.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import NAN, num_blocks, pack_bits, padded, unpack_bits

BLOCK = 256
GROUP = 32  # number of values whose codes fill whole words
HEAD = 3  # bytes of a block: its largest exponent, the bits of a code, the number of escapes
WHOLE = 8  # bits of a code that holds every offset
WIDTHS = range(2, WHOLE + 1)  # besides 0, for equal exponents


@dataclass(frozen=True)
class Lossless(Codec):
    """Exponents as offsets from the largest of their block; the other bits are unchanged."""

    name: ClassVar[str] = "lossless"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 2

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
        return sum(self.sections(numel)) if numel else 0

    def sections(self, numel: int) -> tuple[int, int, int, int, int]:
        """Return the bytes of header, three fixed-size sections, and the stream's maximum."""
        low = padded16(2 * numel) if self.dtype == "float32" else 0
        heads = padded16(HEAD * num_blocks(numel, BLOCK))
        return 16, padded16(numel), low, heads, num_blocks(numel, GROUP) * GROUP

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        out = p.new_zeros(self.encoded_bytes(p.numel()), dtype=torch.uint8)
        if p.numel() == 0:
            return out
        value = p if self.dtype == "float32" else p.to(torch.bfloat16).to(torch.float32)
        bits = value.view(torch.int32).clone()
        bits[p.isnan()] = NAN
        header, high, low, heads, stream = torch.split(out, list(self.sections(p.numel())))
        high[: p.numel()] = bits >> 24 & 0x80 | bits >> 16 & 0x7F
        if self.dtype == "float32":
            low.view(torch.int16)[: p.numel()] = bits & 0xFFFF

        there, groups = _blocks(p)
        exponent = torch.zeros_like(there, dtype=torch.int64)
        exponent[there] = (bits >> 23 & 0xFF).to(torch.int64)
        top = exponent.amax(dim=1, keepdim=True)
        offset = torch.where(there, top - exponent, 0)
        # Bytes of a block at each width, and the width itself: the smallest of equal sizes.
        size = [
            (4 * w * groups + (w < WHOLE) * (offset >= (1 << w) - 1).sum(dim=1)) << 4 | w
            for w in WIDTHS
        ]
        width = torch.where(offset.any(dim=1), torch.stack(size).amin(dim=0) & 15, 0)
        largest, far = _escapes(width)
        far = there & far & (offset >= largest)
        code = offset.minimum(largest).to(torch.uint8)
        begin, codes_end = _sums(4 * width * groups)
        for w in WIDTHS:
            chosen = width == w
            byte = torch.arange(BLOCK * w // 8, device=p.device, dtype=torch.int64)
            packed = pack_bits(code[chosen].view(-1), w).view(-1, byte.numel())
            inside = byte < 4 * w * groups[chosen, None]
            stream[(begin[chosen, None] + byte)[inside]] = packed[inside]
        escaped = exponent[far].to(torch.uint8)
        end = padded(codes_end + escaped.numel())
        stream[end - escaped.numel() : end] = escaped.flip(0)
        head = torch.stack((top.view(-1), width, far.sum(dim=1)), dim=1)
        heads[: head.numel()] = head.view(-1)
        header.view(torch.int32)[0] = out.numel() - stream.numel() + end
        return out

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, device=payload.device, dtype=torch.float32)
        header, high, low, heads, stream = torch.split(payload, list(self.sections(numel)))
        used = int(header.view(torch.int32)[0]) & 0xFFFFFFFC
        stream = stream[: max(used - payload.numel() + stream.numel(), 0)]
        end = stream.numel()
        stream = torch.cat((stream, stream.new_full((1,), 0xFF)))  # stands for missing bytes

        there, groups = _blocks(high[:numel])
        top, width, count = heads[: HEAD * len(there)].view(-1, HEAD).to(torch.int64).unbind(dim=1)
        width = torch.where((width == 1) | (width > WHOLE), WHOLE, width)
        begin, _ = _sums(4 * width * groups)
        code = torch.zeros_like(there, dtype=torch.int64)
        for w in WIDTHS:
            chosen = width == w
            place = begin[chosen, None] + torch.arange(
                BLOCK * w // 8, device=payload.device, dtype=torch.int64
            )
            packed = stream[place.clamp(max=end)].view(-1)
            code[chosen] = unpack_bits(packed, w, packed.numel() * 8 // w).view(-1, BLOCK).long()
        largest, far = _escapes(width)
        far = there & far & (code == largest)
        before, _ = _sums(count)
        place = end - before[:, None] - far.cumsum(dim=1)
        escaped = stream[torch.where(far & (place >= 0), place, end)]
        exponent = torch.where(far, escaped.long(), (top[:, None] - code) & 0xFF)[there]

        upper = high[:numel].to(torch.int64)
        bits = (upper & 0x80) << 24 | exponent << 23 | (upper & 0x7F) << 16
        if self.dtype == "float32":
            bits |= low.view(torch.int16)[:numel].to(torch.int64) & 0xFFFF
        return bits.to(torch.int32).view(torch.float32)


def padded16(size: int) -> int:
    """Return the padded size of a section: the next multiple of 16."""
    return -(-size // 16) * 16


def _blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the values [blocks, BLOCK], and each block's groups [blocks]."""
    numel = values.numel()
    place = torch.arange(num_blocks(numel, BLOCK) * BLOCK, device=values.device, dtype=torch.int64)
    there = (place < numel).view(-1, BLOCK)
    return there, (there.sum(dim=1) + GROUP - 1) // GROUP


def _escapes(width: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest code of each block, and whether it marks an escaped exponent."""
    return ((1 << width) - 1)[:, None], ((width > 0) & (width < WHOLE))[:, None]


def _sums(sizes: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the exclusive prefix sums of the sizes, and the total."""
    sums = sizes.cumsum(dim=0)
    return sums - sizes, int(sums[-1])
