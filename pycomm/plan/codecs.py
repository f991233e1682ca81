"""Known properties of each codec: bytes, error, and how its payloads are combined.

Errors are relative squared errors of one coding of normally distributed values, 2^20 of them; rates
are of one core of a Xeon with AVX-512 on 4 MiB. ``tests/plan/test_plan_algorithms.py`` compares
bytes and errors with the codecs themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

from pycomm.arguments import guess
from pycomm.plan.cluster import CodecRates, Processor

Core = tuple[float, float, float, float]
Combine = Literal["exact", "recode", "gather"]


@dataclass(frozen=True)
class Coding:
    """Properties of a codec for the planner."""

    name: str
    """Name for ``pycomm.compress``; "none" is no codec."""
    payload: float
    """Bytes per value."""
    error: float
    """Relative squared error of one coding."""
    combine: Combine
    passes: float
    """Passes over memory that encoding takes on a device bound by memory."""
    core: Core = (0.0, 0.0, 0.0, 0.0)
    """GB/s of float32 on one core: encode, decode, decode_add, encode with feedback."""
    feedback: bool = True
    """True if `pycomm.compress` gives it error feedback."""
    spec: str = ""
    """The core's spec; empty: the core does not have this codec."""
    whole: bool = False
    """True if it encodes whole tensors, so it cannot be sent in segments."""

    @property
    def exact(self) -> bool:
        return self.combine == "exact"

    @property
    def total_error(self) -> float:
        """Relative squared error of an averaged gradient of ranks with independent values.

        Two codings with v each end at 2 v + v^2 for any number of ranks: the second one also codes
        the errors of the first. (A ring that coded again at each hop would end at v (n+1)/2 and
        more.)
        """
        return self.error * (2 + self.error) if self.combine == "recode" else self.error

    def rates(self, processor: Processor) -> CodecRates:
        """Return the rates on one core or device: measured, or else known, bounded by memory."""
        found = processor.rates.get(self.name)
        if found is not None:
            return found
        by_memory = CodecRates(
            encode=processor.memory * 4 / (4 + self.payload) / self.passes,
            decode=processor.memory * 4 / (4 + self.payload) / max(1.0, self.passes / 2),
            decode_add=processor.memory * 4 / (8 + self.payload) / max(1.0, self.passes / 2),
            encode_fed=processor.memory * 4 / (12 + self.payload) / self.passes,
        )
        if not processor.is_core or not self.core[0]:
            return by_memory
        encode, decode, decode_add, fed = (rate * 1e9 for rate in self.core)
        return CodecRates(
            encode=min(encode, by_memory.encode),
            decode=min(decode, by_memory.decode),
            decode_add=min(decode_add, processor.memory if self.whole else by_memory.decode_add),
            encode_fed=min(fed, by_memory.encode_fed),
        )


def _recode(name: str, payload: float, error: float, core: Core, spec: str) -> Coding:
    return Coding(name, payload, error, "recode", 1.0, core, spec=spec)


def _quant(bits: int, block: int, error: float, core: Core) -> Coding:
    spec = f"quant:bits={bits},block={block},rounding=nearest"
    return _recode(f"int{bits}", bits / 8 + 4 / block, error, core, spec)


def _eden(name: str, payload: float, error: float, core: Core, spec: str) -> Coding:
    return replace(_recode(name, payload, error, core, spec), passes=2.0, feedback=False)


_ALL = (
    Coding("none", 4.0, 0.0, "exact", 0.0),
    _recode("fp16", 2.0, 4.3e-8, (18.1, 19.8, 17.2, 8.1), "cast:dtype=float16"),
    _recode("bf16", 2.0, 2.76e-6, (17.3, 17.9, 18.9, 11.1), "cast:dtype=bfloat16"),
    _quant(8, 256, 4.86e-5, (25.3, 18.6, 20.5, 11.9)),
    _quant(4, 128, 1.38e-2, (20.0, 17.7, 17.4, 9.9)),
    _recode(
        "mxfp4",
        0.5 + 1 / 32,
        1.32e-2,
        (6.4, 11.9, 14.7, 6.1),
        "mx:format=fp4_e2m1,scale=floor",
    ),
    _eden(
        "eden:bits=2", 0.254, 0.133, (5.3, 6.1, 6.0, 5.3), "eden:bits=2,size=1024,scale=unbiased"
    ),
    _eden(
        "eden:bits=1", 0.129, 0.571, (5.4, 6.3, 8.2, 5.4), "eden:bits=1,size=1024,scale=unbiased"
    ),
    _recode("sign", 0.129, 0.363, (16.5, 22.9, 25.9, 8.5), "sign:block=1024"),
    Coding(
        "topk:0.01",
        0.08,
        0.915,
        "gather",
        4.0,
        (4.2, 22.3, 162.0, 3.6),
        spec="topk:density=0.01,values=float32,indices=int32",
        whole=True,
    ),
)
CODINGS: Mapping[str, Coding] = {coding.name: coding for coding in _ALL}
"""Codecs that are compared by default."""
NONE = CODINGS["none"]


_SHORT = {"eden2": "eden:bits=2", "eden1": "eden:bits=1", "drive": "eden:bits=1"}
_SHORT |= {"topk": "topk:0.01", "fp32": "none"}


def find(text: str) -> Coding:
    """Return the coding of a codec's name: one of `CODINGS`, or `topk:D`.

    Raises:
        ValueError: the codec is unknown; the text names the known ones.
    """
    name = _SHORT.get(text, text)
    family, _, option = name.partition(":")
    found = CODINGS.get(name)
    if found is None and family == "topk":
        found = _topk(option)
    if found is None:
        meant = guess(text, [*CODINGS, *_SHORT])
        names = ", ".join([*CODINGS, "topk:D"])
        raise ValueError(f"nothing is known of the codec {text!r}: {meant}use {names}")
    return found


def _topk(option: str) -> Coding | None:
    """Return top-k with a density: its error on normally distributed values follows from that."""
    try:
        density = float(option.removeprefix("density="))
    except ValueError:
        return None
    if not 0 < density <= 1:
        raise ValueError(f"topk:{option}: a density is above 0 and at most 1")
    normal, known = NormalDist(), CODINGS["topk:0.01"]
    tail = density / 2
    limit = -normal.inv_cdf(tail) if tail < 0.5 else 0.0
    kept = 2 * (limit * normal.pdf(limit) + tail)
    encode, decode, add, fed = known.core
    return replace(
        known,
        name=f"topk:{option}",
        payload=8 * density,
        error=1 - kept,
        core=(encode, decode, add * 0.01 / density, fed),  # only values sent are added
        spec=f"topk:density={density:g},values=float32,indices=int32",
    )
