"""mx: OCP's microscaling floats (MXFP8, MXFP6, MXFP4) and NVFP4, 3.9 to 7.5 times smaller.

Wire format: docs/wire/mx.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import (
    HUGE,
    num_blocks,
    pack_bits,
    padded,
    payload,
    scales,
    split,
    unpack_bits,
)

SUPER_BLOCK = 2048  # values that share the float32 scale of nvfp4


class Element(NamedTuple):
    """A small float: a sign, ``exponent`` bits and ``mantissa`` bits."""

    exponent: int
    mantissa: int
    top: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def least(self) -> int:
        """Exponent of the smallest normal number; subnormals have the same step."""
        return 2 - (1 << (self.exponent - 1))


E4M3 = Element(4, 3, 448.0)
ELEMENTS = {
    "fp8_e4m3": E4M3,
    "fp8_e5m2": Element(5, 2, 57344.0),
    "fp6_e2m3": Element(2, 3, 7.5),
    "fp6_e3m2": Element(3, 2, 28.0),
    "fp4_e2m1": Element(2, 1, 6.0),
    "nvfp4": Element(2, 1, 6.0),
}


@dataclass(frozen=True)
class MX(Codec):
    """Small floats with a one-byte scale for 32 values (nvfp4: 16)."""

    name: ClassVar[str] = "mx"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 2

    format: Literal["fp8_e4m3", "fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "nvfp4"] = (
        "fp8_e4m3"
    )
    scale: Literal["floor", "ceil", ""] = ""  # "": floor; nvfp4 has no choice

    def __post_init__(self) -> None:
        if self.format not in ELEMENTS:
            raise ValueError(f"mx: format={self.format}: use one of {', '.join(ELEMENTS)}")
        if self.format == "nvfp4":
            if self.scale:
                raise ValueError(f"mx: nvfp4 has one rule for scales; leave scale={self.scale} out")
            return
        if not self.scale:
            object.__setattr__(self, "scale", "floor")
        if self.scale not in ("floor", "ceil"):
            raise ValueError(f"mx: scale={self.scale}: use floor or ceil")

    @property
    def element(self) -> Element:
        return ELEMENTS[self.format]

    @property
    def block(self) -> int:
        """Number of values that share a scale."""
        return 16 if self.format == "nvfp4" else 32

    @property
    def granule(self) -> int:
        return SUPER_BLOCK if self.format == "nvfp4" else self.block

    def sections(self, numel: int) -> tuple[int, int]:
        """Return the byte offsets of the scales and of the codes."""
        scales_at = 4 * num_blocks(numel, SUPER_BLOCK) if self.format == "nvfp4" else 0
        return scales_at, scales_at + padded(num_blocks(numel, self.block))

    def encoded_bytes(self, numel: int) -> int:
        return self.sections(numel)[1] + padded(-(-numel * self.element.bits // 8))

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        first, v = self._scaled(p)
        code = _encode(v, self.element)
        return payload(*first, pack_bits(code.view(-1)[: p.numel()], self.element.bits))

    def _scaled(self, p: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the scale sections, and the values divided by scale: float32 [blocks, ...]."""
        rows = split(p, self.granule)
        blocks = rows.view(-1, self.block)
        amax = blocks.abs().amax(dim=1)
        if self.format == "nvfp4":
            sup, scale, inv = self._nv_scales(rows, amax)
            first = [sup, scale[: num_blocks(p.numel(), self.block)]]
        else:
            scale, inv = self._scales(amax)
            first = [scale]
        # A block without an inverse scale is sent as zeros or as NaN.
        return first, torch.where(inv[:, None] > 0, blocks * inv[:, None], torch.zeros_like(blocks))

    def _scales(self, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the E8M0 codes (uint8) and the inverse scales of blocks."""
        bits = amax.view(torch.int32)
        (top,) = struct.unpack("<i", struct.pack("<f", self.element.top))
        exponent = bits >> 23
        if self.scale == "ceil":
            exponent = exponent + ((bits & 0x7FFFFF) > (top & 0x7FFFFF))
        used = amax < HUGE  # False for NaN
        code = torch.where(used, (exponent - (top >> 23) + 127).clamp(min=0), 255)
        inv = torch.where(used, 254 - code << 23, 0).to(torch.int32).view(torch.float32)
        return code.to(torch.uint8), inv

    def _nv_scales(self, rows: torch.Tensor, amax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the scales of super-blocks, and codes (uint8) and inverse scales of blocks."""
        top = rows.abs().amax(dim=1)
        sup, _, used = scales(rows, E4M3.top * self.element.top)
        factor = torch.full_like(top, E4M3.top) / torch.where(used, top, torch.ones_like(top))
        each = SUPER_BLOCK // self.block
        v = amax.view(-1, each) * factor[:, None]
        v = torch.where(used[:, None], v, torch.zeros_like(v))
        code = _encode(v, E4M3)
        scale = (_decode(code, E4M3) * sup[:, None]).view(-1)
        inv = torch.where(scale > 0, torch.ones_like(scale) / scale, torch.zeros_like(scale))
        return sup, code.view(-1), inv

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        scales_at, codes_at = self.sections(numel)
        code = payload[scales_at : scales_at + num_blocks(numel, self.block)]
        if self.format == "nvfp4":
            sup = payload[:scales_at].view(torch.float32)
            each = SUPER_BLOCK // self.block
            scale = _decode(code, E4M3) * sup.repeat_interleave(each)[: code.numel()]
        else:
            word = code.to(torch.int32)
            bits = torch.where(word == 0, 1 << 22, word << 23)
            scale = torch.where(word == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
        codes = unpack_bits(payload[codes_at:], self.element.bits, numel)
        return _decode(codes, self.element) * scale.repeat_interleave(self.block)[:numel]


def _encode(v: torch.Tensor, to: Element) -> torch.Tensor:
    """Return the codes (uint8) of ``v``: saturating, to nearest even."""
    a = v.abs().clamp(max=to.top)
    exponent = ((a.view(torch.int32) >> 23) - 127).clamp(min=to.least)
    step = (exponent - to.mantissa + 127 << 23).view(torch.float32)
    steps = (a / step).round()  # ties to even; the division is exact: the step is a power of two
    code = steps.to(torch.int32) + (exponent - to.least << to.mantissa)
    return (code | torch.signbit(v).to(torch.int32) << to.bits - 1).to(torch.uint8)


def _decode(code: torch.Tensor, of: Element) -> torch.Tensor:
    """Return the values (float32) of codes (uint8)."""
    values = []
    for magnitude in range(1 << of.bits - 1):
        exponent, mantissa = magnitude >> of.mantissa, magnitude & (1 << of.mantissa) - 1
        normal = 1 << of.mantissa if exponent else 0
        values.append((normal + mantissa) * 2.0 ** (max(exponent, 1) - 1 + of.least - of.mantissa))
    # Two of these formats have codes that are no numbers: e4m3 the last one, e5m2 four.
    last = values.index(of.top) + 1
    rest = len(values) - last
    values[last:] = [float("inf")] * (rest > 1) + [float("nan")] * (rest - (rest > 1))
    table = torch.tensor(values + [-value for value in values], dtype=torch.float32, device="cpu")
    return table.to(code.device)[code.to(torch.int64)]
