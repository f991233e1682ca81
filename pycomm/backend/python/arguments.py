"""Checks of arguments for the backend in Python: those of csrc/binding/torch/arguments.h.

They run before a byte is sent; errors name the rank, the operation and the problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed import ReduceOp

from pycomm import _C
from pycomm.backend.python.tensors import DTYPES
from pycomm.errors import Error

Tensors = Sequence[torch.Tensor]

# By the name of torch's operation.
OPS = {
    "SUM": _C.ReduceOp.sum,
    "AVG": _C.ReduceOp.avg,
    "PRODUCT": _C.ReduceOp.prod,
    "MIN": _C.ReduceOp.min,
    "MAX": _C.ReduceOp.max,
    "BAND": _C.ReduceOp.band,
    "BOR": _C.ReduceOp.bor,
    "BXOR": _C.ReduceOp.bxor,
    "PREMUL_SUM": _C.ReduceOp.premul_sum,
}
_BY_NUMBER = {
    int(getattr(ReduceOp.RedOpType, name)): op
    for name, op in OPS.items()
    if hasattr(ReduceOp.RedOpType, name)
}
_PREMUL = next(number for number, op in _BY_NUMBER.items() if op is _C.ReduceOp.premul_sum)


class Arguments:
    """Checks for one rank of a group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.here = f"rank {rank}: "

    def fail(self, name: str, what: str) -> NoReturn:
        """Raise the error of an operation."""
        raise Error(f"{self.here}{name}: {what}")

    def check(self, name: str, t: torch.Tensor) -> None:
        """Check a tensor that is read."""
        if t.is_cpu and t.is_contiguous() and not t.is_quantized and not t.is_nested:
            if _has_its_memory(t):
                return
        elif t is None:
            self.fail(name, "got an undefined tensor")
        accelerator = torch.accelerator.current_accelerator()
        if not t.is_cpu and (accelerator is None or t.device.type != accelerator.type):
            self.fail(
                name,
                f"got a tensor on {t.device}; pycomm moves tensors of the CPU and of accelerators "
                "with streams",
            )
        if t.layout != torch.strided:
            self.fail(name, "got a sparse tensor; call .to_dense() first")
        if t.is_nested:
            self.fail(name, "got a nested tensor; pass the tensors that it consists of")
        # Quantized values mean nothing without a scale and a zero point, which may differ between
        # ranks.
        if t.is_quantized:
            self.fail(
                name,
                "got a quantized tensor; pass its int_repr(), or call .dequantize() first",
            )
        if not _has_its_memory(t):
            self.fail(
                name,
                f"got a tensor of {t.numel()} values whose storage has been resized and is too "
                "small for them",
            )

    def check_written(self, name: str, *tensors: torch.Tensor) -> None:
        """Check tensors that are written, which must not overlap."""
        for t in tensors:
            self.check(name, t)
            self._check_no_overlap(name, t)
        if len(tensors) > 1 and _any_overlap(tensors):
            self.fail(
                name,
                "cannot write to a list of tensors that share memory with each other, as one "
                "tensor that is in the list twice does; pass tensors of their own, or call "
                ".clone()",
            )

    def _check_no_overlap(self, name: str, t: torch.Tensor) -> None:
        if not t.is_contiguous() and torch._debug_has_internal_overlap(t) == 1:
            self.fail(
                name,
                "cannot write to a tensor several of whose values share one place in memory, as "
                "after expand(); call .clone() first",
            )

    def only(self, name: str, tensors: Tensors) -> torch.Tensor:
        """Return the one tensor of a list, checked."""
        if len(tensors) != 1:
            self.fail(name, f"takes one tensor, got {len(tensors)}")
        self.check(name, tensors[0])
        return tensors[0]

    def only_written(self, name: str, tensors: Tensors) -> torch.Tensor:
        """Return the one tensor of a list, checked as one that is written."""
        tensor = self.only(name, tensors)
        self._check_no_overlap(name, tensor)
        return tensor

    def root(self, name: str, opts: Any) -> int:
        """Return the root, checked."""
        self.check_peer(name, "the root", opts.rootRank)
        tensor = getattr(opts, "rootTensor", 0)
        if tensor != 0:
            self.fail(name, f"takes one tensor, so the root tensor is 0, not {tensor}")
        return int(opts.rootRank)

    def check_peer(self, name: str, what: str, peer: int) -> None:
        """Check the number of a rank."""
        if not 0 <= peer < self.size:
            to = f" to {self.size - 1}" if self.size > 1 else ""
            self.fail(name, f"{what} is {peer}, but the group has ranks 0{to}")

    def check_tag(self, name: str, tag: int) -> None:
        """Check the tag of a message."""
        if tag < 0:
            self.fail(name, f"the tag is {tag}, but tags begin at 0")

    def same_dtype(self, name: str, t: torch.Tensor, like: torch.Tensor) -> None:
        """Check a tensor of a list that must have one dtype."""
        self.check(name, t)
        if t.dtype != like.dtype:
            self.fail(name, f"all tensors must have one dtype, got {t.dtype} and {like.dtype}")

    def one_per_rank(
        self, name: str, lists: Sequence[Tensors], like: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the inner list, checked: one tensor per rank, of the dtype of `like`."""
        if len(lists) != 1:
            self.fail(name, f"takes one list of tensors, got {len(lists)}")
        (found,) = lists
        if len(found) != self.size:
            self.fail(name, f"needs a list of {self.size} tensors, one per rank, got {len(found)}")
        for t in found:
            self.same_dtype(name, t, like)
        return list(found)

    def own_part(self, name: str, tensors: Tensors, other: torch.Tensor, role: str) -> None:
        """Check that this rank's tensor of a list has the size of the other tensor."""
        if tensors[self.rank].numel() != other.numel():
            self.fail(
                name,
                f"part {self.rank} of the {role} list has {tensors[self.rank].numel()} values, the "
                f"other tensor {other.numel()}",
            )

    def must_compare(self, name: str, tensors: Tensors, other: torch.Tensor, role: str) -> bool:
        """Do the same where all ranks pass a list; return whether ranks must compare theirs first.

        A list of equal sizes is wrong on every rank or on none. One of other sizes may be wrong on
        a rank that then raises, and right on others, which would wait for it.
        """
        if not equal([t.numel() for t in tensors]):
            return True
        self.own_part(name, tensors, other, role)
        return False

    def reducible(self, name: str, t: torch.Tensor, op: Any) -> tuple[_C.DType, _C.ReduceOp, float]:
        """Return the core's dtype, reduction and factor."""
        dtype = DTYPES.get(t.dtype)
        if dtype is None:
            self.fail(name, f"cannot reduce dtype {t.dtype}")
        number = int(op.op) if hasattr(op, "op") else int(op)
        how = _BY_NUMBER.get(number)
        if how is None:
            self.fail(name, f"unknown reduce op {number}")
        factor = 1.0
        if number == _PREMUL:
            try:
                factor = float(op.__getstate__()[1])
            except (RuntimeError, TypeError, AttributeError):
                self.fail(
                    name, "PREMUL_SUM needs a factor; make it by _make_nccl_premul_sum(factor)"
                )
        try:
            _C.check_reducible(dtype, how)
        except Error as error:
            self.fail(name, str(error))
        return dtype, how, factor

    def rows(self, name: str, t: torch.Tensor, splits: Sequence[int], role: str) -> list[int]:
        """Return how many rows each rank gets or sends."""
        length = t.shape[0] if t.dim() else 1
        counts = list(splits)
        if not counts:
            if length % self.size:
                self.fail(
                    name,
                    f"dimension 0 of the {role}, {length}, is not divisible by {self.size} ranks; "
                    "pass split sizes",
                )
            counts = [length // self.size] * self.size
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != length:
            self.fail(
                name,
                f"the split sizes of the {role} must be {self.size} numbers of at least 0 whose "
                f"sum is its dimension 0, {length}",
            )
        return counts

    def own_counts(self, name: str, sent: int, received: int) -> None:
        """Check that this rank's part for itself has one size in the input and the output."""
        if sent != received:
            self.fail(
                name,
                f"the part for this rank itself has {sent} values in the input and {received} in "
                "the output",
            )

    def pair_up(self, name: str, whole: Tensors, part: Tensors) -> None:
        """Check that each of `whole` has as many values as its `part` on all ranks together."""
        if len(whole) != len(part) or not whole:
            self.fail(name, f"needs as many outputs as inputs, got {len(whole)} and {len(part)}")
        for large, small in zip(whole, part, strict=True):
            self.check(name, large)
            self.same_dtype(name, small, large)
            if large.numel() != self.size * small.numel():
                self.fail(
                    name,
                    f"the larger tensor must have {self.size} times {small.numel()} values, one "
                    f"part per rank, but has {large.numel()}",
                )


def equal(numels: Sequence[int]) -> bool:
    """Return whether all sizes are equal."""
    return min(numels) == max(numels)


def _has_its_memory(t: torch.Tensor) -> bool:
    """Return whether the storage still has the tensor's memory, which FSDP may have freed."""
    if t.numel() == 0:
        return True
    if t.is_contiguous():
        last = t.storage_offset() + t.numel()
    else:
        steps = zip(t.shape, t.stride(), strict=True)
        last = t.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps)
    return last * t.element_size() <= t.untyped_storage().nbytes()


def _any_overlap(tensors: Tensors) -> bool:
    """Return whether the first value of a tensor lies in another one.

    Tensors with gaps may interleave, like columns of a matrix; of those only equal beginnings
    count.
    """
    places = []
    for t in tensors:
        if t.numel():
            begin = t.data_ptr()
            dense = t.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(t)
            places.append((begin, begin + (t.nbytes if dense else 1)))
    places.sort()
    taken = 0
    for begin, end in places:
        if begin < taken:
            return True
        taken = max(taken, end)
    return False
