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
from pycomm.codecs.philox import random_words, sampled_places

GROUP = 256  # chosen values that share a scale (float16, int8) or two levels (int2, bins2)
CHUNKS = {"int12": 4096, "int16": 65536, "bitmap": 65536}
VALUE_BITS = {"float32": 32, "float16": 16, "int8": 8, "int2": 2, "bins2": 2}
INDEX_BITS = {"int32": 32, "int16": 16, "int12": 12}
HEADER = 8  # bytes, of a payload of variable size: number of bytes used, number of values sent
SCALE_BYTES = {"float32": 0, "float16": 4, "int8": 4, "int2": 8, "bins2": 8}
BOUNDED = ("float16", "int8", "bins2")  # values that must be below 2^127


@dataclass(frozen=True)
class TopK(Codec):
    """The ceil(density * n) largest magnitudes of a tensor, or of each chunk of it."""

    name: ClassVar[str] = "topk"
    combine: ClassVar[Combine] = "gather"
    wire_version: ClassVar[int] = 2

    density: float = 0.01
    values: Literal["float32", "float16", "int8", "int2", "bins2"] = "float32"
    indices: Literal["auto", "int32", "int16", "int12", "bitmap"] = "auto"
    chunk: int = 0  # 0: by indices, 4096 for int12, 65536 for int16 and bitmap, else whole tensors
    sample: int = 0  # 0: exactly the largest; else a sample of one in so many sets a threshold

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ValueError(f"topk: density={self.density}: use more than 0 and at most 1")
        if self.values not in VALUE_BITS:
            raise ValueError(f"topk: values={self.values}: use one of {', '.join(VALUE_BITS)}")
        known = ("auto", *INDEX_BITS, "bitmap")
        if self.indices not in known:
            raise ValueError(f"topk: indices={self.indices}: use one of {', '.join(known)}")
        if self.chunk not in (0, 4096, 65536):
            raise ValueError(f"topk: chunk={self.chunk}: use 0 (whole tensors), 4096 or 65536")
        self._choose_indices()
        if not 0 <= self.sample <= 65536 or (self.sample and self.chunk):
            raise ValueError(
                f"topk: sample={self.sample}: use 0 (exactly the largest) or 1 to 65536, and no "
                "chunks"
            )

    def _choose_indices(self) -> None:
        given = self.chunk
        if self.indices == "auto":
            object.__setattr__(self, "indices", self._smallest())
        elif given == 0:
            object.__setattr__(self, "chunk", CHUNKS.get(self.indices, 0))
        if (self.indices == "int32" and given) or (self.indices == "int12" and self.chunk != 4096):
            raise ValueError(
                f"topk: indices={self.indices} with chunk={given}: int32 goes with chunk=0, int12 "
                "with 4096, int16 and bitmap with either chunk"
            )

    def _smallest(self) -> str:
        if self.chunk == 0:
            return "int32"
        form = "int12" if self.chunk == 4096 else "int16"
        return "bitmap" if self.density * INDEX_BITS[form] > 1 else form

    @property
    def granule(self) -> int:
        return self.chunk

    @property
    def variable(self) -> bool:
        return self.sample > 0

    def count(self, numel: int) -> int:
        """Return the number of values that are sent for a record of ``numel``.

        The product is exact, for the density as written: 0.07 of 100 values is 7, where the
        float64 product is above 7.
        """
        part, whole = _decimal(self.density)
        return max(1, min(numel, -(-part * numel // whole)))

    def most(self, numel: int) -> int:
        """Return the largest number of values that a sampled threshold may choose."""
        return min(numel, self.count(numel) + -(-self.count(numel) // 4))

    def least(self, numel: int) -> int:
        """Return the smallest number of values that a sampled threshold may choose."""
        return self.count(numel) - self.count(numel) // 4

    def sampled(self, numel: int) -> int:
        """Return the number of values in the sample; 0 without one."""
        return -(-numel // self.sample) if self.sample else 0

    def record_sizes(self, numel: int) -> list[int]:
        """Return the number of values of each record of a tensor."""
        length = self.chunk or max(numel, 1)
        sizes = [length] * (numel // length)
        return [*sizes, numel % length] if numel % length else sizes

    def encoded_bytes(self, numel: int) -> int:
        if numel == 0:
            return 0
        if self.variable:
            return HEADER + sum(self._sections(numel, self.most(numel)))
        length = self.chunk or numel
        whole, rest = numel // length, numel % length
        return whole * self._bytes(length) + (self._bytes(rest) if rest else 0)

    def _bytes(self, numel: int) -> int:
        return sum(self._sections(numel, self.count(numel)))

    def indices_at(self, numel: int) -> int:
        """Return the offset of the indices of a record of ``numel`` values."""
        return sum(self._sections(numel, self.count(numel))[:2])

    def _sections(self, numel: int, k: int) -> tuple[int, int, int]:
        """Return the bytes of scales, values and indices of a record that sends ``k`` values."""
        bits = numel if self.indices == "bitmap" else k * INDEX_BITS[self.indices]
        values = padded(-(-k * VALUE_BITS[self.values] // 8))
        return SCALE_BYTES[self.values] * -(-k // GROUP), values, padded(-(-bits // 8))

    # ------------------------------------------------------------------ encode

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        if p.numel() == 0:
            return p.new_empty(0, dtype=torch.uint8)
        if self.variable:
            k = self._sampled_count(p, key)
            record = self._encode_record(p, k)
            out = record.new_zeros(self.encoded_bytes(p.numel()))
            used = HEADER + record.numel()
            out[:HEADER].view(torch.int32).copy_(
                torch.tensor([used, k], dtype=torch.int64, device="cpu")
            )
            out[HEADER:used] = record
            return out
        records = torch.split(p, self.record_sizes(p.numel()))
        return torch.cat([self._encode_record(r, self.count(r.numel())) for r in records])

    def _sampled_count(self, p: torch.Tensor, key: RandomKey) -> int:
        """Return the number of values to send: those that reach the sample's k-th largest.

        The number asked for is returned if these are too few or too many; 1 for a void record.
        """
        if self._is_void(p):
            return 1
        n, m = p.numel(), self.sampled(p.numel())
        places = sampled_places(random_words(key, 0, m, p.device), n, self.sample)
        threshold = magnitudes(p[places]).sort(descending=True).values[self.count(m) - 1]
        k = int((magnitudes(p) >= threshold).sum())
        return k if self.least(n) <= k <= self.most(n) else self.count(n)

    def _is_void(self, p: torch.Tensor) -> bool:
        huge = HUGE if self.values in BOUNDED else float("inf")
        limit = torch.tensor([huge], device=p.device, dtype=torch.float32)
        return bool((magnitudes(p) >= magnitudes(limit)).any())

    def _encode_record(self, p: torch.Tensor, k: int) -> torch.Tensor:
        if self._is_void(p):
            return self._void(p, k)
        magnitude = magnitudes(p)
        places = magnitude.sort(descending=True, stable=True).indices[:k].sort().values
        chosen = p[places]
        if self.values == "float32":
            return payload(chosen, self._pack_indices(places, p.numel()))
        if self.values == "float16":
            scale, inv = half_scales(split(chosen, GROUP))
            code = (split(chosen, GROUP) * inv[:, None]).to(torch.float16).view(-1)[:k]
            return payload(scale, code, self._pack_indices(places, p.numel()))
        if self.values == "int8":
            rows = split(chosen, GROUP)
            scale, inv, _ = scales(rows, 127)
            code = (rows * inv[:, None]).round().to(torch.int8).view(-1)[:k]
            return payload(scale, code, self._pack_indices(places, p.numel()))
        a = chosen.abs()
        if self.values == "bins2":
            low, high, upper = bins(a)
        else:
            low = split_with(a, float("inf")).amin(1)
            high = split_with(a, 0.0).amax(1)
            group = torch.arange(k, device=p.device, dtype=torch.int64) // GROUP
            upper = a - low[group] > high[group] - a
        code = upper.to(torch.uint8) | chosen.signbit().to(torch.uint8) << 1
        levels = torch.stack((low, high), dim=1).view(-1)
        return payload(levels, pack_bits(code, 2), self._pack_indices(places, p.numel()))

    def _void(self, p: torch.Tensor, k: int) -> torch.Tensor:
        """Return the encoding of a record that holds Inf or NaN: it starts with NaN."""
        start, values, indices = self._sections(p.numel(), k)
        out = p.new_zeros(start + values + indices, dtype=torch.uint8)
        out[: 4 * k if self.values == "float32" else start].view(torch.int32).fill_(NAN)
        return out

    def _pack_indices(self, places: torch.Tensor, numel: int) -> torch.Tensor:
        if self.indices == "bitmap":
            marks = places.new_zeros(numel, dtype=torch.uint8)
            marks[places] = 1
            return pack_bits(marks, 1)
        if self.indices == "int12":
            halves = torch.stack((places & 63, places >> 6), dim=1).view(-1)
            return pack_bits(halves.to(torch.uint8), 6)
        size = INDEX_BITS[self.indices] // 8
        return places.view(torch.uint8).view(-1, 8)[:, :size].reshape(-1)  # little-endian

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
        if self.variable and numel > 0:
            used, k = payload[:HEADER].view(torch.int32).tolist()
            known = 1 <= k <= self.most(numel)
            if known and used == HEADER + sum(self._sections(numel, k)):
                yield self._record(payload[HEADER:used], numel, k)
            else:
                yield _void_values(numel, payload.device)
            return
        sizes = self.record_sizes(numel)
        parts = torch.split(payload, [self._bytes(size) for size in sizes])
        for part, size in zip(parts, sizes, strict=True):
            yield self._record(part, size, self.count(size))

    def _record(self, part: torch.Tensor, size: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and positions of one record of ``size`` values."""
        scale, code, index = torch.split(part, list(self._sections(size, k)))
        places = self._unpack_indices(index, k)
        value = self._values(scale, code, k)
        first = value if not len(scale) else scale.view(torch.float32)
        ascend = places.numel() == k and bool((places.diff() > 0).all())
        if not ascend or int(places[-1]) >= size or bool(first[0].isnan()):
            return _void_values(size, part.device)
        return value, places

    def _values(self, scale: torch.Tensor, code: torch.Tensor, k: int) -> torch.Tensor:
        if self.values == "float32":
            return code.view(torch.float32)
        group = torch.arange(k, device=code.device, dtype=torch.int64) // GROUP
        if self.values in ("float16", "int8"):
            wide = code.view(torch.float16 if self.values == "float16" else torch.int8)[:k]
            return wide.to(torch.float32) * scale.view(torch.float32)[group]
        bits = unpack_bits(code, 2, k).to(torch.int64)
        level = scale.view(torch.float32).view(-1, 2)[group, bits & 1]
        return torch.where(bits >> 1 > 0, -level, level)

    def _unpack_indices(self, index: torch.Tensor, k: int) -> torch.Tensor:
        if self.indices == "bitmap":
            return unpack_bits(index, 1, 8 * index.numel()).nonzero().view(-1)
        if self.indices == "int12":
            halves = unpack_bits(index, 6, 2 * k).to(torch.int64).view(-1, 2)
            return halves[:, 0] | halves[:, 1] << 6
        size = INDEX_BITS[self.indices] // 8
        wide = index.new_zeros(k, 8)
        wide[:, :size] = index[: k * size].view(k, size)
        return wide.view(torch.int64).view(-1)


def _void_values(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(size, device=device, dtype=torch.int64)
    return torch.full_like(places, float("nan"), dtype=torch.float32), places


@lru_cache(maxsize=256)
def _decimal(density: float) -> tuple[int, int]:
    """Return numerator and denominator of the shortest decimal that denotes the float64."""
    return Fraction(repr(float(density))).as_integer_ratio()


def half_scales(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each row of GROUP values as float16, and its inverse: powers of two.

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
    scale, inv = half_scales(split(a, GROUP))
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


def split_with(values: torch.Tensor, fill: float) -> torch.Tensor:
    """Return ``values`` as rows of GROUP; ``fill`` pads the last row."""
    rows = values.new_full((-(-values.numel() // GROUP) * GROUP,), fill)
    rows[: values.numel()] = values
    return rows.view(-1, GROUP)
