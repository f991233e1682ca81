"""topk: the values of largest magnitude, with their positions.

Wire format: docs/wire/topk.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Literal

import torch

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.block import (
    HUGE,
    INF,
    NAN,
    TINY,
    pack_bits,
    padded,
    payload,
    scales,
    split,
    unpack_bits,
)

GROUP = 256  # chosen values that share a scale (int8) or two levels (bins2)
CHUNK = 4096  # values of a record with int12 indices; the last of a tensor may be shorter
VALUE_BITS = {"float32": 32, "int8": 8, "bins2": 2}
INDEX_BITS = {"int32": 32, "int12": 12}
SCALE_BYTES = {"float32": 0, "int8": 4, "bins2": 8}


@dataclass(frozen=True)
class TopK(Codec):
    """The ceil(density * n) largest magnitudes of a tensor, or of each chunk of it.

    Args:
        density: share of the values that is sent, above 0 and at most 1.
        values: form of the values.
        indices: form of their positions; with ``int12`` the tensor is cut into chunks of 4096.
    """

    name: ClassVar[str] = "topk"
    combine: ClassVar[Combine] = "gather"
    wire_version: ClassVar[int] = 2

    density: float = 0.01
    values: Literal["float32", "int8", "bins2"] = "float32"
    indices: Literal["int32", "int12"] = "int32"

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"topk: density={self.density}: use more than 0 and at most 1")
        if self.values not in VALUE_BITS:
            raise ValueError(f"topk: values={self.values}: use one of {', '.join(VALUE_BITS)}")
        if self.indices not in INDEX_BITS:
            raise ValueError(f"topk: indices={self.indices}: use one of {', '.join(INDEX_BITS)}")

    @property
    def granule(self) -> int:
        return CHUNK if self.indices == "int12" else 0

    def count(self, numel: int) -> int:
        """Return the number of values that are sent for a record of ``numel``.

        The product is exact, for the density as written: 0.07 of 100 values is 7, where the
        float64 product is above 7.
        """
        part, whole = _decimal(self.density)
        return max(1, min(numel, -(-part * numel // whole)))

    def record_sizes(self, numel: int) -> list[int]:
        """Return the number of values of each record of a tensor."""
        length = self.granule or max(numel, 1)
        sizes = [length] * (numel // length)
        return [*sizes, numel % length] if numel % length else sizes

    def encoded_bytes(self, numel: int) -> int:
        if numel == 0:
            return 0
        length = self.granule or numel
        whole, rest = numel // length, numel % length
        return whole * self._bytes(length) + (self._bytes(rest) if rest else 0)

    def _bytes(self, numel: int) -> int:
        return sum(self._sections(self.count(numel)))

    def _sections(self, k: int) -> tuple[int, int, int]:
        """Return the bytes of scales, values and indices of a record that sends ``k`` values."""
        values = padded(-(-k * VALUE_BITS[self.values] // 8))
        indices = padded(-(-k * INDEX_BITS[self.indices] // 8))
        return SCALE_BYTES[self.values] * -(-k // GROUP), values, indices

    # ------------------------------------------------------------------ encode

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        if p.numel() == 0:
            return p.new_empty(0, dtype=torch.uint8)
        records = torch.split(p, self.record_sizes(p.numel()))
        return torch.cat([self._encode_record(r, self.count(r.numel())) for r in records])

    def _is_void(self, p: torch.Tensor) -> bool:
        huge = float("inf") if self.values == "float32" else HUGE
        limit = torch.tensor([huge], device=p.device, dtype=torch.float32)
        return bool((magnitudes(p) >= magnitudes(limit)).any())

    def _encode_record(self, p: torch.Tensor, k: int) -> torch.Tensor:
        if self._is_void(p):
            return self._void(p, k)
        magnitude = magnitudes(p)
        places = magnitude.sort(descending=True, stable=True).indices[:k].sort().values
        chosen = p[places]
        if self.values == "float32":
            return payload(chosen, self._pack_indices(places))
        if self.values == "int8":
            rows = split(chosen, GROUP)
            scale, inv, _ = scales(rows, 127)
            code = (rows * inv[:, None]).round().to(torch.int8).view(-1)[:k]
            return payload(scale, code, self._pack_indices(places))
        low, high, upper = bins(chosen.abs())
        code = upper.to(torch.uint8) | chosen.signbit().to(torch.uint8) << 1
        levels = torch.stack((low, high), dim=1).view(-1)
        return payload(levels, pack_bits(code, 2), self._pack_indices(places))

    def _void(self, p: torch.Tensor, k: int) -> torch.Tensor:
        """Return the encoding of a record that holds Inf or NaN: it starts with NaN."""
        start, values, indices = self._sections(k)
        out = p.new_zeros(start + values + indices, dtype=torch.uint8)
        out[: 4 * k if self.values == "float32" else start].view(torch.int32).fill_(NAN)
        return out

    def _pack_indices(self, places: torch.Tensor) -> torch.Tensor:
        if self.indices == "int12":
            halves = torch.stack((places & 63, places >> 6), dim=1).view(-1)
            return pack_bits(halves.to(torch.uint8), 6)
        return places.view(torch.uint8).view(-1, 8)[:, :4].reshape(-1)  # little-endian

    # ------------------------------------------------------------------ decode

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        out = torch.zeros(numel, dtype=torch.float32, device=payload.device)
        for (value, places), record in zip(
            self._records(payload, numel), torch.split(out, self.record_sizes(numel)), strict=True
        ):
            record[places] = value
        return out

    def reference_decode_add(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        for (value, places), record in zip(
            self._records(payload, out.numel()), torch.split(out, self.record_sizes(out.numel())),
            strict=True,
        ):  # fmt: skip
            record[places] += value

    def _records(
        self, payload: torch.Tensor, numel: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the values and positions of each record; a void one is NaN at every position."""
        sizes = self.record_sizes(numel)
        parts = torch.split(payload, [self._bytes(size) for size in sizes])
        for part, size in zip(parts, sizes, strict=True):
            yield self._record(part, size, self.count(size))

    def _record(self, part: torch.Tensor, size: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and positions of one record of ``size`` values."""
        scale, code, index = torch.split(part, list(self._sections(k)))
        places = self._unpack_indices(index, k)
        value = self._values(scale, code, k)
        first = value if not len(scale) else scale.view(torch.float32)
        ascend = bool((places.diff() > 0).all())
        if not ascend or int(places[-1]) >= size or bool(first[0].isnan()):
            return _void_values(size, part.device)
        return value, places

    def _values(self, scale: torch.Tensor, code: torch.Tensor, k: int) -> torch.Tensor:
        if self.values == "float32":
            return code.view(torch.float32)
        group = torch.arange(k, device=code.device, dtype=torch.int64) // GROUP
        if self.values == "int8":
            return code.view(torch.int8)[:k].to(torch.float32) * scale.view(torch.float32)[group]
        bits = unpack_bits(code, 2, k).to(torch.int64)
        level = scale.view(torch.float32).view(-1, 2)[group, bits & 1]
        return torch.where(bits >> 1 > 0, -level, level)

    def _unpack_indices(self, index: torch.Tensor, k: int) -> torch.Tensor:
        if self.indices == "int12":
            halves = unpack_bits(index, 6, 2 * k).to(torch.int64).view(-1, 2)
            return halves[:, 0] | halves[:, 1] << 6
        return index.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _void_values(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(size, device=device, dtype=torch.int64)
    return torch.full_like(places, float("nan"), dtype=torch.float32), places


@lru_cache(maxsize=256)
def _decimal(density: float) -> tuple[int, int]:
    """Return numerator and denominator of the shortest decimal that denotes the float64."""
    return Fraction(repr(float(density))).as_integer_ratio()


def bin_scales(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each row of GROUP values, and its inverse: powers of two.

    Multiplied by the inverse the largest magnitude of the row is at least 2^14 and below 2^15.
    """
    amax = rows.abs().amax(1)
    scale = (amax.view(torch.int32) & INF) - (14 << 23)
    inv = ((254 << 23) - scale).view(torch.float32)
    used = amax > TINY
    zero = torch.zeros_like(amax)
    return torch.where(used, scale.view(torch.float32), zero), torch.where(used, inv, zero)


def bins(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean magnitudes of each group's lower and upper bin, and who is in the upper.

    The bins are cut at the mean of all. An upper bin that is empty has the lower one's mean.
    """
    scale, inv = bin_scales(split(a, GROUP))
    group = torch.arange(a.numel(), device=a.device, dtype=torch.int64) // GROUP
    code = (a * inv[group]).round().to(torch.int64)

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(scale.numel()).index_add_(0, group, values)

    count, everything = total(torch.ones_like(code)), total(code)
    upper = code * count[group] > everything[group]
    n, upper_sum = total(upper.long()), total(code * upper)
    low = (everything - upper_sum).float() / (count - n).float() * scale
    high = torch.where(n > 0, upper_sum.float() / n.clamp(min=1).float() * scale, low)
    return low, high, upper


def magnitudes(p: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``|p|`` as int32, which order as the values do."""
    return p.view(torch.int32) & 0x7FFFFFFF
