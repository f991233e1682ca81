"""topk: the values of largest magnitude, with their positions.

Wire format: docs/wire/topk.md.
"""

from __future__ import annotations

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

    def _shapes(self, numel: int) -> list[tuple[int, int]]:
        """Return the number of records of each length of a tensor, and the length."""
        length = self.granule or max(numel, 1)
        shapes = [(numel // length, length), (1, numel % length)]
        return [(records, n) for records, n in shapes if records and n]

    # ------------------------------------------------------------------ encode

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        shapes = self._shapes(p.numel())
        parts = torch.split(p, [records * n for records, n in shapes])
        coded = [
            self._encode_records(part.view(shape)).view(-1)
            for part, shape in zip(parts, shapes, strict=True)
        ]
        return torch.cat(coded) if coded else p.new_empty(0, dtype=torch.uint8)

    def _encode_records(self, p: torch.Tensor) -> torch.Tensor:
        """Return the bytes of each record, a row of ``p``."""
        k = self.count(p.shape[1])
        magnitude = magnitudes(p)
        places = magnitude.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(1).values
        coded = payload(*self._code(p.gather(1, places)), self._pack_indices(places))
        limit = torch.full_like(p[:1, :1], float("inf") if self.values == "float32" else HUGE)
        void = (magnitude >= magnitudes(limit)).any(dim=1, keepdim=True)
        return torch.where(void, self._void(coded[0], k), coded)

    def _code(self, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sections before the indices, of the values that each record sends."""
        records, k = chosen.shape
        if self.values == "float32":
            return (chosen,)
        padded_rows = chosen.new_zeros(records, -(-k // GROUP) * GROUP)
        padded_rows[:, :k] = chosen
        groups = padded_rows.view(-1, GROUP)
        if self.values == "int8":
            scale, inv, _ = scales(groups, 127)
            code = (groups * inv[:, None]).round().to(torch.int8).view(records, -1)[:, :k]
            return scale.view(records, -1), code
        places = torch.arange(padded_rows.shape[1], dtype=torch.int64, device=chosen.device)
        low, high, upper = bins(
            groups.abs(), (places < k).view(-1, GROUP).sum(dim=1).repeat(records)
        )
        code = chosen.signbit().to(torch.uint8) << 1 | upper.view(records, -1)[:, :k]
        return torch.stack((low, high), dim=1).view(records, -1), pack_bits(code, 2)

    def _void(self, like: torch.Tensor, k: int) -> torch.Tensor:
        """Return the encoding of a record that holds Inf or NaN: it starts with NaN."""
        out = torch.zeros_like(like)
        start = 4 * k if self.values == "float32" else self._sections(k)[0]
        out[:start].view(torch.int32).fill_(NAN)
        return out

    def _pack_indices(self, places: torch.Tensor) -> torch.Tensor:
        if self.indices == "int12":
            halves = torch.stack((places & 63, places >> 6), dim=2).flatten(1)
            return pack_bits(halves.to(torch.uint8), 6)
        return places.to(torch.int32).view(torch.uint8)  # little-endian

    # ------------------------------------------------------------------ decode

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        out = torch.zeros(numel, dtype=torch.float32, device=payload.device)
        self._put(payload, out, add=False)
        return out

    def reference_decode_add(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        self._put(payload, out, add=True)

    def _put(self, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
        """Put the values of all records in their places; one that is void is NaN everywhere."""
        shapes = self._shapes(out.numel())
        parts = torch.split(payload, [records * self._bytes(n) for records, n in shapes])
        into = torch.split(out, [records * n for records, n in shapes])
        for part, target, (records, n) in zip(parts, into, shapes, strict=True):
            value, places, void = self._decode_records(part.view(records, -1), n)
            rows = target.view(records, n)
            rows.scatter_(1, places, rows.gather(1, places) + value if add else value)
            rows.masked_fill_(void[:, None], float("nan"))

    def _decode_records(
        self, coded: torch.Tensor, n: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the values of records of ``n``, their places, and which records are void."""
        k = self.count(n)
        scale, code, index = torch.split(coded, list(self._sections(k)), dim=1)
        places = self._unpack_indices(index, k)
        value = self._values(scale.contiguous(), code.contiguous(), k)
        first = scale.contiguous().view(torch.float32) if scale.shape[1] else value
        fine = (places.diff(dim=1) > 0).all(dim=1) & (places[:, -1] < n) & ~first[:, 0].isnan()
        return value, places.clamp(max=n - 1), ~fine

    def _values(self, scale: torch.Tensor, code: torch.Tensor, k: int) -> torch.Tensor:
        if self.values == "float32":
            return code.view(torch.float32)
        group = torch.arange(k, device=code.device, dtype=torch.int64) // GROUP
        if self.values == "int8":
            whole = code.view(torch.int8)[:, :k].to(torch.float32)
            return whole * scale.view(torch.float32)[:, group]
        bits = unpack_bits(code, 2, k)
        low, high = scale.view(torch.float32).view(len(scale), -1, 2)[:, group].unbind(dim=2)
        level = torch.where(bits & 1 > 0, high, low)
        return torch.where(bits >> 1 > 0, -level, level)

    def _unpack_indices(self, index: torch.Tensor, k: int) -> torch.Tensor:
        if self.indices == "int12":
            halves = unpack_bits(index, 6, 2 * k).to(torch.int64).view(-1, k, 2)
            return halves[..., 0] | halves[..., 1] << 6
        return index.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


@lru_cache(maxsize=256)
def _decimal(density: float) -> tuple[int, int]:
    """Return numerator and denominator of the shortest decimal that denotes the float64."""
    return Fraction(repr(float(density))).as_integer_ratio()


def bin_scales(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale of each row of GROUP magnitudes, and its inverse: powers of two.

    Multiplied by the inverse the largest magnitude of the row is at least 2^14 and below 2^15.
    """
    amax = rows.amax(1)
    scale = (amax.view(torch.int32) & INF) - (14 << 23)
    inv = ((254 << 23) - scale).view(torch.float32)
    used = amax > TINY
    zero = torch.zeros_like(amax)
    return torch.where(used, scale.view(torch.float32), zero), torch.where(used, inv, zero)


def bins(
    groups: torch.Tensor, count: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean magnitudes of each group's lower and upper bin, and who is in the upper.

    The bins are cut at the mean of all. An upper bin that is empty has the lower one's mean.

    Args:
        groups: magnitudes, a group in each row; zeros follow the values of a short one.
        count: how many values each group has.
    """
    scale, inv = bin_scales(groups)
    code = (groups * inv[:, None]).round().to(torch.int64)
    everything = code.sum(dim=1)
    upper = code * count[:, None] > everything[:, None]
    n, upper_sum = upper.sum(dim=1), (code * upper).sum(dim=1)
    low = (everything - upper_sum).float() / (count - n).float() * scale
    high = torch.where(n > 0, upper_sum.float() / n.clamp(min=1).float() * scale, low)
    return low, high, upper


def magnitudes(p: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``|p|`` as int32, which order as the values do."""
    return p.view(torch.int32) & 0x7FFFFFFF
