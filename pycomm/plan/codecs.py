"""What is known of each codec without running it: bytes, error, and how payloads meet.

Errors are relative squared errors of one coding of normally distributed values, 2^20 of them; rates
are of one core of a Xeon with AVX-512 on 4 MiB. ``tests/plan/test_plan_codecs.py`` holds bytes and
errors to the codecs themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pycomm.plan.cluster import Processor, Rates

Combine = Literal["exact", "recode", "gather", "sum", "factors"]


@dataclass(frozen=True)
class Coding:
    """A codec as a plan sees it."""

    name: str
    """as ``pycomm.compress`` takes it; "none" is no codec"""
    payload: float
    """bytes per value"""
    error: float
    """relative squared error of one coding"""
    combine: Combine
    passes: float
    """passes over memory that encoding takes on a device that memory holds back"""
    core: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """GB/s of float32 on one core: encode, decode, decode_add, encode with feedback"""
    feedback: bool = True
    """`pycomm.compress` gives it error feedback"""
    spec: str = ""
    """as the core has it; empty: the core has it not"""
    whole: bool = False
    """takes tensors whole, so it cannot be sent in segments"""
    note: str = ""

    @property
    def exact(self) -> bool:
        return self.combine == "exact"

    @property
    def codings(self) -> int:
        """How often a value is coded on its way, whatever the number of ranks."""
        return {"exact": 0, "recode": 2, "gather": 1, "sum": 1, "factors": 1}[self.combine]

    @property
    def total_error(self) -> float:
        """Relative squared error of an averaged gradient of ranks with independent values.

        Two codings with v each end at 2 v for any number of ranks. (A ring that coded again at
        each hop would end at v (n+1)/2, recursive halving at v (1 + log2(n)/2).)
        """
        return self.codings * self.error

    def rates(self, processor: Processor) -> Rates:
        """Of one core or device: measured ones, else known ones, bounded by its memory."""
        found = processor.rates.get(self.name)
        if found is not None:
            return found
        by_memory = Rates(
            encode=processor.memory * 4 / (4 + self.payload) / self.passes,
            decode=processor.memory * 4 / (4 + self.payload) / max(1.0, self.passes / 2),
            decode_add=processor.memory * 4 / (8 + self.payload) / max(1.0, self.passes / 2),
            encode_fed=processor.memory * 4 / (12 + self.payload) / self.passes,
        )
        if not processor.is_core or not self.core[0]:
            return by_memory
        encode, decode, decode_add, fed = (rate * 1e9 for rate in self.core)
        return Rates(
            encode=min(encode, by_memory.encode),
            decode=min(decode, by_memory.decode),
            decode_add=min(decode_add, processor.memory if self.whole else by_memory.decode_add),
            encode_fed=min(fed, by_memory.encode_fed),
        )


_ALL = (
    Coding("none", 4.0, 0.0, "exact", 0.0, note="exact"),
    Coding("fp16", 2.0, 4.3e-8, "recode", 1.0, (18.1, 19.8, 17.2, 8.1), spec="cast:dtype=float16"),
    Coding(
        "bf16", 2.0, 2.76e-6, "recode", 1.0, (17.3, 17.9, 18.9, 11.1), spec="cast:dtype=bfloat16"
    ),
    Coding(
        "int8",
        1 + 4 / 256,
        4.86e-5,
        "recode",
        1.0,
        (25.3, 18.6, 20.5, 11.9),
        spec="quant:bits=8,block=256,rounding=nearest",
    ),
    Coding(
        "int4",
        0.5 + 4 / 128,
        1.38e-2,
        "recode",
        1.0,
        (20.0, 17.7, 17.4, 9.9),
        spec="quant:bits=4,block=128,rounding=nearest",
    ),
    Coding(
        "mxfp4",
        0.5 + 1 / 32,
        1.32e-2,
        "recode",
        1.0,
        (6.4, 11.9, 14.7, 6.1),
        spec="mx:format=fp4_e2m1,scale=floor,rounding=nearest",
    ),
    Coding(
        "eden:bits=2",
        0.254,
        0.133,
        "recode",
        2.0,
        (5.3, 6.1, 6.0, 5.3),
        spec="eden:bits=2,size=1024,scale=unbiased",
        feedback=False,
        note="unbiased",
    ),
    Coding(
        "eden:bits=1",
        0.129,
        0.571,
        "recode",
        2.0,
        (5.4, 6.3, 8.2, 5.4),
        spec="eden:bits=1,size=1024,scale=unbiased",
        feedback=False,
        note="unbiased",
    ),
    Coding(
        "sign",
        0.129,
        0.363,
        "recode",
        1.0,
        (16.5, 22.9, 25.9, 8.5),
        spec="sign:block=1024",
        note="slower to converge",
    ),
    Coding(
        "topk:0.01",
        0.08,
        0.915,
        "gather",
        4.0,
        (4.2, 22.3, 162.0, 3.6),
        spec="topk:density=0.01,values=float32,indices=int32",
        whole=True,
        note="slower to converge",
    ),
    Coding(
        "randomk:every=100",
        0.04,
        0.99,
        "sum",
        1.0,
        (18.3, 18.1, 38.3, 6.7),
        spec="randomk:every=100,block=1,scale=none",
        note="slower to converge",
    ),
    # Factors of matrices of 1024 x 1024; two products with the gradient a step, and one back.
    Coding(
        "powersgd:4",
        4 * 4 * 2048 / 1024**2,
        0.98,
        "factors",
        4.0,
        (4.0, 8.0, 8.0, 3.0),
        whole=True,
        note="real gradients have less error: they are of low rank",
    ),
)
CODINGS: Mapping[str, Coding] = {coding.name: coding for coding in _ALL}
NONE = CODINGS["none"]
_SHORT = {"eden2": "eden:bits=2", "eden1": "eden:bits=1", "drive": "eden:bits=1"}
_SHORT |= {"topk": "topk:0.01", "randomk": "randomk:every=100", "powersgd": "powersgd:4"}


def find(text: str) -> Coding:
    """The coding of a codec's name.

    Raises:
        ValueError: nothing is known of it; the text names those that are.
    """
    found = CODINGS.get(_SHORT.get(text, text))
    if found is None:
        raise ValueError(f"nothing is known of the codec {text!r}: use {', '.join(CODINGS)}")
    return found
