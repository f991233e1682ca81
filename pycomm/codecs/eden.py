"""eden: half a bit to 8 bits per value, 64 to 4 times smaller than float32, unbiased.

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
from pycomm.codecs.block import (
    HUGE,
    NAN,
    TINY,
    add_halves,
    pack_bits,
    padded,
    payload,
    unpack_bits,
)
from pycomm.codecs.philox import derived_seed
from pycomm.codecs.rotation import HEADER, check_size, header, random_bits, rotate, unrotate

# Magnitudes of the Lloyd-Max levels of N(0, 1), and the thresholds between adjacent levels.
# fmt: off
LEVELS: dict[int, list[float]] = {
    0: [0.0],
    1: [0.7978846],
    2: [0.45278, 1.5104176],
    3: [0.2450942, 0.7560053, 1.3439093, 2.1519457],
    4: [0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896],
    5: [
        0.06588966, 0.19805183, 0.3313783, 0.4666995, 0.6049336, 0.7471357, 0.8945651, 1.0487833,
        1.2118044, 1.3863404, 1.576228, 1.7872332, 2.0287285, 2.3177395, 2.6911197, 3.2607324,
    ],
    6: [
        0.033409506, 0.10027829, 0.1672969, 0.23456699, 0.30219284, 0.37028265, 0.43894967,
        0.5083138, 0.578503, 0.6496556, 0.7219219, 0.7954677, 0.8704766, 0.94715494, 1.0257363,
        1.1064882, 1.1897202, 1.2757945, 1.365141, 1.4582764, 1.5558312, 1.6585889, 1.7675419,
        1.8839773, 2.0096111, 2.1468103, 2.2989812, 2.471305, 2.6722739, 2.9174068, 3.240437,
        3.7441013,
    ],
    7: [
        0.01682817, 0.050490864, 0.08417264, 0.11788628, 0.15164465, 0.18546072, 0.21934764,
        0.25331873, 0.28738755, 0.32156795, 0.35587403, 0.3903203, 0.42492166, 0.45969343,
        0.49465147, 0.5298122, 0.56519264, 0.6008105, 0.6366843, 0.6728333, 0.70927787, 0.74603915,
        0.78313965, 0.82060295, 0.8584542, 0.89671993, 0.9354285, 0.97461, 1.0142967, 1.0545232,
        1.0953267, 1.1367474, 1.1788286, 1.2216175, 1.2651651, 1.3095276, 1.3547662, 1.4009485,
        1.448149, 1.49645, 1.5459437, 1.5967331, 1.6489339, 1.702677, 1.7581115, 1.8154078,
        1.8747625, 1.9364046, 2.0006018, 2.0676715, 2.1379933, 2.2120275, 2.2903392, 2.3736343,
        2.4628115, 2.5590405, 2.6638865, 2.7795143, 2.9090471, 3.0572462, 3.231933, 3.4474304,
        3.7349367, 4.189694,
    ],
    8: [
        0.008446193, 0.025339384, 0.042234983, 0.059134603, 0.07603986, 0.092952356, 0.10987372,
        0.12680559, 0.14374956, 0.16070732, 0.17768049, 0.19467075, 0.21167976, 0.2287092,
        0.24576078, 0.26283622, 0.27993724, 0.2970656, 0.31422305, 0.3314114, 0.34863243, 0.365888,
        0.38317996, 0.40051022, 0.41788065, 0.4352932, 0.45274988, 0.47025266, 0.4878036,
        0.5054048, 0.5230583, 0.5407663, 0.55853105, 0.5763547, 0.5942396, 0.6121881, 0.6302026,
        0.6482855, 0.6664394, 0.68466675, 0.70297027, 0.72135264, 0.7398166, 0.75836504,
        0.77700084, 0.795727, 0.8145467, 0.833463, 0.8524793, 0.8715989, 0.8908253, 0.91016203,
        0.92961293, 0.9491818, 0.9688726, 0.98868936, 1.0086365, 1.0287182, 1.0489392, 1.0693042,
        1.0898181, 1.110486, 1.1313132, 1.1523054, 1.1734682, 1.1948076, 1.2163299, 1.2380418,
        1.2599499, 1.2820615, 1.304384, 1.3269253, 1.3496937, 1.3726976, 1.3959464, 1.4194493,
        1.4432166, 1.4672587, 1.491587, 1.5162132, 1.5411496, 1.5664098, 1.5920075, 1.6179578,
        1.6442765, 1.6709803, 1.6980875, 1.7256169, 1.7535894, 1.7820269, 1.8109531, 1.8403933,
        1.8703752, 1.900928, 1.9320842, 1.9638784, 1.9963485, 2.0295358, 2.0634851, 2.0982466,
        2.1338742, 2.1704283, 2.2079754, 2.24659, 2.2863545, 2.3273618, 2.3697171, 2.4135387,
        2.4589622, 2.5061426, 2.5552595, 2.6065214, 2.660174, 2.7165077, 2.7758706, 2.8386858,
        2.905473, 2.9768822, 3.053742, 3.1371326, 3.2285001, 3.3298485, 3.4440718, 3.575588,
        3.7316663, 3.9256377, 4.1865954, 4.6035357,
    ],
}
# fmt: on
BORDERS: dict[int, list[float]] = {
    0: [],
    1: [],
    2: [0.9815988],
    3: [0.5005497, 1.0499573, 1.7479275],
    4: [0.2582217, 0.5224037, 0.7995498, 1.0992858, 1.4371388, 1.8435318, 2.4008034],
}


def _between(levels: list[float]) -> list[float]:
    """Return what lies half way between neighbours, in float32."""
    at = torch.tensor(levels, dtype=torch.float32)
    halves: list[float] = ((at[:-1] + at[1:]) * 0.5).tolist()
    return halves


BORDERS |= {bits: _between(LEVELS[bits]) for bits in range(5, 9)}
WIDTHS = (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class Eden(Codec):
    """Rotations of ``size`` values, with a float32 scale each and the nearest level per value."""

    name: ClassVar[str] = "eden"
    combine: ClassVar[Combine] = "recode"
    wire_version: ClassVar[int] = 2

    bits: float = 2
    size: int = 1024
    scale: Literal["unbiased", "mmse"] = "unbiased"

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise ValueError(f"eden: bits={self.bits}: use 0.5, 1, 1.5, ... 4, 5, 6, 7 or 8")
        if float(self.bits).is_integer():
            object.__setattr__(self, "bits", int(self.bits))
        check_size("eden", self.size)
        if self.scale not in ("unbiased", "mmse"):
            raise ValueError(f"eden: scale={self.scale}: use unbiased or mmse")

    @property
    def unbiased(self) -> bool:
        return self.scale == "unbiased"

    @property
    def granule(self) -> int:
        return self.size

    def sign_key(self, key: RandomKey) -> int:
        """Return the key of the signs, with which a payload starts."""
        return derived_seed(key, 0)

    def encoded_bytes(self, numel: int) -> int:
        rotations = -(-numel // self.size)
        if rotations == 0:
            return 0
        return HEADER + 4 * rotations + padded(int(rotations * self.size * self.bits) // 8)

    def reference_encode(
        self, p: torch.Tensor, key: RandomKey, index: int, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        if p.numel() == 0:
            return p.new_empty(0, dtype=torch.uint8)
        head = header(key, index, p.device)
        y = rotate(p, head, self.size)
        amax = y.abs().amax(dim=1)
        used = (amax > TINY) & (amax < HUGE)
        # Scaled by the power of two that brings a rotation's largest magnitude into [1, 2).
        exponent = torch.where(used, amax, torch.ones_like(amax)).view(torch.int32) & 0x7F800000
        shrink = ((254 << 23) - exponent).view(torch.float32)
        u = torch.where(used[:, None], y * shrink[:, None], torch.zeros_like(y))
        energy = add_halves(u * u)
        inv = (torch.full_like(energy, self.size) / energy).sqrt()
        wide, narrow = self._parts(u, head)
        bits = int(self.bits)
        if narrow is None:
            code, value = _quantize(wide, inv, bits)
            along, square = value * wide, value * value
        else:
            code, value = _quantize(wide, inv, bits + 1)
            low, low_value = _quantize(narrow, inv, bits)
            code = low | code << bits
            along = value * wide + low_value * narrow
            square = value * value + low_value * low_value
        if self.scale == "mmse":
            ratio = add_halves(along) / add_halves(square)
        else:
            ratio = energy / add_halves(along)
        nan = torch.full_like(amax, NAN, dtype=torch.int32).view(torch.float32)
        unused = torch.where(amax <= TINY, torch.zeros_like(amax), nan)
        scale = torch.where(used, ratio * exponent.view(torch.float32), unused)
        code = torch.where(used[:, None], code, torch.zeros_like(code)).to(torch.uint8)
        unit_bits = bits if narrow is None else 2 * bits + 1
        return payload(head, scale, pack_bits(code.view(-1), unit_bits))

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        if numel == 0:
            return torch.empty(0, device=payload.device)
        rotations, head = -(-numel // self.size), payload[:HEADER]
        scale = payload[HEADER : HEADER + 4 * rotations].view(torch.float32)[:, None]
        data, bits = payload[HEADER + 4 * rotations :], int(self.bits)
        if bits == self.bits:
            code = unpack_bits(data, bits, rotations * self.size).view(rotations, -1)
            y = _dequantize(code, bits) * scale
        else:
            code = unpack_bits(data, 2 * bits + 1, rotations * self.size // 2).view(rotations, -1)
            wide, narrow = _dequantize(code >> bits, bits + 1), _dequantize(code, bits)
            second = self._second(rotations, head)
            wide, narrow = wide * scale, narrow * scale
            first = torch.where(second, narrow, wide)
            y = torch.cat((first, torch.where(second, wide, narrow)), dim=1)
        return unrotate(y, head, numel)

    def _second(self, rotations: int, head: torch.Tensor) -> torch.Tensor:
        """Return whether the second value of a pair has the extra bit: bool [rotations, size/2]."""
        bits = random_bits(head, rotations * self.size, stream=1).view(rotations, -1)
        return bits[:, : self.size // 2] == 1

    def _parts(
        self, u: torch.Tensor, head: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the values with most bits, and, for half bits, those with one less, or None."""
        if isinstance(self.bits, int):
            return u, None
        second = self._second(len(u), head)
        a, b = u[:, : self.size // 2], u[:, self.size // 2 :]
        return torch.where(second, b, a), torch.where(second, a, b)


def _quantize(u: torch.Tensor, inv: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (int32), a level's index with the sign on top, and the values they represent."""
    if bits == 0:
        return torch.zeros_like(u, dtype=torch.int32), torch.zeros_like(u)
    z = (u * inv[:, None]).abs()
    place = torch.zeros_like(u, dtype=torch.int32)
    for border in BORDERS[bits]:
        place += z >= torch.tensor(border, dtype=torch.float32, device=u.device)
    value = torch.tensor(LEVELS[bits], device=u.device)[place.long()]
    negative = u.signbit()
    return place | negative.to(torch.int32) << (bits - 1), torch.where(negative, -value, value)


def _dequantize(code: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values of the lowest ``bits`` bits of codes (uint8)."""
    if bits == 0:
        return torch.zeros_like(code, dtype=torch.float32)
    place = code & ((1 << (bits - 1)) - 1)
    value = torch.tensor(LEVELS[bits], device=code.device)[place.long()]
    return torch.where(code >> (bits - 1) & 1 == 1, -value, value)
