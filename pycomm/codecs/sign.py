"""sign: one bit per value, 31 times smaller than float32.

Wire format: docs/wire/sign.md. With error feedback this is EF-signSGD (Karimireddy et al., "Error
feedback fixes signSGD and other gradient compression schemes", ICML 2019, algorithm 1), block-wise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import check_block, mean_scales, num_blocks, padded, payload, split


@dataclass(frozen=True)
class Sign(Codec):
    """Each block shares one float32 scale, the mean of its magnitudes."""

    name: ClassVar[str] = "sign"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 1

    block: int = 1024

    def __post_init__(self) -> None:
        check_block("sign", self.block)

    @property
    def granule(self) -> int:
        return self.block

    def encoded_bytes(self, numel: int) -> int:
        return 4 * num_blocks(numel, self.block) + padded(-(-numel // 8))

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        rows = split(p, self.block)
        scale, used = mean_scales(rows, p.numel())
        negative = ((rows < 0) & used[:, None]).view(-1, 8).to(torch.int32)
        places = torch.arange(8, dtype=torch.int32, device=p.device)
        code = (negative << places).sum(dim=1).to(torch.uint8)
        return payload(scale, code[: -(-p.numel() // 8)])

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        start = 4 * num_blocks(numel, self.block)
        scale = payload[:start].view(torch.float32).repeat_interleave(self.block)[:numel]
        places = torch.arange(8, dtype=torch.uint8, device=payload.device)
        bit = (payload[start:, None] >> places & 1).view(-1)[:numel]
        return torch.where(bit == 1, -scale, scale)
