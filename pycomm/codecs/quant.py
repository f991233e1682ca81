"""quant: block-wise symmetric integers, 3.9 (8 bits) or 7.5 (4 bits) times smaller than float32.

Wire format: docs/wire/quant.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pycomm.codecs.base import Codec, Combine, RandomKey
from pycomm.codecs.block import check_block, num_blocks, padded, payload, scales, split
from pycomm.codecs.philox import random_words

DEFAULT_BLOCK = {8: 256, 4: 128}


@dataclass(frozen=True)
class Quant(Codec):
    """Each block shares one float32 scale: its largest magnitude / 127 (8 bits) or 7 (4 bits)."""

    name: ClassVar[str] = "quant"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 1

    bits: int = 8
    block: int = 0  # 0: 256 for 8 bits, 128 for 4 bits
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.bits not in DEFAULT_BLOCK:
            raise ValueError(f"quant: bits={self.bits}: use 8 or 4")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"quant: rounding={self.rounding}: use nearest or stochastic")
        if self.block == 0:
            object.__setattr__(self, "block", DEFAULT_BLOCK[self.bits])
        check_block("quant", self.block)

    @property
    def top(self) -> int:
        """The largest code."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def granule(self) -> int:
        return self.block

    def encoded_bytes(self, numel: int) -> int:
        return 4 * num_blocks(numel, self.block) + padded(-(-numel * self.bits // 8))

    def reference_encode(
        self, p: torch.Tensor, key: RandomKey, index: int, agreed: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = split(p, self.block)
        scale, inv, used = scales(rows, self.top)
        v = rows * inv[:, None]
        if self.rounding == "nearest":
            code = v.round()  # ties to even
        else:
            a = v.abs()
            down = a.floor()
            words = random_words(key, index, rows.numel(), p.device).view_as(rows)
            up = (words >> 1) < ((a - down) * 2.0**31).to(torch.int64)
            code = (down + up).clamp(max=self.top).copysign(v)
        code = torch.where(used[:, None], code, torch.zeros_like(code))
        q = code.to(torch.int8).view(-1)[: p.numel()]
        if self.bits == 4:
            nibbles = q.new_zeros(p.numel() + p.numel() % 2, dtype=torch.uint8)
            nibbles[: p.numel()] = q.view(torch.uint8) & 15
            q = nibbles[0::2] | nibbles[1::2] << 4
        return payload(scale, q)

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        start = 4 * num_blocks(numel, self.block)
        scale = payload[:start].view(torch.float32).repeat_interleave(self.block)[:numel]
        codes = payload[start:]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)
            code = (codes ^ 8).to(torch.float32) - 8
        else:
            code = codes.view(torch.int8).to(torch.float32)
        return code[:numel] * scale
