"""Payloads that lie: decoders may give any values or an Error, and touch nothing else.

What an overrun would hit here is checked behind the values; `make asan` sees the rest.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from pycomm import _C
from pycomm.errors import Error

SPECS = [
    "cast:dtype=float8_e5m2",
    "quant:bits=3",
    "quant:bits=8,block=2048",
    "mx:format=fp6_e2m3",
    "mx:format=nvfp4",
    "sign:block=32",
    "topk:density=0.05",
    "topk:density=0.05,values=int8,indices=int12",
    "topk:density=0.3,values=bins2,indices=int12",
    "eden:bits=3,size=4096",
    "eden:bits=4,size=64",
    "lossless",
    "lossless:dtype=bfloat16",
]
NUMELS = [1, 33, 2047, 5001]
GUARD = 64
CANARY = np.float32(7.0)


def encoded(codec: _C.Codec, x: np.ndarray) -> np.ndarray:
    payload = np.zeros(codec.encoded_bytes(len(x)), np.uint8)
    codec.encode(x.ctypes.data, len(x), payload.ctypes.data)
    return payload


def lie(payload: np.ndarray, rng: np.random.Generator, how: int) -> None:
    """One bit, forty bytes, the first words, or everything."""
    if how == 0:
        payload[rng.integers(len(payload))] ^= 1 << rng.integers(8)
    elif how == 1:
        payload[rng.integers(len(payload), size=40)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF], 40)
    else:
        most = min(16, len(payload)) if how == 2 else len(payload)
        payload[:most] = rng.integers(256, size=most)


@pytest.mark.parametrize("spec", SPECS)
def test_decoders_stay_inside_whatever_a_payload_says(spec):
    codec, rng = _C.Codec(spec), np.random.default_rng(0)
    for numel in NUMELS:
        honest = encoded(codec, rng.standard_normal(numel, dtype=np.float32))
        out = np.full(numel + GUARD, CANARY)
        for turn in range(100):
            payload = honest.copy()
            lie(payload, rng, turn % 4)
            for decode in (codec.decode, codec.decode_add):
                with contextlib.suppress(Error):
                    decode(payload.ctypes.data, out.ctypes.data, numel)
            assert np.array_equal(out[numel:], np.full(GUARD, CANARY)), (numel, turn)
