"""quant: block-wise integers of 2 to 8 bits, 3.9 (8 bits) to 13 (2 bits) times smaller.

Wire format: docs/wire/quant.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import (
    check_block,
    num_blocks,
    pack_bits,
    padded,
    payload,
    scales,
    split,
    unpack_bits,
)
from pycomm.codecs.philox import random_words

DEFAULT_BLOCK = {2: 64, 3: 64, 4: 128, 5: 128, 6: 256, 7: 256, 8: 256}


@dataclass(frozen=True)
class Quant(Codec):
    """Blocks with a grid of 2^bits - 1 values each, symmetric around zero."""

    name: ClassVar[str] = "quant"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 2

    bits: int = 8
    block: int = 0  # 0: DEFAULT_BLOCK
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.bits not in DEFAULT_BLOCK:
            raise ValueError(f"quant: bits={self.bits}: use 2 to 8")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"quant: rounding={self.rounding}: use nearest or stochastic")
        if self.block == 0:
            object.__setattr__(self, "block", DEFAULT_BLOCK[self.bits])
        check_block("quant", self.block)

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits - 1) - 1

    @property
    def granule(self) -> int:
        return self.block

    def scale_bytes(self, numel: int) -> int:
        """Return the bytes of the scales."""
        return 4 * num_blocks(numel, self.block)

    def encoded_bytes(self, numel: int) -> int:
        return self.scale_bytes(numel) + padded(-(-numel * self.bits // 8))

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        rows = split(p, self.block)
        unit, inv, used = scales(rows, self.top)
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
        codes = code.view(-1)[: p.numel()].to(torch.int16).to(torch.uint8)
        return payload(unit, pack_bits(codes, self.bits))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        end = self.scale_bytes(numel)
        codes = unpack_bits(payload[end:], self.bits, numel)
        sign = 1 << (self.bits - 1)
        code = (codes ^ sign).to(torch.float32) - sign
        return code * payload[:end].view(torch.float32).repeat_interleave(self.block)[:numel]
