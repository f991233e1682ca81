"""Tensors as flat memory, for the backend in Python; csrc/binding/torch/support.h in Python."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pycomm import _C

DTYPES: dict[torch.dtype, _C.DType] = {
    torch.float32: _C.DType.float32,
    torch.float64: _C.DType.float64,
    torch.float16: _C.DType.float16,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float8_e4m3fn: _C.DType.float8_e4m3,
    torch.float8_e5m2: _C.DType.float8_e5m2,
    torch.int8: _C.DType.int8,
    torch.int16: _C.DType.int16,
    torch.int32: _C.DType.int32,
    torch.int64: _C.DType.int64,
    torch.uint8: _C.DType.uint8,
    torch.uint16: _C.DType.uint16,
    torch.uint32: _C.DType.uint32,
    torch.uint64: _C.DType.uint64,
    torch.bool: _C.DType.bool,
    torch.complex64: _C.DType.complex64,
    torch.complex128: _C.DType.complex128,
}


def elements(tensor: torch.Tensor) -> tuple[_C.DType, int]:
    """Return dtype and number of elements as an operation that only moves data counts them.

    Dtypes that the core does not know travel as bytes.
    """
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return _C.DType.uint8, tensor.numel() * tensor.element_size()
    return dtype, tensor.numel()


def flat(tensor: torch.Tensor, *, copies: bool = True) -> torch.Tensor:
    """Return the tensor if its memory is one run of the host's; else a copy that is.

    Args:
        tensor: strided, on any device.
        copies: the copy has the tensor's values; else any.
    """
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.inference_mode():
        if copies:
            whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return whole.cpu()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def write_back(made: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy what an operation has written to `flat(tensor)` into the tensor."""
    if made is not tensor:
        with torch.inference_mode():  # may write to tensors that were made in it, and to all others
            tensor.detach().copy_(made)


def write_all_back(made: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Do so for each of a list."""
    for one, tensor in zip(made, tensors, strict=True):
        write_back(one, tensor)


def parts(tensors: Sequence[torch.Tensor]) -> _C.Parts:
    """Return the addresses and sizes of flat tensors, one for each rank."""
    return _C.Parts([(t.data_ptr(), elements(t)[1]) for t in tensors])
