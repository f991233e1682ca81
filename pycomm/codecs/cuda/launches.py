"""Launches of the CUDA kernels of csrc/codecs, as C++ describes them; needs no CUDA.

Each codec says in its own csrc/codecs/<name>.cpp which kernels a call launches, with which
arguments. `pycomm.codecs.cuda.nvrtc` compiles those kernels and starts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycomm import _C
from pycomm._C import Launch
from pycomm.codecs.args import EncodeArgs

__all__ = ["Launch", "decode_launches", "encode_launches", "make_scratch", "recorded"]


def recorded(call: Callable[[], object]) -> list[Launch]:
    """Return the launches of ``call``, in order; none of them is started."""
    return _C.recorded(call)[1]


def encode_launches(codec: Any, args: EncodeArgs, scratch: torch.Tensor) -> list[Launch]:
    """Return the launches that do ``Codec.encode``."""
    addresses, at = args.addresses(), scratch.data_ptr()
    return recorded(lambda: codec.native.encode(**addresses, stream=0, scratch=at))


def decode_launches(
    codec: Any, payload: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
) -> list[Launch]:
    """Return the launches that do ``Codec.decode`` or ``Codec.decode_add``."""
    decode = codec.native.decode_add if add else codec.native.decode
    return recorded(
        lambda: decode(
            payload.data_ptr(), out.data_ptr(), out.numel(), stream=0, scratch=scratch.data_ptr()
        )
    )


def make_scratch(codec: Any, x: torch.Tensor) -> torch.Tensor:
    """Return scratch memory for a call on ``x``, on its device.

    It may be freed right after the launches: torch reuses it in stream order.
    """
    count = codec.native.scratch_bytes(x.numel())
    return torch.empty(count, dtype=torch.uint8, device=x.device)
