"""eden: 1 to 4 bits per value, 31 to 8 times smaller than float32, unbiased.

Wire format: docs/wire/eden.md. Vargaftik et al., "DRIVE: One-bit distributed mean estimation"
(NeurIPS 2021) describes one bit; "EDEN: Communication-efficient and robust distributed mean
estimation for federated learning" (ICML 2022, algorithm 1) the other widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import add_halves, pack_bits, padded, payload, scales_of, unpack_bits
from pycomm.codecs.rotation import HEADER, SIZES, header, rotate, unrotate

# The levels of Lloyd-Max for N(0, 1), which are part of the wire format: magnitudes of those of 1
# to 4 bits, after an empty row; a sign takes one of the bits. csrc/codecs/eden.h has them, too.
# fmt: off
LEVELS: tuple[tuple[float, ...], ...] = (
    (),
    (0.7978846,),
    (0.45278, 1.5104176),
    (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    (0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
)
# fmt: on
# The thresholds between adjacent levels.
BORDERS: tuple[tuple[float, ...], ...] = (
    (),
    (),
    (0.9815988,),
    (0.5005497, 1.0499573, 1.7479275),
    (0.2582217, 0.5224037, 0.7995498, 1.0992858, 1.4371388, 1.8435318, 2.4008034),
)


@dataclass(frozen=True)
class Eden(Codec):
    """Rotations of ``size`` values, with a float32 scale each and the nearest level per value."""

    name: ClassVar[str] = "eden"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 2

    bits: int = 2
    size: int = 1024
    scale: Literal["unbiased", "mmse"] = "unbiased"

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 3, 4):
            raise ValueError(f"eden: bits={self.bits}: use 1, 2, 3 or 4")
        if self.size not in SIZES:
            raise ValueError(f"eden: size={self.size}: use one of {', '.join(map(str, SIZES))}")
        if self.scale not in ("unbiased", "mmse"):
            raise ValueError(f"eden: scale={self.scale}: use unbiased or mmse")

    @property
    def unbiased(self) -> bool:
        return self.scale == "unbiased"

    @property
    def granule(self) -> int:
        return self.size

    def encoded_bytes(self, numel: int) -> int:
        rotations = -(-numel // self.size)
        if rotations == 0:
            return 0
        return HEADER + 4 * rotations + padded(rotations * self.size * self.bits // 8)

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        if p.numel() == 0:
            return p.new_empty(0, dtype=torch.uint8)
        head = header(key, index, p.device)
        y = rotate(p, head, self.size)
        amax = y.abs().amax(dim=1)
        unused, _, used = scales_of(amax, 1.0)
        # Scaled by the power of two that brings a rotation's largest magnitude into [1, 2).
        exponent = torch.where(used, amax, torch.ones_like(amax)).view(torch.int32) & 0x7F800000
        shrink = ((254 << 23) - exponent).view(torch.float32)
        u = torch.where(used[:, None], y * shrink[:, None], torch.zeros_like(y))
        energy = add_halves(u * u)
        inv = (torch.full_like(energy, self.size) / energy).sqrt()
        code, value = _quantize(u, inv, self.bits)
        along, square = value * u, value * value
        if self.scale == "mmse":
            ratio = add_halves(along) / add_halves(square)
        else:
            ratio = energy / add_halves(along)
        scale = torch.where(used, ratio * exponent.view(torch.float32), unused)
        code = torch.where(used[:, None], code, torch.zeros_like(code)).to(torch.uint8)
        return payload(head, scale, pack_bits(code.view(-1), self.bits))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, device=payload.device, dtype=torch.float32)
        rotations, head = -(-numel // self.size), payload[:HEADER]
        scale = payload[HEADER : HEADER + 4 * rotations].view(torch.float32)[:, None]
        data = payload[HEADER + 4 * rotations :]
        code = unpack_bits(data, self.bits, rotations * self.size).view(rotations, -1)
        y = _dequantize(code, self.bits) * scale
        return unrotate(y, head, numel)


def _quantize(u: torch.Tensor, inv: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (int32), a level's index with the sign on top, and the values they represent."""
    z = (u * inv[:, None]).abs()
    place = torch.zeros_like(u, dtype=torch.int32)
    for border in BORDERS[bits]:
        place += z >= torch.tensor(border, dtype=torch.float32, device=u.device)
    value = torch.tensor(LEVELS[bits], device=u.device, dtype=torch.float32)[place.long()]
    negative = u.signbit()
    return place | negative.to(torch.int32) << (bits - 1), torch.where(negative, -value, value)


def _dequantize(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of the lowest ``bits`` bits of codes (uint8)."""
    place = code & ((1 << (bits - 1)) - 1)
    value = torch.tensor(LEVELS[bits], device=code.device, dtype=torch.float32)[place.long()]
    return torch.where(code >> (bits - 1) & 1 == 1, -value, value)
