"""ternary: -1, 0 or 1 times a scale that all ranks share, so contributions add as integers.

Wire format: docs/wire/ternary.md. TernGrad with a shared scaler: Wen et al., "TernGrad: Ternary
gradients to reduce communication in distributed deep learning" (NeurIPS 2017, sections 3 and 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import (
    NAN,
    TINY,
    check_block,
    num_blocks,
    pack_bits,
    padded,
    payload,
    split,
    unpack_bits,
)
from pycomm.codecs.philox import derived_seed, random_words

LIMIT = 2.0**120  # from this scale on, 127 * scale could overflow


@dataclass(frozen=True)
class Ternary(Codec):
    """Codes that hold the sum of ``ranks`` contributions, each of which is -1, 0 or 1."""

    name: ClassVar[str] = "ternary"
    combine: ClassVar[Combine] = "sum"
    wire_version: ClassVar[int] = 1

    ranks: int = 7
    block: int = 2048

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 127:
            raise ValueError(f"ternary: ranks={self.ranks}: use 1 to 127")
        check_block("ternary", self.block)

    @property
    def bits(self) -> int:
        """Bits of a code: enough for 2 * ranks + 1 integers."""
        return (2 * self.ranks).bit_length()

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def unbiased(self) -> bool:
        return True

    @property
    def granule(self) -> int:
        return self.block

    @property
    def needs_amax(self) -> bool:
        return True

    def check_ranks(self, key: RandomKey) -> None:
        """Raise ValueError unless a code can hold the sum of all ranks."""
        if key.ranks > self.ranks:
            raise ValueError(
                f"{self.spec()}: its codes hold no sum of {key.ranks} ranks: use ranks={key.ranks}"
            )

    def rank_seed(self, key: RandomKey) -> int:
        """Return the seed of a rank's rounding: ranks share ``key.seed``, not their rounding."""
        return derived_seed(key, 1 + key.rank)

    def encoded_bytes(self, numel: int) -> int:
        return 4 * num_blocks(numel, self.block) + padded(-(-numel * self.bits // 8))

    def reference_amax(self, p: torch.Tensor) -> torch.Tensor:
        amax = split(p, self.block).abs().amax(dim=1)
        return torch.where(amax.isfinite(), amax, torch.full_like(amax, torch.inf))

    def reference_encode(
        self, p: torch.Tensor, key: RandomKey, index: int, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, scale, used = self._scaled(p, key, amax)
        own = replace(key, seed=self.rank_seed(key))
        words = random_words(own, index, rows.numel(), p.device)
        chance = (words.view_as(rows) >> 8).to(torch.float32) * (scale * 2.0**-24)[:, None]
        away = (rows.abs() > chance).to(torch.int8)
        return self._coded(p.numel(), scale, used, torch.where(rows < 0, -away, away))

    def reference_encode_sum(
        self, p: torch.Tensor, key: RandomKey, index: int, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, scale, used = self._scaled(p, key, amax)
        unit = torch.where(used, scale, torch.ones_like(scale))[:, None].expand_as(rows)
        code = (rows / unit).clamp(-self.top, self.top).round()
        code = torch.where(rows.isnan(), torch.full_like(code, -self.top), code)
        return self._coded(p.numel(), scale, used, code.to(torch.int8))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        start = 4 * num_blocks(numel, self.block)
        scale = payload[:start].view(torch.float32).repeat_interleave(self.block)[:numel]
        code = unpack_bits(payload[start:], self.bits, numel).to(torch.int32)
        sign = 1 << (self.bits - 1)
        return ((code ^ sign) - sign).to(torch.float32) * scale

    def _scaled(
        self, p: torch.Tensor, key: RandomKey, amax: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows of one block each, and (scale, used) of each."""
        self.check_ranks(key)
        if amax is None:
            raise ValueError(
                f"{self.name}: it encodes by the amax of all ranks: pass the maximum of their "
                "codec.compute_amax(x) as amax="
            )
        used = (amax > TINY) & (amax < LIMIT)
        safe = torch.where(used, amax, torch.ones_like(amax))
        # The scale is rounded up to 8 significant bits.
        unit = ((safe.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
        nan = torch.full_like(amax, NAN, dtype=torch.int32).view(torch.float32)
        unused = torch.where(amax <= TINY, torch.zeros_like(amax), nan)
        return split(p, self.block), torch.where(used, unit, unused), used

    def _coded(
        self, numel: int, scale: torch.Tensor, used: torch.Tensor, code: torch.Tensor
    ) -> torch.Tensor:
        code = torch.where(used[:, None], code, torch.zeros_like(code)).view(torch.uint8)
        return payload(scale, pack_bits(code.view(-1)[:numel], self.bits))
