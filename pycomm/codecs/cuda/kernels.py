"""Selection of the CUDA kernels of csrc/codecs and their arguments; needs no CUDA.

The C++ launchers (csrc/codecs/base/block_launch.h, cast.cu, randomk.cu) make the same choices.
`pycomm.codecs.cuda.nvrtc` launches the calls that are described here, in `topk` and in
`lossless`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from pycomm.codecs.args import EncodeArgs
from pycomm.codecs.base import Codec
from pycomm.codecs.block import num_blocks, padded
from pycomm.codecs.cuda.names import (
    ROW,
    SMALL,
    amax_kernel,
    block_of,
    block_rows,
    decode_kernel,
    encode_kernel,
    rows_of,
)
from pycomm.codecs.eden import Eden
from pycomm.codecs.mx import MX
from pycomm.codecs.quant import Quant
from pycomm.codecs.randomk import HEADER, RandomK
from pycomm.codecs.rotate import Rotate
from pycomm.codecs.rotation import HEADER as ROTATION_HEADER
from pycomm.codecs.ternary import Ternary

THREADS = 256  # kThreads of csrc/core/cuda_vector.h
WARPS = 8
LANES = 32
ROTATION_TILE = 1024  # kTile of csrc/codecs/base/rotation_cuda.h


class EncodeParams(ctypes.Structure):
    """The struct of the same name in csrc/codecs/base/block_cuda.h."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("new_residual", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("codes", ctypes.c_uint64),
        ("numel", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("group", ctypes.c_uint64),
        ("step", ctypes.c_uint32),
        ("tensor", ctypes.c_uint32),
        ("block_bits", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
        ("options", ctypes.c_uint32),
        ("amax", ctypes.c_uint64),
        ("header", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("rotation_bits", ctypes.c_uint32),
    )


class DecodeParams(ctypes.Structure):
    """The struct of the same name in csrc/codecs/base/block_cuda.h."""

    _fields_ = (
        ("scales", ctypes.c_uint64),
        ("codes", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("numel", ctypes.c_uint64),
        ("block_bits", ctypes.c_uint32),
        ("options", ctypes.c_uint32),
        ("header", ctypes.c_uint64),
        ("rotation_bits", ctypes.c_uint32),
        ("add", ctypes.c_uint32),
    )


Fields = Sequence[tuple[str, type[ctypes.c_uint64] | type[ctypes.c_uint32]]]


class StagedParams(ctypes.Structure):
    """The first fields of the structs of codecs with several kernels."""

    _fields_: ClassVar[Fields] = (
        ("x", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("new_residual", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("payload", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
        ("numel", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Call:
    """One launch: `blocks` blocks of THREADS threads, with the struct as the only argument."""

    source: str  # "quant": csrc/codecs/quant.cu
    kernel: str  # C++ name of the kernel, with its template arguments
    blocks: int
    params: ctypes.Structure


def encode_call(codec: Codec, args: EncodeArgs) -> Call:
    """Return the launch that does ``Codec.encode``."""
    if isinstance(codec, Ternary):
        codec.check_ranks(args.key)
    numel = args.x.numel()
    payload = args.out.data_ptr()
    feedback = args.residual is not None
    rotates = isinstance(codec, (Eden, Rotate))
    inner = _inner(codec)
    params = EncodeParams(
        x=args.x.data_ptr(),
        residual=0 if args.residual is None else args.residual.data_ptr(),
        new_residual=0 if args.new_residual is None else args.new_residual.data_ptr(),
        scales=payload + ROTATION_HEADER if rotates else payload,
        codes=payload + _codes_offset(codec, numel),
        numel=numel,
        seed=codec.rank_seed(args.key) if isinstance(codec, Ternary) else args.key.seed,
        group=args.index // (codec.granule if isinstance(codec, RandomK) else 4),
        step=args.key.step,
        tensor=args.key.tensor,
        block_bits=_block_bits(inner),
        shift=inner.shift(args.key) if isinstance(inner, Quant) else 0,
        options=_options(inner, args.summed),
        amax=0 if args.amax is None else args.amax.data_ptr(),
        header=payload,
        key=codec.sign_key(args.key) if isinstance(codec, (Eden, Rotate)) else 0,
        rotation_bits=_rotation_bits(codec),
    )
    kernel = encode_kernel(codec, feedback, args.summed)
    return Call(codec.name, kernel, _grid(_tile(codec), numel), params)


def amax_call(
    codec: Codec, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
) -> Call:
    """Return the launch that does ``Codec.compute_amax``."""
    numel = x.numel()
    params = EncodeParams(
        x=x.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        scales=out.data_ptr(),
        numel=numel,
        block_bits=_block_bits(codec),
    )
    return Call(codec.name, amax_kernel(codec), _grid(block_rows(codec) * ROW, numel), params)


def decode_call(codec: Codec, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> Call:
    """Return the launch that does ``Codec.decode`` or ``Codec.decode_add``."""
    numel = out.numel()
    inner = _inner(codec)
    rotates = isinstance(codec, (Eden, Rotate))
    params = DecodeParams(
        scales=payload.data_ptr() + (ROTATION_HEADER if rotates else 0),
        codes=payload.data_ptr() + _codes_offset(codec, numel),
        out=out.data_ptr(),
        numel=numel,
        block_bits=_block_bits(inner),
        options=_options(inner),
        header=payload.data_ptr(),
        rotation_bits=_rotation_bits(codec),
        add=add,
    )
    tile = _tile(codec) if isinstance(codec, (Eden, RandomK, Rotate)) else SMALL * ROW
    return Call(codec.name, decode_kernel(codec, add), _grid(tile, numel), params)


def _inner(codec: Codec) -> Codec:
    """Return the codec after the rotation, or the codec itself."""
    return codec.inner if isinstance(codec, Rotate) else codec


def _options(codec: Codec, summed: bool = False) -> int:
    """Return the options field: bits of the codec's .cu or quant_cuda.h; for mx, if scales ceil."""
    if isinstance(codec, RandomK):
        scales = codec.scale == "unbiased" and not summed
        return codec.every | codec.block << 17 | scales << 30
    if isinstance(codec, Ternary):
        return codec.bits
    if isinstance(codec, Eden):
        return int(codec.scale == "mmse")
    if isinstance(codec, MX):
        return int(codec.scale == "ceil")
    if not isinstance(codec, Quant):
        return 0
    return codec.bits | (codec.range == "minmax") << 8 | (codec.scale == "bfloat16") << 9


def _block_bits(codec: Codec) -> int:
    return max(block_of(codec), 1).bit_length() - 1


def _rotation_bits(codec: Codec) -> int:
    return codec.size.bit_length() - 1 if isinstance(codec, (Eden, Rotate)) else 0


def _tile(codec: Codec) -> int:
    """Return the number of values that a warp encodes."""
    if isinstance(codec, RandomK):
        lanes = min(1 << max(codec.granule // 4, 1).bit_length() - 1, LANES)
        return LANES // lanes * codec.granule
    if isinstance(codec, (Eden, Rotate)):
        return ROTATION_TILE
    return rows_of(codec) * ROW


def _codes_offset(codec: Codec, numel: int) -> int:
    if isinstance(codec, RandomK):
        return HEADER.size
    if isinstance(codec, Eden):
        return ROTATION_HEADER + 4 * num_blocks(numel, codec.size)
    if isinstance(codec, Rotate):
        rotated = num_blocks(numel, codec.size) * codec.size
        return ROTATION_HEADER + _codes_offset(codec.inner, rotated)
    if isinstance(codec, Quant):
        return padded(codec.scale_bytes(numel))
    if isinstance(codec, MX):
        return codec.sections(numel)[1]
    return 4 * num_blocks(numel, block_of(codec)) if block_of(codec) else 0


def _grid(tile: int, numel: int) -> int:
    return -(-numel // (WARPS * tile))
