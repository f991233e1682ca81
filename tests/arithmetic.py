"""Threads with other floating-point settings than IEEE 754's defaults."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

import torch

_LIBM = ctypes.CDLL("libm.so.6")
# The values of <fenv.h>; on Arm, up and down are swapped.
_ROUNDING = {"down": 0x400, "up": 0x800, "toward zero": 0xC00}
if platform.machine() == "aarch64":
    _ROUNDING = {"down": 0x800000, "up": 0x400000, "toward zero": 0xC00000}

KINDS = ["flush", *_ROUNDING]


@contextlib.contextmanager
def arithmetic(kind: str | None) -> Iterator[None]:
    """Apply one of KINDS to the calling thread, or nothing; check that the setting persists."""
    if kind is None:
        yield
        return
    if kind == "flush":
        assert torch.set_flush_denormal(True)
    else:
        assert _LIBM.fesetround(_ROUNDING[kind]) == 0
    try:
        yield
        assert is_set(kind), "the thread's arithmetic is no longer as it was"
    finally:
        _LIBM.fesetround(0)
        torch.set_flush_denormal(False)


def is_set(kind: str) -> bool:
    """Return whether the calling thread has this setting."""
    if kind == "flush":
        tiny = torch.tensor([1], dtype=torch.int32).view(torch.float32)
        return (tiny + tiny).view(torch.int32).item() == 0
    return _LIBM.fegetround() == _ROUNDING[kind]
