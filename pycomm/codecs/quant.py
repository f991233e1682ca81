"""quant: block-wise integers of 2 to 8 bits, 3.9 (8 bits) to 13 (2 bits) times smaller.

Wire format: docs/wire/quant.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import (
    HUGE,
    NAN,
    TINY,
    check_block,
    num_blocks,
    pack_bits,
    padded,
    payload,
    scales,
    split,
    unpack_bits,
)
from pycomm.codecs.philox import LOW, random_words

DEFAULT_BLOCK = {2: 64, 3: 64, 4: 128, 5: 128, 6: 256, 7: 256, 8: 256}
Rounding = Literal["nearest", "stochastic", "correlated"]
Range = Literal["symmetric", "minmax"]
ScaleType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Quant(Codec):
    """Blocks with a grid of 2^bits values each: symmetric around zero, or from the minimum up."""

    name: ClassVar[str] = "quant"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 2

    bits: int = 8
    block: int = 0  # 0: DEFAULT_BLOCK
    rounding: Rounding = "nearest"
    range: Range = "symmetric"
    scale: ScaleType = "float32"

    def __post_init__(self) -> None:
        if self.bits not in DEFAULT_BLOCK:
            raise ValueError(f"quant: bits={self.bits}: use 2 to 8")
        for option, choices in (("rounding", Rounding), ("range", Range), ("scale", ScaleType)):
            value, known = getattr(self, option), get_args(choices)
            if value not in known:
                listed = f"{', '.join(known[:-1])} or {known[-1]}"
                raise ValueError(f"quant: {option}={value}: use {listed}")
        if self.block == 0:
            object.__setattr__(self, "block", DEFAULT_BLOCK[self.bits])
        check_block("quant", self.block)

    def spec(self) -> str:
        """Return the canonical text; range and scale are included if they are not the default."""
        text = f"quant:bits={self.bits},block={self.block},rounding={self.rounding}"
        if self.range != "symmetric":
            text += f",range={self.range}"
        if self.scale != "float32":
            text += f",scale={self.scale}"
        return text

    @property
    def top(self) -> int:
        """The largest code."""
        return (1 << self.bits if self.range == "minmax" else 1 << self.bits - 1) - 1

    @property
    def granule(self) -> int:
        return self.block

    @property
    def shared_seed(self) -> bool:
        return self.rounding == "correlated"

    def shift(self, key: RandomKey) -> int:
        """Return the number that this rank adds to the shared random words."""
        return (1 << 32) // key.ranks * key.rank if self.rounding == "correlated" else 0

    def scale_bytes(self, numel: int) -> int:
        """Return the bytes of the scales, without the padding after them."""
        each = {"float32": 4, "bfloat16": 2}[self.scale]
        return num_blocks(numel, self.block) * each * (2 if self.range == "minmax" else 1)

    def encoded_bytes(self, numel: int) -> int:
        return padded(self.scale_bytes(numel)) + padded(-(-numel * self.bits // 8))

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        rows = split(p, self.block)
        if self.range == "symmetric":
            unit, inv, used = scales(rows, self.top)
            if self.scale == "bfloat16":
                unit = _bfloat16_above(unit)
                inv = torch.where(used, torch.ones_like(unit) / unit, inv)
            v = rows * inv[:, None]
            table = unit
        else:
            # Padding the last row with its own last value adds no extreme.
            rows.view(-1)[p.numel() :] = p[-1:]
            unit, inv, low, used = self._minmax(rows)
            v = (rows - low[:, None]) * inv[:, None]
            table = torch.stack((unit, low), dim=1).view(-1)
        if self.rounding == "nearest":
            code = v.round()  # ties to even
        else:
            a = v.abs()
            down = a.floor()
            words = random_words(key, index, rows.numel(), p.device).view_as(rows)
            words = (words + self.shift(key)) & LOW
            up = (words >> 1) < ((a - down) * 2.0**31).to(torch.int64)
            code = (down + up).clamp(max=self.top).copysign(v)
        code = torch.where(used[:, None], code, torch.zeros_like(code))
        codes = code.view(-1)[: p.numel()].to(torch.int16).to(torch.uint8)
        return payload(_stored(table, self.scale), pack_bits(codes, self.bits))

    def _minmax(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (unit, inverse unit, low, used) of each row, [blocks] each."""
        order = _order(rows.view(torch.int32))
        ends = torch.stack((order.amin(dim=1), order.amax(dim=1)))
        low, high = _order(ends).view(torch.float32)
        amax = torch.maximum(low.abs(), high.abs())
        used = amax < HUGE / 2  # False for NaN
        nan = torch.full_like(amax, NAN, dtype=torch.int32).view(torch.float32)
        zero = torch.zeros_like(amax)
        if self.scale == "bfloat16":
            low = _bfloat16_below(low)
        span = high - low
        unit = torch.where(span > TINY, span / torch.full_like(span, self.top), zero)
        if self.scale == "bfloat16":
            unit = _bfloat16_above(unit)
        inv = torch.where(unit > 0, torch.ones_like(unit) / unit, zero)
        # A block without a unit is sent as its value nearest to zero, or zero if it has both signs.
        top = _toward_zero(high) if self.scale == "bfloat16" else high
        next_to_zero = torch.where(high < 0, top, torch.where(low > 0, low, zero))
        low = torch.where(unit > 0, low, next_to_zero)
        return torch.where(used, unit, nan), inv, torch.where(used, low, nan), used

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        end = self.scale_bytes(numel)
        codes = unpack_bits(payload[padded(end) :], self.bits, numel)
        table = _loaded(payload[:end], self.scale)
        if self.range == "minmax":
            unit, low = table.view(-1, 2).repeat_interleave(self.block, dim=0)[:numel].unbind(1)
            return codes.to(torch.float32) * unit + low
        sign = 1 << (self.bits - 1)
        code = (codes ^ sign).to(torch.float32) - sign
        return code * table.repeat_interleave(self.block)[:numel]


def _order(bits: torch.Tensor) -> torch.Tensor:
    """Map the bits of floats to integers in the values' order, -0 below +0, and back."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def _bfloat16_above(x: torch.Tensor) -> torch.Tensor:
    """Return the least bfloat16, as float32, that is not less; ``x`` is >= 0, or NaN."""
    return (x.view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)


def _toward_zero(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest bfloat16, as float32, that is not further from zero."""
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


def _bfloat16_below(x: torch.Tensor) -> torch.Tensor:
    """Return the largest bfloat16, as float32, that is not greater."""
    bits = x.view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) & ~0xFFFF).view(torch.float32)


def _stored(table: torch.Tensor, scale: ScaleType) -> torch.Tensor:
    """Return scales in wire format; those of bfloat16 have no lower half."""
    return table if scale == "float32" else (table.view(torch.int32) >> 16).to(torch.int16)


def _loaded(data: torch.Tensor, scale: ScaleType) -> torch.Tensor:
    if scale == "float32":
        return data.view(torch.float32)
    return (data.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
