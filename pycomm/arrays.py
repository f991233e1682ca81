"""Arrays as addresses: torch tensors, numpy arrays and buffers. Imports neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import _C
from pycomm.errors import Error

_DTYPES = dict(_C.DType.__members__)
_OPS = dict(_C.ReduceOp.__members__)
# What torch calls differently.
_DTYPES |= {"float8_e4m3fn": _C.DType.float8_e4m3}
# Letters of the items of buffers that have no dtype, such as array.array: those that say their size
# themselves, and whole numbers.
_ITEMS = {"B": "uint8", "c": "uint8", "?": "bool", "e": "float16", "f": "float32", "d": "float64"}
_SIGNED, _UNSIGNED = set("bhilq"), set("HILQ")
# Filled as dtypes are met: str() of a dtype costs more than a small all_reduce.
_known_dtypes: dict[Any, _C.DType] = {}


def core_dtype(dtype: Any) -> _C.DType:
    """The core's name of a torch or numpy dtype."""
    found = _known_dtypes.get(dtype)
    if found is None:
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise Error(f"dtype {dtype} is not known here; use one of {', '.join(_DTYPES)}")
        found = _known_dtypes[dtype] = _DTYPES[name]
    return found


def reduce_op(op: str | _C.ReduceOp) -> _C.ReduceOp:
    if not isinstance(op, str):
        return op
    if op not in _OPS:
        raise Error(f"unknown reduction {op!r}: use one of {', '.join(_OPS)}")
    return _OPS[op]


def span(array: Any, write: bool) -> tuple[int, int, _C.DType]:
    """Return an array's address, number of elements and dtype.

    Raises:
        Error: it is not contiguous, not on the CPU, has an unknown dtype, or may not be written.
    """
    data_ptr = getattr(array, "data_ptr", None)
    if data_ptr is not None:
        if not array.is_cpu:
            raise Error(f"the tensor is on {array.device}; move it to the cpu first")
        if not array.is_contiguous() or array.is_conj() or array.is_neg():
            raise Error("the tensor is not contiguous; call .contiguous() and keep the result")
        return data_ptr(), array.numel(), core_dtype(array.dtype)
    address, numel, itemsize, code = _C.buffer(array, write)
    dtype = getattr(array, "dtype", None)
    if dtype is not None:
        return address, numel, core_dtype(dtype)
    name = _ITEMS.get(code)
    if code in _SIGNED or code in _UNSIGNED:
        name = f"{'u' * (code in _UNSIGNED)}int{8 * itemsize}"
    if name is None:
        raise Error(f"cannot tell the dtype of {type(array).__name__} with items {code!r}")
    return address, numel, _DTYPES[name]


def pair(
    input: Any, out: Any, what: str, in_parts: int, out_parts: int
) -> tuple[int, int, int, _C.DType]:
    """Return where an input of ``in_parts`` and an output of ``out_parts`` equal parts lie.

    Returns:
        Both addresses, the elements of a part, and the dtype.

    Raises:
        Error: their dtypes or sizes do not fit.
    """
    source, in_numel, in_dtype = span(input, False)
    target, out_numel, out_dtype = span(out, True)
    if in_dtype != out_dtype:
        raise Error(f"{what}: input is {in_dtype.name}, out is {out_dtype.name}")
    if in_numel * out_parts != out_numel * in_parts:
        raise Error(
            f"{what}: input has {in_numel} elements and out {out_numel}; "
            f"they must be as {in_parts} to {out_parts}"
        )
    return source, target, in_numel // in_parts, in_dtype


def parts(
    what: str, arrays: Any, ranks: int, write: bool, counts: Sequence[int] | None = None
) -> tuple[list[tuple[int, int]], _C.DType]:
    """Return where the part of each rank lies.

    Args:
        what: operation and argument, for errors.
        arrays: one array per rank in a list or tuple, or one array that holds all parts.
        ranks: how many.
        write: the parts will be written.
        counts: elements of each part of one array; None: equal parts.

    Returns:
        Address and number of elements of each part, and the dtype.

    Raises:
        Error: there is not one part per rank, or their dtypes differ.
    """
    if isinstance(arrays, list | tuple):
        spans = [span(array, write) for array in arrays]
        dtypes = {dtype.name for _, _, dtype in spans}
        if len(spans) != ranks or len(dtypes) != 1 or counts is not None:
            raise Error(
                f"{what} has {len(spans)} arrays of {', '.join(sorted(dtypes)) or 'no dtype'}; "
                f"it needs one per rank, {ranks}, of one dtype, and no counts"
            )
        return [(address, numel) for address, numel, _ in spans], spans[0][2]
    address, numel, dtype = span(arrays, write)
    if counts is None:
        if numel % ranks:
            raise Error(f"{what} has {numel} elements, not {ranks} equal parts")
        counts = [numel // ranks] * ranks
    if len(counts) != ranks or min(counts) < 0 or sum(counts) > numel:
        raise Error(
            f"{what} has {numel} elements; its counts {list(counts)} must be {ranks} that fit"
        )
    found = []
    for count in counts:
        found.append((address, count))
        address += count * _C.size_of(dtype)
    return found, dtype


def check_own(what: str, numel: int, out_numel: int, dtype: _C.DType, out_dtype: _C.DType) -> None:
    """Refuse sizes and dtypes of our own part that differ between input and output."""
    if dtype != out_dtype:
        raise Error(f"{what}: input is {dtype.name}, out is {out_dtype.name}")
    if numel != out_numel:
        raise Error(f"{what}: our own part has {numel} elements as input and {out_numel} as output")
