"""Pieces of a bucket for the communicator's coded collectives, and their conversion for C++."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pycomm import _C
from pycomm.arrays import span
from pycomm.errors import Error


@dataclass(frozen=True)
class Piece:
    """A part of a bucket with a codec and feedback of its own, such as one parameter's gradient."""

    numel: int
    """number of elements; the pieces of a bucket follow each other without gaps"""
    codec: Any
    """a codec's name, such as "int4" or "quant:bits=4,block=64", or a :class:`pycomm.codecs.Codec`
    """
    tensor: int = 0
    """number of the parameter, equal on all ranks: it selects the random numbers of rounding"""
    residual: Any = None
    """float32 [numel], read and written: error of what this rank sends; for
    :meth:`Communicator.reduce_scatter_coded` [size, numel]"""
    owner_residual: Any = None
    """float32 [numel]: error of what this rank sends back for the elements that it owns. All ranks
    have such residuals or none has: else all get a WireMismatch"""


def listed(data: Any, numel: int, codec: Any, residual: Any) -> list[Piece]:
    """Return a piece for each array of a list, or for one array, with one codec and residuals.

    Args:
        data: the arrays.
        numel: number of their values.
        codec: the codec of all.
        residual: of each array one, or one array for all; None: no feedback.

    Raises:
        Error: the codec is a list of pieces, which have their own residuals, or the residuals do
            not fit.
    """
    if isinstance(codec, Sequence) and not isinstance(codec, str):
        raise Error(
            "all_reduce_coded: pieces name their own residuals, and cover one array: leave out "
            "residual=, and pass one array; or pass one codec for all"
        )
    arrays = data if isinstance(data, list | tuple) else [data]
    sizes = [span(array, False)[1] for array in arrays]
    if isinstance(residual, list | tuple):
        residuals: Sequence[Any] = residual
        if len(residuals) != len(arrays):
            raise Error(
                f"all_reduce_coded: {len(arrays)} arrays have {len(residuals)} residuals: give "
                "each array one, or all together one"
            )
    elif residual is None or len(arrays) == 1:
        residuals = [residual] * len(arrays)
    else:
        address = _residual(residual, numel)
        residuals = [address + 4 * sum(sizes[:i]) for i in range(len(sizes))]
    return [
        Piece(size, codec, tensor=number, residual=one)
        for number, (size, one) in enumerate(zip(sizes, residuals, strict=True))
    ]


def floats(what: str, array: Any, write: bool) -> tuple[int, int]:
    """Return the address and number of elements of a float32 array."""
    address, numel, dtype = span(array, write)
    if dtype != _C.DType.float32:
        raise Error(f"{what} takes float32, not {dtype.name}: convert it first")
    return address, numel


def built(codec: Any, numel: int, rows: int = 1) -> _C.Pieces:
    """Convert the codec argument of a coded call; worker residuals have `rows` rows."""
    pieces = codec if isinstance(codec, Sequence) and not isinstance(codec, str) else None
    result = _C.Pieces()
    codecs: dict[str, _C.Codec] = {}
    for piece in [Piece(numel, codec)] if pieces is None else pieces:
        codec = piece.codec
        if isinstance(codec, str):
            codec = codecs.setdefault(codec, _C.Codec(codec))
        elif not isinstance(codec, _C.Codec):
            codec = codec.native
        residual = _residual(piece.residual, rows * piece.numel)
        owner = _residual(piece.owner_residual, piece.numel)
        result.add(
            piece.numel,
            codec,
            tensor=piece.tensor,
            worker=(residual, residual),
            owner=(owner, owner),
        )
    return result


def _residual(array: Any, numel: int) -> int:
    if array is None:
        return 0
    if isinstance(array, int):  # its address, which `listed` has checked
        return array
    address, size, dtype = span(array, True)
    if size != numel or dtype != _C.DType.float32:
        raise Error(f"a residual has {size} {dtype.name}, its piece needs {numel} float32")
    return address
