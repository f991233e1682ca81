"""cast: float32 as a smaller float. Wire format: docs/wire/cast.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import check_block, num_blocks, padded, payload, scales, split

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
TOP = {"float8_e4m3": 448.0, "float8_e5m2": 57344.0}  # types with a scale per block
DEFAULT_BLOCK = 256
NAN = {"float32": 0x7FC00000, "float16": 0x7E00, "bfloat16": 0x7FC0}  # encoding of every NaN


@dataclass(frozen=True)
class Cast(Codec):
    """Each value as ``dtype``; the float8 types share one float32 scale per block."""

    name: ClassVar[str] = "cast"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 1

    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"] = "float16"
    block: int = 0  # float8 only; 0: 256 for float8, none for the others

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"cast: dtype={self.dtype}: use one of {', '.join(DTYPES)}")
        if self.dtype in TOP:
            if self.block == 0:
                object.__setattr__(self, "block", DEFAULT_BLOCK)
            check_block("cast", self.block)
        elif self.block != 0:
            raise ValueError(f"cast: {self.dtype} has no blocks; leave block={self.block} out")

    @property
    def granule(self) -> int:
        return self.block or 4 // DTYPES[self.dtype].itemsize

    def encoded_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + padded(numel * DTYPES[self.dtype].itemsize)

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        if not self.block:
            bits = torch.int16 if dtype.itemsize == 2 else torch.int32
            code = p.to(dtype).view(bits)
            return payload(torch.where(p.isnan(), torch.full_like(code, NAN[self.dtype]), code))
        rows = split(p, self.block)
        scale, inv, used = scales(rows, TOP[self.dtype])
        v = torch.where(used[:, None], rows * inv[:, None], torch.zeros_like(rows))
        return payload(scale, v.view(-1)[: p.numel()].to(dtype))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        dtype = DTYPES[self.dtype]
        start = self._scale_bytes(numel)
        value = payload[start : start + numel * dtype.itemsize].view(dtype).to(torch.float32)
        if not self.block:
            return value
        scale = payload[:start].view(torch.float32)
        return value * scale.repeat_interleave(self.block)[:numel]

    def _scale_bytes(self, numel: int) -> int:
        return 4 * num_blocks(numel, self.block) if self.block else 0
