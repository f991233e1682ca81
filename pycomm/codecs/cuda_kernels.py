"""Which CUDA kernel of csrc/codecs does what, and with which arguments; no CUDA is needed here.

The C++ launchers (csrc/codecs/block_launch.h, cast.cu, randomk.cu) choose alike.
`pycomm.codecs.nvrtc` starts the calls that are described here, in `cuda_topk` and in
`cuda_lossless`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from pycomm._build import source_root
from pycomm.codecs.base import Codec, EncodeArgs
from pycomm.codecs.block import num_blocks, padded
from pycomm.codecs.cast import Cast
from pycomm.codecs.eden import Eden
from pycomm.codecs.implementations import Unavailable
from pycomm.codecs.mx import MX
from pycomm.codecs.quant import Quant
from pycomm.codecs.randomk import HEADER, RandomK
from pycomm.codecs.rotate import Rotate
from pycomm.codecs.rotation import HEADER as ROTATION_HEADER
from pycomm.codecs.sign import Sign
from pycomm.codecs.ternary import Ternary

THREADS = 256  # kThreads of csrc/core/cuda_vector.h
WARPS = 8
LANES = 32
ROW = 128
SMALL, LARGE = 4, 16  # rows per tile: kSmall and kLarge of csrc/codecs/block_cuda.h
ROTATION_TILE = 1024  # kTile of csrc/codecs/rotation_cuda.h

# -default-device: what has no mark is device code, since NVRTC compiles nothing else.
OPTIONS = ("-std=c++17", "-fmad=false", "-default-device")

# Codecs that have kernels: csrc/codecs/<name>.cu
SOURCES = (
    *("cast", "eden", "lossless", "mx", "quant", "randomk", "rotate", "sign", "ternary", "topk"),
)
NAMESPACE = "pycomm::codecs"
TYPES = {
    "float32": "Float32",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float8_e4m3": "Float8E4M3",
    "float8_e5m2": "Float8E5M2",
}


class EncodeParams(ctypes.Structure):
    """The struct of the same name in csrc/codecs/block_cuda.h."""

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
        ("agreed", ctypes.c_uint64),
        ("header", ctypes.c_uint64),
        ("key", ctypes.c_uint64),
        ("rotation_bits", ctypes.c_uint32),
    )


class DecodeParams(ctypes.Structure):
    """The struct of the same name in csrc/codecs/block_cuda.h."""

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


@dataclass(frozen=True)
class Call:
    """One launch: `blocks` blocks of THREADS threads; the only argument is the struct."""

    source: str  # "quant": csrc/codecs/quant.cu
    kernel: str  # name of the kernel in C++, with its template arguments
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
        agreed=0 if args.agreed is None else args.agreed.data_ptr(),
        header=payload,
        key=codec.sign_key(args.key) if isinstance(codec, (Eden, Rotate)) else 0,
        rotation_bits=_rotation_bits(codec),
    )
    kernel = encode_kernel(codec, feedback, args.summed)
    return Call(codec.name, kernel, _grid(_tile(codec), numel), params)


def measure_call(
    codec: Codec, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor
) -> Call:
    """Return the launch that does ``Codec.measure``."""
    numel = x.numel()
    params = EncodeParams(
        x=x.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        scales=out.data_ptr(),
        numel=numel,
        block_bits=_block_bits(codec),
    )
    return Call(codec.name, measure_kernel(codec), _grid(_block_rows(codec) * ROW, numel), params)


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


def measure_kernel(codec: Codec) -> str:
    """Return the kernel's name in C++."""
    assert isinstance(codec, Ternary)
    return f"{NAMESPACE}::ternary::measure_kernel<{_block_rows(codec)}>"


def encode_kernel(codec: Codec, feedback: bool, summed: bool = False) -> str:
    """Return the kernel's name in C++."""
    if isinstance(codec, Rotate):
        return f"{NAMESPACE}::rotate::encode_kernel<{_rotated(codec.inner)}>"
    if isinstance(codec, Eden):
        return f"{NAMESPACE}::eden::encode_kernel<{_whole_and_half(codec)}>"
    if isinstance(codec, Ternary):
        return f"{NAMESPACE}::ternary::encode_kernel<{_bool(summed)}, {_bool(feedback)}>"
    if isinstance(codec, Sign):
        return f"{NAMESPACE}::sign::encode_kernel<{codec.block}, {_bool(feedback)}>"
    if isinstance(codec, RandomK):
        return f"{NAMESPACE}::randomk::encode_kernel<{_bool(feedback)}>"
    if isinstance(codec, MX):
        flags = f"{_bool(codec.rounding == 'stochastic')}, {_bool(feedback)}"
        return f"{NAMESPACE}::mx::encode_kernel<{_element(codec)}, {flags}>"
    if isinstance(codec, Quant) and not _has_coder(codec):
        random = codec.rounding != "nearest"
        flags = f"{_bool(random)}, {_bool(feedback)}"
        return f"{NAMESPACE}::quant::encode_wide<{_rows(codec)}, {flags}>"
    if coder := _coder(codec):
        return f"{NAMESPACE}::encode_blocks<{coder}, {_rows(codec)}, {_bool(feedback)}>"
    return f"{NAMESPACE}::cast::encode_plain<{_plain(codec)}, {_bool(feedback)}>"


def decode_kernel(codec: Codec, add: bool) -> str:
    """Return the kernel's name in C++."""
    if isinstance(codec, Rotate):
        return f"{NAMESPACE}::rotate::decode_kernel<{_rotated(codec.inner, decode=True)}>"
    if isinstance(codec, Eden):
        return f"{NAMESPACE}::eden::decode_kernel<{_whole_and_half(codec)}>"
    if isinstance(codec, (Sign, Ternary)):
        return f"{NAMESPACE}::{codec.name}::decode_kernel<{_bool(add)}>"
    if isinstance(codec, RandomK):
        return f"{NAMESPACE}::randomk::decode_kernel<{_bool(add)}>"
    if isinstance(codec, MX):
        return f"{NAMESPACE}::mx::decode_kernel<{_element(codec)}, {_bool(add)}>"
    if isinstance(codec, Quant) and not _has_coder(codec):
        return f"{NAMESPACE}::quant::decode_wide<{_bool(add)}>"
    if coder := _coder(codec, decode=True):
        return f"{NAMESPACE}::decode_blocks<{coder}, {_bool(add)}>"
    return f"{NAMESPACE}::cast::decode_plain<{_plain(codec)}, {_bool(add)}>"


def _inner(codec: Codec) -> Codec:
    """The codec behind the rotation, or the codec itself."""
    return codec.inner if isinstance(codec, Rotate) else codec


def _rotated(inner: Codec, decode: bool = False) -> str:
    """The first template argument of the kernels of rotate."""
    if isinstance(inner, Quant):
        random = inner.rounding != "nearest" and not decode
        return f"{NAMESPACE}::rotate::Quant<{_bool(random)}>"
    if isinstance(inner, Sign):
        return f"{NAMESPACE}::rotate::Sign"
    if coder := _coder(inner):
        return f"{NAMESPACE}::rotate::Blocks<{coder}>"
    return f"{NAMESPACE}::rotate::Plain<{_plain(inner)}>"


def _whole_and_half(codec: Eden) -> str:
    """The first template arguments of the kernels of eden."""
    return f"{int(codec.bits)}, {_bool(codec.bits != int(codec.bits))}"


def _element(codec: MX) -> str:
    """The first template arguments of the kernels of mx."""
    kind, bits = codec.format.split("_") if "_" in codec.format else ("fp4", "e2m1")
    small = f"Float{kind.removeprefix('fp')}{bits.upper()}"
    return f"pycomm::{small}, {_bool(codec.format == 'nvfp4')}"


def _has_coder(codec: Quant) -> bool:
    """True of the formats of quant with kernels of their own; others share one (quant_cuda.h)."""
    around_zero = codec.range == "symmetric" and codec.scale == "float32"
    return codec.bits in (8, 4) and around_zero and codec.rounding != "correlated"


def _options(codec: Codec, summed: bool = False) -> int:
    """The field of the same name: of the codec's .cu or quant_cuda.h, or if mx rounds scales up."""
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


def _coder(codec: Codec, decode: bool = False) -> str:
    """Name of the Coder; empty for a codec without blocks."""
    if isinstance(codec, Quant):
        stochastic = codec.rounding == "stochastic" and not decode
        return f"{NAMESPACE}::quant::Coder<{codec.bits}, {_bool(stochastic)}>"
    if isinstance(codec, Cast):
        return f"{NAMESPACE}::cast::Coder<{_plain(codec)}>" if codec.block else ""
    raise Unavailable(f"{codec.spec()} has no CUDA kernels")


def _plain(codec: Codec) -> str:
    assert isinstance(codec, Cast)
    return f"{NAMESPACE}::cast::{TYPES[codec.dtype]}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _block(codec: Codec) -> int:
    return codec.block if isinstance(codec, (Cast, MX, Quant, Sign, Ternary)) else 0


def _block_bits(codec: Codec) -> int:
    return max(_block(codec), 1).bit_length() - 1


def _rotation_bits(codec: Codec) -> int:
    return codec.size.bit_length() - 1 if isinstance(codec, (Eden, Rotate)) else 0


def _rows(codec: Codec) -> int:
    if isinstance(codec, MX):
        return LARGE if codec.format == "nvfp4" else SMALL
    if isinstance(codec, Sign):
        return max(SMALL, codec.block // ROW)
    return SMALL if isinstance(codec, Ternary) else _block_rows(codec)


def _block_rows(codec: Codec) -> int:
    """Rows that hold whole blocks."""
    return SMALL if _block(codec) <= SMALL * ROW else LARGE


def _tile(codec: Codec) -> int:
    """Values that a warp encodes."""
    if isinstance(codec, RandomK):
        lanes = min(1 << max(codec.granule // 4, 1).bit_length() - 1, LANES)
        return LANES // lanes * codec.granule
    if isinstance(codec, (Eden, Rotate)):
        return ROTATION_TILE
    return _rows(codec) * ROW


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
    return 4 * num_blocks(numel, _block(codec)) if _block(codec) else 0


def _grid(tile: int, numel: int) -> int:
    return -(-numel // (WARPS * tile))


def include_folder() -> Path:
    """The folder of the C++ sources, which travel with the package."""
    return source_root() / "csrc"


def source(name: str) -> str:
    """Return the source to compile."""
    return f'#include "codecs/{name}.cu"\n'


def compile_options(arch: str | int) -> tuple[str, ...]:
    """Return all that NVRTC is told when it compiles a source for GPUs of ``arch``, such as 90."""
    return (*OPTIONS, f"-I{include_folder()}", f"-arch=sm_{arch}")
