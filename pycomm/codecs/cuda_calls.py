"""Every launch of CUDA kernels that a codec's calls need, in order, on one stream.

Most codecs start one kernel (`cuda_kernels`); topk and lossless start several that share scratch
memory.
"""

from __future__ import annotations

import torch

from pycomm.codecs import cuda_kernels, cuda_lossless, cuda_topk
from pycomm.codecs.base import Codec, EncodeArgs
from pycomm.codecs.cuda_kernels import Call
from pycomm.codecs.lossless import Lossless
from pycomm.codecs.topk import TopK


def scratch_bytes(codec: Codec, numel: int) -> int:
    """Return how much scratch memory a call takes, as ``Codec::scratch_bytes`` in C++."""
    if isinstance(codec, TopK):
        return cuda_topk.scratch_bytes(codec, numel)
    return cuda_lossless.scratch_bytes(codec, numel) if isinstance(codec, Lossless) else 0


def encode_calls(codec: Codec, args: EncodeArgs, scratch: torch.Tensor) -> list[Call]:
    """Return the launches that do ``Codec.encode``."""
    if isinstance(codec, TopK):
        return cuda_topk.encode_calls(codec, args, scratch)
    if isinstance(codec, Lossless):
        return cuda_lossless.encode_calls(codec, args, scratch)
    return [cuda_kernels.encode_call(codec, args)]


def decode_calls(
    codec: Codec, payload: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
) -> list[Call]:
    """Return the launches that do ``Codec.decode`` or ``Codec.decode_add``."""
    if isinstance(codec, TopK):
        return cuda_topk.decode_calls(codec, payload, out, scratch, add=add)
    if isinstance(codec, Lossless):
        return cuda_lossless.decode_calls(codec, payload, out, scratch, add=add)
    return [cuda_kernels.decode_call(codec, payload, out, add=add)]


def make_scratch(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """Return scratch memory for a call on so many values, on their device.

    It may be freed right after the launches: torch hands it to others in the order of the stream.
    """
    return torch.empty(scratch_bytes(codec, x.numel()), dtype=torch.uint8, device=x.device)
