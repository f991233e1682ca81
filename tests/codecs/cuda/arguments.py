"""The arguments of the kernels that a call of a codec launches, without a GPU."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

import pycomm
from pycomm import _C
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.cuda.launches import Launch, decode_launches, encode_launches, recorded

NUMEL = 1 << 16  # many tiles: the first one is whole


class EncodeParams(ctypes.Structure):
    """A batch of one tensor: BatchHead, and the start of EncodeParams (csrc/codecs/base)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("count", "swapped", "blocks", "in")),
        *((name, ctypes.c_uint64) for name in ("residual", "new_residual", "scales", "codes")),
        *((name, ctypes.c_uint64) for name in ("payloads", "stride", "numel", "seed", "group")),
        *((name, ctypes.c_uint32) for name in ("step", "tensor", "block_bits", "options")),
        *(("ranks", ctypes.c_uint32), ("divisor", ctypes.c_float)),
    )


@cache
def arguments_of(spec: str, op: str) -> dict[str, bytes]:
    """Return the arguments of each kernel of a call, by the kernel's name.

    Args:
        spec: of the codec.
        op: ``encode`` and ``decode``; ``encode_feedback`` with a residual of bfloat16, or
            ``encode_feedback_float32`` of float32; ``own``, as the second, of the average of one
            contribution by 2. None of another call is known.
    """
    if op not in ("encode", "decode", "encode_feedback", "encode_feedback_float32", "own"):
        return {}
    codec = pycomm.codec(spec)
    x = torch.zeros(NUMEL)
    payload = torch.zeros(codec.encoded_bytes(NUMEL), dtype=torch.uint8)
    room = torch.zeros(codec.native.scratch_bytes(NUMEL) + 16, dtype=torch.uint8)
    if op == "decode":
        launches = decode_launches(codec, payload, x, room, add=False)
    elif op in ("encode", "encode_feedback_float32"):
        residual = None if op == "encode" else torch.zeros_like(x)
        args = EncodeArgs(x, payload, residual, residual, RandomKey(), 0)
        launches = encode_launches(codec, args, room)
    else:
        launches = _with_feedback(codec, x, payload)
        return {launch.kernel: _completed(launch, payload, op == "own") for launch in launches}
    return {launch.kernel: launch.params for launch in launches}


def _with_feedback(codec: Codec, x: torch.Tensor, payload: torch.Tensor) -> list[Launch]:
    old, fresh = (torch.zeros(NUMEL, dtype=torch.bfloat16) for _ in range(2))
    return recorded(
        lambda: codec.native.encode_fed(
            x.data_ptr(),
            x.numel(),
            payload.data_ptr(),
            kind=_C.FeedbackKind.residual,
            storage=_C.FeedbackStorage.bf16,
            decay=1.0,
            nesterov=False,
            error=(old.data_ptr(), fresh.data_ptr()),
            momentum=(0, 0),
            scratch=_C.FeedbackScratch(),
            stream=0,
            room=(0, 0),
        )
    )


def _completed(launch: Launch, payload: torch.Tensor, average: bool) -> bytes:
    """Return the arguments of an encode as the engine makes them: with a flag that says which
    residual is the old one; and as those of the average of a contribution."""
    arguments = bytearray(launch.params)
    params = EncodeParams.from_buffer(arguments)
    assert (params.count, params.numel, params.ranks) == (1, NUMEL, 0)
    params.swapped = payload.data_ptr()
    if average:
        params.payloads, params.stride = payload.data_ptr(), payload.numel()
        params.ranks, params.divisor = 1, 2.0
    return bytes(arguments)
