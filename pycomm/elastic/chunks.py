"""Chunks: the bytes of many tensors, cut into messages of bounded size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch


def cut(total: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of each chunk of so many bytes, but for the last one."""
    for begin in range(0, total, nbytes):
        yield begin, min(begin + nbytes, total)


class Chunks:
    """The chunks of a list of tensors, equal on all ranks whose tensors have equal forms.

    Args:
        tensors: dense tensors of any device, layout and dtype, which are read; or contiguous ones
            on the CPU, which may also be written.
        nbytes: the largest size of a chunk.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], nbytes: int) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        sizes = (tensor.numel() * tensor.element_size() for tensor in self._tensors)
        *self._begins, self.total = accumulate(sizes, initial=0)
        self.all = list(cut(self.total, nbytes))
        self._flat: tuple[int, torch.Tensor] | None = None

    def read(self, chunk: tuple[int, int]) -> torch.Tensor:
        """Return the bytes of a chunk: uint8, on the CPU."""
        return torch.cat(list(self._parts(*chunk)))

    def write(self, chunk: tuple[int, int], content: torch.Tensor) -> None:
        """Write the bytes of a chunk into its tensors."""
        at = 0
        for part in self._parts(*chunk):
            part.copy_(content[at : at + part.numel()])
            at += part.numel()

    def _parts(self, begin: int, end: int) -> Iterator[torch.Tensor]:
        number = bisect_right(self._begins, begin) - 1
        while begin < end:
            row, first = self._bytes_of(number), self._begins[number]
            part = row[begin - first : end - first]
            yield part
            begin, number = begin + part.numel(), number + 1

    def _bytes_of(self, number: int) -> torch.Tensor:
        """Return a tensor's values as one row of bytes: the tensor's memory, if it is one."""
        if self._flat is None or self._flat[0] != number:
            tensor = self._tensors[number].detach().resolve_conj().resolve_neg()
            self._flat = number, tensor.reshape(-1).contiguous().cpu().view(torch.uint8)
        return self._flat[1]
