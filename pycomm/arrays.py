"""Arrays as addresses: tensors of torch, and whatever has a buffer, as arrays of numpy, JAX and
TensorFlow have. Imports none of them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

from pycomm import _C
from pycomm.errors import Error

_DTYPES = dict(_C.DType.__members__)
_OPS = dict(_C.ReduceOp.__members__)
# Dtypes to which torch gives other names.
_DTYPES |= {"float8_e4m3fn": _C.DType.float8_e4m3}
# Item codes of buffers that have no dtype, such as array.array: those that imply a size, and whole
# numbers.
_ITEMS = {"B": "uint8", "c": "uint8", "?": "bool", "e": "float16", "f": "float32", "d": "float64"}
_SIGNED, _UNSIGNED = set("bhilq"), set("HILQ")
# Byte order marks in front of the code, as ctypes writes them: those that mean this machine's own
# order.
_OWN_ORDER = "@=" + ("<" if sys.byteorder == "little" else ">")
_LARGEST = (1 << 63) - 1
# A cache: str() of a dtype costs more than a small all_reduce.
_known_dtypes: dict[Any, _C.DType] = {}


def core_dtype(dtype: Any) -> _C.DType:
    """Return the core's dtype for one of torch or numpy."""
    found = _known_dtypes.get(dtype)
    if found is None:
        name = str(dtype).removeprefix("torch.")
        name = name.removeprefix("<dtype: '").removesuffix("'>")  # as TensorFlow writes it
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


def count(what: str, number: Any) -> int:
    """Return a number of elements as an int.

    Raises:
        Error: it is no integer, negative, or larger than any memory.
    """
    try:
        value = operator.index(number)
    except TypeError:
        raise Error(f"{what} is {number!r}, not an integer") from None
    if not 0 <= value <= _LARGEST:
        raise Error(f"{what} is {value}; it must be at least 0 and fit into memory")
    return value


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
            raise Error(
                "the tensor is not contiguous, or conjugated or negated; keep the result of "
                ".resolve_conj().resolve_neg().contiguous() and pass that"
            )
        return data_ptr(), array.numel(), core_dtype(array.dtype)
    address, numel, itemsize, code = _C.buffer(array, write)
    dtype = getattr(array, "dtype", None)
    if dtype is not None:
        known = core_dtype(dtype)
        if _C.size_of(known) != itemsize:
            raise Error(
                f"this {type(array).__name__} says that its dtype is {dtype}, but its buffer has "
                f"items of {itemsize} bytes"
            )
        return address, numel, known
    letter = code[1:] if code[:1] in _OWN_ORDER and len(code) > 1 else code
    name = _ITEMS.get(letter)
    if letter in _SIGNED or letter in _UNSIGNED:
        name = f"{'u' * (letter in _UNSIGNED)}int{8 * itemsize}"
    if name is None or _C.size_of(_DTYPES[name]) != itemsize:
        raise Error(
            f"cannot tell the dtype of {type(array).__name__} with items {code!r}: "
            "pass a tensor or a numpy array"
        )
    return address, numel, _DTYPES[name]


def pair(
    input: Any, out: Any, what: str, in_parts: int, out_parts: int
) -> tuple[int, int, int, _C.DType]:
    """Return the addresses of an input of ``in_parts`` and an output of ``out_parts`` equal parts.

    Returns:
        Both addresses, the number of elements of a part, and the dtype.

    Raises:
        Error: their dtypes or sizes do not match.
    """
    source, in_numel, in_dtype = span(input, False)
    target, out_numel, out_dtype = span(out, True)
    check_same(what, in_dtype, out_dtype)
    if in_numel * out_parts != out_numel * in_parts:
        raise Error(
            f"{what}: input has {in_numel} elements and out {out_numel}; "
            f"they must be as {in_parts} to {out_parts}"
        )
    return source, target, in_numel // in_parts, in_dtype


def parts(
    what: str, arrays: Any, ranks: int, write: bool, counts: Sequence[int] | None = None
) -> tuple[list[tuple[int, int]], _C.DType]:
    """Return the address and size of each rank's part.

    Args:
        what: operation and argument, for errors.
        arrays: one array per rank in a list or tuple, or one array that holds all parts.
        ranks: number of ranks.
        write: whether the parts will be written.
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
            raise Error(f"{what} has {numel} elements: they must be a multiple of {ranks} ranks")
        counts = [numel // ranks] * ranks
    sizes = [count(f"{what}: a count", number) for number in counts]
    if len(sizes) != ranks or sum(sizes) > numel:
        raise Error(f"{what} has {numel} elements; its counts {sizes} must be {ranks} that fit")
    found = []
    for size in sizes:
        found.append((address, size))
        address += size * _C.size_of(dtype)
    return found, dtype


def check_same(what: str, dtype: _C.DType, out_dtype: _C.DType) -> None:
    """Raise Error if input and output have different dtypes. Their sizes are checked by the core,
    which ends the group where the other ranks may not see that those differ."""
    if dtype != out_dtype:
        raise Error(f"{what}: input is {dtype.name}, out is {out_dtype.name}: convert one")
