"""toy: the upper half of each float32. Wire format: docs/wire/toy.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import padded


@dataclass(frozen=True)
class Toy(Codec):
    """Values lose their lower 16 bits."""

    name: ClassVar[str] = "toy"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 1

    @property
    def granule(self) -> int:
        return 2

    def encoded_bytes(self, numel: int) -> int:
        return padded(2 * numel)

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        code = p.contiguous().view(torch.int32).clone()
        code[p.isnan()] = 0x7FC00000
        halves = torch.zeros(self.encoded_bytes(p.numel()) // 2, dtype=torch.int16)
        halves[: p.numel()] = (code >> 16).to(torch.int16)
        return halves.view(torch.uint8)

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return (payload.view(torch.int16)[:numel].to(torch.int32) << 16).view(torch.float32)
