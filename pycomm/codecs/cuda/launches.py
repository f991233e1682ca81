"""Launches of the CUDA kernels of csrc/codecs, as C++ describes them; needs no CUDA.

Each codec says in its own csrc/codecs/<name>.cpp which kernels a call launches, with which
arguments. `pycomm.codecs.cuda.nvrtc` compiles those kernels and starts them.
"""

from __future__ import annotations

from collections.abc import Callable

from pycomm import _C
from pycomm._C import Launch

__all__ = ["Launch", "recorded"]


def recorded(call: Callable[[], object]) -> list[Launch]:
    """Return the launches of ``call``, in order; none of them is started."""
    return _C.recorded(call)[1]
