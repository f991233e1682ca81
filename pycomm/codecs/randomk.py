"""randomk: one block out of ``every``, chosen by a key that all ranks share.

Wire format: docs/wire/randomk.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import NAN, num_blocks
from pycomm.codecs.philox import random_words

HEADER = struct.Struct("<QQII")  # seed, number of the first stretch, step, tensor


@dataclass(frozen=True)
class RandomK(Codec):
    """One block of each stretch of ``every`` blocks is sent; the key selects it."""

    name: ClassVar[str] = "randomk"
    combine: ClassVar[Combine] = "sum"
    wire_version: ClassVar[int] = 1

    every: int = 100
    block: int = 1
    scale: Literal["none", "unbiased"] = "none"

    def __post_init__(self) -> None:
        for option, value, most in (("every", self.every, 65536), ("block", self.block, 4096)):
            if not 1 <= value <= most:
                raise ValueError(f"randomk: {option}={value}: use 1 to {most}")
        if self.scale not in ("none", "unbiased"):
            raise ValueError(f"randomk: scale={self.scale}: use none or unbiased")

    @property
    def unbiased(self) -> bool:
        return self.scale == "unbiased"

    @property
    def granule(self) -> int:
        return self.every * self.block

    def encoded_bytes(self, numel: int) -> int:
        if numel == 0:
            return 0
        rest = min(numel % self.granule, self.block)
        return HEADER.size + 4 * (numel // self.granule * self.block + rest)

    def reference_encode(
        self, p: torch.Tensor, key: RandomKey, index: int, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._encode(p, key, index, self.scale == "unbiased")

    def reference_encode_sum(
        self, p: torch.Tensor, key: RandomKey, index: int, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._encode(p, key, index, False)

    def _encode(self, p: torch.Tensor, key: RandomKey, index: int, scales: bool) -> torch.Tensor:
        if p.numel() == 0:
            return p.new_empty(0, dtype=torch.uint8)
        first = index // self.granule
        rows = self._rows(p)
        chosen, blocks = self._choose(key, first, p.numel(), p.device)
        values = rows.view(len(rows), self.every, self.block)[
            torch.arange(len(rows), dtype=torch.int64, device=rows.device), chosen
        ]
        if scales:
            values = values * blocks.to(torch.float32)[:, None]
        bad = ~rows.isfinite().all(dim=1)
        values.view(torch.int32)[bad] = NAN
        header = HEADER.pack(key.seed, first, key.step, key.tensor)
        head = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(p.device)
        size = self.encoded_bytes(p.numel()) - HEADER.size
        return torch.cat((head, values.contiguous().view(torch.uint8).view(-1)[:size]))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, device=payload.device, dtype=torch.float32)
        rows, places = self._decode_rows(payload, numel)
        out = torch.zeros_like(rows)
        out[places] = rows[places]
        return out.view(-1)[:numel]

    def reference_decode_add(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel() > 0:
            rows, places = self._decode_rows(payload, out.numel())
            places = places.view(-1)[: out.numel()]
            out[places] += rows.view(-1)[: out.numel()][places]

    def _decode_rows(self, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values as rows of one stretch each, and a mask of the values sent (bool)."""
        seed, first, step, tensor = HEADER.unpack(bytes(payload[: HEADER.size].tolist()))
        count = num_blocks(numel, self.granule)
        values = payload.new_zeros(4 * count * self.block)
        values[: payload.numel() - HEADER.size] = payload[HEADER.size :]
        slots = values.view(torch.float32).view(count, self.block)
        chosen, _ = self._choose(RandomKey(seed, step, tensor), first, numel, payload.device)
        rows = slots.new_zeros(count, self.every, self.block)
        places = torch.zeros_like(rows, dtype=torch.bool)
        stretches = torch.arange(count, device=payload.device, dtype=torch.int64)
        rows[stretches, chosen], places[stretches, chosen] = slots, True
        bad = slots[:, 0].isnan()
        rows[bad], places[bad] = float("nan"), True
        return rows.view(count, -1), places.view(count, -1)

    def _choose(
        self, key: RandomKey, first: int, numel: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block chosen in each stretch, and the number of blocks there (int64)."""
        count = num_blocks(numel, self.granule)
        begin = first // 4 * 4
        words = random_words(key, begin, first - begin + count, device)[first - begin :]
        blocks = torch.full_like(words, self.every)
        blocks[-1] = num_blocks(numel - (count - 1) * self.granule, self.block)
        return (words * blocks) >> 32, blocks

    def _rows(self, p: torch.Tensor) -> torch.Tensor:
        """Return ``p`` as rows of one stretch each; zeros pad the last row."""
        rows = p.new_zeros(num_blocks(p.numel(), self.granule) * self.granule)
        rows[: p.numel()] = p
        return rows.view(-1, self.granule)
