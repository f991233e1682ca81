"""Chunks: the values of many tensors as messages of bounded size, coded without loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pycomm.codecs import Lossless
from pycomm.errors import Error

# Values travel as the integers that their bits are: no arithmetic of floats can change them.
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
_CODECS = {torch.int32: Lossless(), torch.int16: Lossless(dtype="bfloat16")}


@dataclass
class Chunk:
    """Parts of tensors that travel together.

    Attributes:
        dtype: of the integers: int32 for float32, int16 for bfloat16, uint8 for bytes.
        parts: number of the tensor, first and last element, counted in integers.
    """

    dtype: torch.dtype
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    numel: int = 0

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes of a buffer that takes the chunk, coded or not."""
        codec = _CODECS.get(self.dtype)
        return max(self.nbytes, codec.encoded_bytes(self.numel) if codec else 0)


class Chunks:
    """The chunks of a list of tensors, equal on all ranks whose tensors have equal forms.

    Encode or decode the chunks in their order, on one thread at a time.

    Args:
        tensors: dense tensors of any device, layout and dtype; read or written in place.
        nbytes: the largest size of a chunk before it is coded.
        coded: code float32 and bfloat16.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], nbytes: int, coded: bool) -> None:
        self._tensors = tensors
        self._coded = coded
        self._flat: tuple[int, torch.Tensor] | None = None
        self.all: list[Chunk] = []
        for dtype in (torch.int32, torch.int16, torch.uint8):
            most = nbytes // dtype.itemsize
            chunk = Chunk(dtype)
            for number, tensor in enumerate(tensors):
                if self._integers(tensor) != dtype:
                    continue
                begin, end = 0, tensor.numel() * tensor.element_size() // dtype.itemsize
                while begin < end:
                    size = min(end - begin, most - chunk.numel)
                    chunk.parts.append((number, begin, begin + size))
                    chunk.numel += size
                    begin += size
                    if chunk.numel == most:
                        self.all.append(chunk)
                        chunk = Chunk(dtype)
            if chunk.numel:
                self.all.append(chunk)

    def encode(self, chunk: Chunk) -> tuple[torch.Tensor, bool]:
        """Return the bytes of a chunk (uint8), and whether they are coded."""
        values = torch.cat([self._of(n)[begin:end] for n, begin, end in chunk.parts])
        codec = _CODECS.get(chunk.dtype)
        if codec is None:
            return values, False
        floats = values if chunk.dtype == torch.int32 else values.to(torch.int32) << 16
        floats = floats.view(torch.float32)
        # The codec makes all NaNs one, and this state has to keep its bits.
        if not bool(floats.isnan().any()):
            payload = codec.encode(floats)
            used = int(payload[:4].view(torch.int32))
            if used < chunk.nbytes:
                return payload[:used], True
        return values.view(torch.uint8), False

    def decode(self, chunk: Chunk, received: torch.Tensor, coded: bool) -> None:
        """Write a chunk into its tensors, which are contiguous and on the CPU.

        Args:
            chunk: the chunk.
            received: uint8 [chunk.room], which begins with what `encode` returned.
            coded: the same.

        Raises:
            Error: no sender codes such a chunk.
        """
        if coded:
            codec = _CODECS.get(chunk.dtype)
            if codec is None or not self._coded:
                raise Error(f"another member has coded {chunk.dtype}, which none does")
            payload = received[: codec.encoded_bytes(chunk.numel)]
            values = codec.decode(payload, chunk.numel).view(torch.int32)
            if chunk.dtype == torch.int16:
                values = (values >> 16).to(torch.int16)
        else:
            values = received[: chunk.nbytes].view(chunk.dtype)
        at = 0
        for number, begin, end in chunk.parts:
            self._of(number)[begin:end] = values[at : at + end - begin]
            at += end - begin

    def _integers(self, tensor: torch.Tensor) -> torch.dtype:
        return _INTEGERS.get(tensor.dtype, torch.uint8) if self._coded else torch.uint8

    def _of(self, number: int) -> torch.Tensor:
        """Return a tensor's values as one row of integers: the tensor's memory, if it is one."""
        if self._flat is None or self._flat[0] != number:
            tensor = self._tensors[number].detach().resolve_conj().resolve_neg()
            row = tensor.reshape(-1).contiguous().cpu().view(self._integers(tensor))
            self._flat = (number, row)
        return self._flat[1]
