"""C++ names of the CUDA kernels of csrc/codecs, with template arguments; see kernels.

The values that a name depends on, such as the rows of a warp's tile, are here, too.
"""

from __future__ import annotations

from pycomm.codecs.base import Codec
from pycomm.codecs.cast import Cast
from pycomm.codecs.eden import Eden
from pycomm.codecs.implementations import Unavailable
from pycomm.codecs.mx import MX
from pycomm.codecs.quant import Quant
from pycomm.codecs.randomk import RandomK
from pycomm.codecs.rotate import Rotate
from pycomm.codecs.sign import Sign
from pycomm.codecs.ternary import Ternary

ROW = 128
SMALL, LARGE = 4, 16  # rows per tile: kSmall and kLarge of csrc/codecs/base/block_cuda.h

NAMESPACE = "pycomm::codecs"
TYPES = {
    "float32": "Float32",
    "float16": "Float16",
    "bfloat16": "BFloat16",
    "float8_e4m3": "Float8E4M3",
    "float8_e5m2": "Float8E5M2",
}


def amax_kernel(codec: Codec) -> str:
    """Return the kernel's C++ name."""
    assert isinstance(codec, Ternary)
    return f"{NAMESPACE}::ternary::measure_kernel<{block_rows(codec)}>"


def encode_kernel(codec: Codec, feedback: bool, summed: bool = False) -> str:
    """Return the kernel's C++ name."""
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
    if isinstance(codec, Quant) and not has_coder(codec):
        random = codec.rounding != "nearest"
        flags = f"{_bool(random)}, {_bool(feedback)}"
        return f"{NAMESPACE}::quant::encode_wide<{rows_of(codec)}, {flags}>"
    if coder := _coder(codec):
        return f"{NAMESPACE}::encode_blocks<{coder}, {rows_of(codec)}, {_bool(feedback)}>"
    return f"{NAMESPACE}::cast::encode_plain<{_plain(codec)}, {_bool(feedback)}>"


def decode_kernel(codec: Codec, add: bool) -> str:
    """Return the kernel's C++ name."""
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
    if isinstance(codec, Quant) and not has_coder(codec):
        return f"{NAMESPACE}::quant::decode_wide<{_bool(add)}>"
    if coder := _coder(codec, decode=True):
        return f"{NAMESPACE}::decode_blocks<{coder}, {_bool(add)}>"
    return f"{NAMESPACE}::cast::decode_plain<{_plain(codec)}, {_bool(add)}>"


def _rotated(inner: Codec, decode: bool = False) -> str:
    """Return the first template argument of rotate's kernels."""
    if isinstance(inner, Quant):
        random = inner.rounding != "nearest" and not decode
        return f"{NAMESPACE}::rotate::Quant<{_bool(random)}>"
    if isinstance(inner, Sign):
        return f"{NAMESPACE}::rotate::Sign"
    if coder := _coder(inner):
        return f"{NAMESPACE}::rotate::Blocks<{coder}>"
    return f"{NAMESPACE}::rotate::Plain<{_plain(inner)}>"


def _whole_and_half(codec: Eden) -> str:
    """Return the first template arguments of eden's kernels."""
    return f"{int(codec.bits)}, {_bool(codec.bits != int(codec.bits))}"


def _element(codec: MX) -> str:
    """Return the first template arguments of mx's kernels."""
    kind, bits = codec.format.split("_") if "_" in codec.format else ("fp4", "e2m1")
    small = f"Float{kind.removeprefix('fp')}{bits.upper()}"
    return f"pycomm::{small}, {_bool(codec.format == 'nvfp4')}"


def has_coder(codec: Quant) -> bool:
    """Return whether a quant format has kernels of its own; others share one (quant_cuda.h)."""
    around_zero = codec.range == "symmetric" and codec.scale == "float32"
    return codec.bits in (8, 4) and around_zero and codec.rounding != "correlated"


def _coder(codec: Codec, decode: bool = False) -> str:
    """Return the name of the Coder; empty for a codec without blocks."""
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


def block_of(codec: Codec) -> int:
    return codec.block if isinstance(codec, (Cast, MX, Quant, Sign, Ternary)) else 0


def rows_of(codec: Codec) -> int:
    if isinstance(codec, MX):
        return LARGE if codec.format == "nvfp4" else SMALL
    if isinstance(codec, Sign):
        return max(SMALL, codec.block // ROW)
    return SMALL if isinstance(codec, Ternary) else block_rows(codec)


def block_rows(codec: Codec) -> int:
    """Return the number of rows that hold whole blocks."""
    return SMALL if block_of(codec) <= SMALL * ROW else LARGE
