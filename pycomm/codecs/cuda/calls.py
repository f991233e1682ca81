"""Launches of the CUDA kernels that a codec's calls need, in order, on one stream.

Most codecs launch one kernel (`kernels`); topk and lossless launch several that share scratch
memory.
"""

from __future__ import annotations

import torch

from pycomm.codecs.args import EncodeArgs
from pycomm.codecs.base import Codec
from pycomm.codecs.cuda import kernels, lossless, topk
from pycomm.codecs.cuda.kernels import Call
from pycomm.codecs.lossless import Lossless
from pycomm.codecs.topk import TopK


def scratch_bytes(codec: Codec, numel: int) -> int:
    """Return the scratch memory that a call needs, as ``Codec::scratch_bytes`` in C++."""
    if isinstance(codec, TopK):
        return topk.scratch_bytes(codec, numel)
    return lossless.scratch_bytes(codec, numel) if isinstance(codec, Lossless) else 0


def encode_calls(codec: Codec, args: EncodeArgs, scratch: torch.Tensor) -> list[Call]:
    """Return the launches that do ``Codec.encode``."""
    if isinstance(codec, TopK):
        return topk.encode_calls(codec, args, scratch)
    if isinstance(codec, Lossless):
        return lossless.encode_calls(codec, args, scratch)
    return [kernels.encode_call(codec, args)]


def decode_calls(
    codec: Codec, payload: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
) -> list[Call]:
    """Return the launches that do ``Codec.decode`` or ``Codec.decode_add``."""
    if isinstance(codec, TopK):
        return topk.decode_calls(codec, payload, out, scratch, add=add)
    if isinstance(codec, Lossless):
        return lossless.decode_calls(codec, payload, out, scratch, add=add)
    return [kernels.decode_call(codec, payload, out, add=add)]


def make_scratch(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """Return scratch memory for a call on ``x``, on its device.

    It may be freed right after the launches: torch reuses it in stream order.
    """
    return torch.empty(scratch_bytes(codec, x.numel()), dtype=torch.uint8, device=x.device)
