"""Launches of lossless's CUDA kernels, in order, as in csrc/codecs/lossless.cu."""

from __future__ import annotations

import ctypes

import torch

from pycomm.codecs.args import EncodeArgs
from pycomm.codecs.block import num_blocks
from pycomm.codecs.cuda.kernels import WARPS, Call, StagedParams
from pycomm.codecs.cuda.names import NAMESPACE, ROW, SMALL
from pycomm.codecs.lossless import BLOCK, Lossless, padded16

# Constants of csrc/codecs/lossless.h and lossless_cuda.h.
SPAN = 32
TILE = SMALL * ROW


class LosslessParams(StagedParams):
    """The struct of the same name in csrc/codecs/lossless_cuda.h."""

    _fields_ = (("wide", ctypes.c_uint32),)


def scratch_bytes(codec: Lossless, numel: int) -> int:
    """Return the scratch memory that a call needs, as ``Codec::scratch_bytes`` in C++."""
    if numel == 0:
        return 0
    return 16 + padded16(8 * num_blocks(num_blocks(numel, BLOCK), SPAN)) + padded16(numel)


def encode_calls(codec: Lossless, args: EncodeArgs, scratch: torch.Tensor) -> list[Call]:
    """Return the launches that do ``Codec.encode``."""
    numel = args.x.numel()
    params = LosslessParams(
        x=args.x.data_ptr(),
        residual=0 if args.residual is None else args.residual.data_ptr(),
        new_residual=0 if args.new_residual is None else args.new_residual.data_ptr(),
        payload=args.out.data_ptr(),
        scratch=scratch.data_ptr(),
        numel=numel,
        wide=codec.dtype == "float32",
    )
    flag = "true" if args.residual is not None else "false"
    return [
        _call(f"head_kernel<{flag}>", numel, TILE, params),
        *_scan(numel, params),
        _call("pack_kernel", numel, TILE, params),
    ]


def decode_calls(
    codec: Lossless, payload: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
) -> list[Call]:
    """Return the launches that do ``Codec.decode`` or ``Codec.decode_add``."""
    numel = out.numel()
    params = LosslessParams(
        out=out.data_ptr(),
        payload=payload.data_ptr(),
        scratch=scratch.data_ptr(),
        numel=numel,
        wide=codec.dtype == "float32",
    )
    flag = "true" if add else "false"
    return [*_scan(numel, params), _call(f"decode_kernel<{flag}>", numel, TILE, params)]


def kernels(codec: Lossless) -> list[str]:
    """Return the names of all kernels that the codec may launch."""
    names = [f"{name}_kernel<{flag}>" for name in ("head", "decode") for flag in ("false", "true")]
    names += ["sum_kernel", "scan_kernel", "pack_kernel"]
    return [f"{NAMESPACE}::lossless::{name}" for name in names]


def _scan(numel: int, params: LosslessParams) -> list[Call]:
    """Return the launches that turn block heads into the blocks' positions in the stream."""
    return [
        _call("sum_kernel", num_blocks(numel, BLOCK), SPAN, params),
        _call("scan_kernel", min(numel, 1), 1, params),
    ]


def _call(kernel: str, size: int, tile: int, params: LosslessParams) -> Call:
    """Return one launch over ``size`` items, of which a warp takes ``tile``."""
    blocks = num_blocks(size, WARPS * tile)
    return Call("lossless", f"{NAMESPACE}::lossless::{kernel}", blocks, params)
