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


def floats(what: str, array: Any, write: bool) -> tuple[int, int]:
    """Return the address and number of elements of a float32 array."""
    address, numel, dtype = span(array, write)
    if dtype != _C.DType.float32:
        raise Error(f"{what} takes float32, not {dtype.name}: convert it first")
    return address, numel


def built(codec: Any, numel: int, rows: int = 1, residual: Any = None) -> _C.Pieces:
    """Convert the codec argument of a coded call; worker residuals have `rows` rows.

    Raises:
        Error: there is a residual besides those that pieces name, or one does not fit.
    """
    pieces = codec if isinstance(codec, Sequence) and not isinstance(codec, str) else None
    if pieces is not None and residual is not None:
        raise Error("pieces name their own residuals: leave out residual=, or pass one codec")
    result = _C.Pieces()
    codecs: dict[str, _C.Codec] = {}
    for piece in [Piece(numel, codec, residual=residual)] if pieces is None else pieces:
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
    address, size, dtype = span(array, True)
    if size != numel or dtype != _C.DType.float32:
        raise Error(f"a residual has {size} {dtype.name}, its piece needs {numel} float32")
    return address
