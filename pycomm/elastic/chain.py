"""The way of a state: a pickle and many tensors, along a chain of ranks.

Each rank of the chain passes messages on as they come. The first one is the header, with the bytes
of the preface and of all tensors; then come the preface, the tensors in chunks, and an empty
message at the end: the sender's word that it had all of them itself. Every message ends with a byte
that says whether its sender goes on: one that has failed, or has lost its own sender, says so in
its next message, which has the size that is waited for.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, tee

import torch
import torch.distributed as dist

from pycomm.elastic.contents import Form, StateError, empty, read_forms
from pycomm.errors import Error
from pycomm.policy.exchange import bytes_of

# Tags that a program will not use for its own sends: one for each transfer, since receives that
# were posted for one that has failed would take messages of the next.
_TAGS, TRANSFERS = 0x70630000, 0x8000
_AHEAD = 2  # messages on their way in, and on their way out
HEADER = 16
"""Bytes of the first message."""
_GOES_ON, _FAILED = 0, 1


class Sender:
    """Sends messages to one rank.

    Args:
        group: the ranks.
        peer: the rank that receives them.
        device: a device whose tensors the group moves.
        transfer: number of the transfer, 0 to TRANSFERS - 1; the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, peer: int, device: torch.device, transfer: int
    ) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._tag = _TAGS + transfer
        self._next: int | None = HEADER  # size of the next message; None: there is none
        self._sizes: Iterator[int] = iter(())
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def announce(self, sizes: Iterable[int]) -> None:
        """Set the sizes of the messages after the header, in bytes."""
        self._sizes = iter(sizes)
        self._next = next(self._sizes, None)

    def send(self, content: torch.Tensor) -> None:
        """Send the next message (uint8); wait for one of those before."""
        end = torch.tensor([_GOES_ON], dtype=torch.uint8, device="cpu")
        self.pass_on(torch.cat((content, end)))

    def pass_on(self, message: torch.Tensor) -> None:
        """Send the next message as it was received."""
        message = message.to(self._device)
        self._next = next(self._sizes, None)
        self._sent.append((self._group.send([message], self._peer, self._tag), message))
        while len(self._sent) > _AHEAD:
            self._sent.popleft()[0].wait()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def fail(self) -> None:
        """Tell the receiver that no more will come, if it can still be told."""
        if self._next is None:
            return
        message = torch.zeros(self._next + 1, dtype=torch.uint8, device="cpu")
        message[-1] = _FAILED
        with suppress(Exception):
            self.pass_on(message)
            self.finish()


class Receiver:
    """Receives messages from one rank, and passes them on.

    Args:
        group: the ranks.
        peer: the rank that sends them.
        device: a device whose tensors the group moves.
        transfer: see `Sender`.
        to: the sender to the next rank, or None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        transfer: int,
        to: Sender | None,
    ) -> None:
        self._group, self._peer, self._device, self._to = group, peer, device, to
        self._tag = _TAGS + transfer
        self._sizes: Iterator[int] = iter((HEADER,))
        self._coming: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._over = False  # nothing more comes
        self._post()

    def expect(self, sizes: Iterable[int]) -> None:
        """Let the messages after the header come, of these sizes in bytes."""
        self._sizes, others = tee(sizes)
        if self._to is not None:
            self._to.announce(others)
        self._post()

    def receive(self) -> torch.Tensor:
        """Return the next message (uint8, on the CPU), which is passed on, too.

        Raises:
            Error: the sender has lost its own sender, or has failed itself.
        """
        message = self._take()
        if self._to is not None:
            self._to.pass_on(message)
        return message[:-1]

    def finish(self) -> None:
        """Wait until all messages are passed on."""
        if self._to is not None:
            self._to.finish()

    def fail(self) -> None:
        """Tell the next rank that this one has failed, and take what is still sent to it.

        So the sender does not wait for this rank until the group's deadline.
        """
        if self._to is not None:
            self._to.fail()
        with suppress(Exception):  # the sender may be what has failed
            while self._coming and not self._over:
                self._take()

    def _take(self) -> torch.Tensor:
        work, buffer = self._coming.popleft()
        try:
            work.wait()
        except BaseException:
            self._over = True
            raise
        message = buffer.cpu()
        if message[-1] != _GOES_ON:
            self._over = True
            raise Error(f"rank {self._peer} has lost the rank before it, or failed itself")
        self._post()
        return message

    def _post(self) -> None:
        while len(self._coming) < _AHEAD and (size := next(self._sizes, None)) is not None:
            buffer = torch.empty(size + 1, dtype=torch.uint8, device=self._device)
            self._coming.append((self._group.recv([buffer], self._peer, self._tag), buffer))


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


Packed = tuple[bytes, list[Form], list[torch.Tensor]]
"""A pickle, and the tensors that it refers to, with their forms."""


def _sizes(preface: int, total: int, chunk_bytes: int) -> Iterator[int]:
    """Yield the sizes of the messages after the header."""
    yield preface
    yield from (end - begin for begin, end in cut(total, chunk_bytes))
    yield 0


def send(to: Sender, known: Sequence[torch.Tensor], packed: Packed, chunk_bytes: int) -> None:
    """Send a state; if it fails, the receiver is told.

    Args:
        to: where to.
        known: tensors whose forms the receiver knows.
        packed: the rest.
        chunk_bytes: size of a chunk, the same on all ranks.
    """
    try:
        pickled, forms, rest = packed
        preface = torch.frombuffer(bytearray(pickle.dumps((pickled, forms))), dtype=torch.uint8)
        chunks = Chunks([*known, *rest], chunk_bytes)
        sizes = preface.numel(), chunks.total
        to.send(torch.tensor(sizes, dtype=torch.int64, device="cpu").view(torch.uint8))
        to.announce(_sizes(*sizes, chunk_bytes))
        to.send(preface)
        for chunk in chunks.all:
            to.send(chunks.read(chunk))
        to.send(preface[:0])
        to.finish()
    except BaseException:
        to.fail()
        raise


def receive(
    receiver: Receiver, known: Sequence[Form], chunk_bytes: int
) -> tuple[list[torch.Tensor], Packed]:
    """Receive a state. An error of this rank alone does not hold up the sender.

    Args:
        receiver: from where.
        known: the forms of what the sender sends as `known`.
        chunk_bytes: size of a chunk, the same on all ranks.

    Returns:
        the tensors of `known`, and the rest; on the CPU.
    """
    try:
        return _receive(receiver, known, chunk_bytes)
    except Exception:
        receiver.fail()
        raise


def _receive(
    receiver: Receiver, known: Sequence[Form], chunk_bytes: int
) -> tuple[list[torch.Tensor], Packed]:
    preface, total = receiver.receive().view(torch.int64).tolist()
    receiver.expect(_sizes(max(0, preface), max(0, total), chunk_bytes))
    pickled, forms = read_forms(bytes_of(receiver.receive()))
    staged = [empty(form) for form in known]
    rest = [empty(form) for form in forms]
    chunks = Chunks([*staged, *rest], chunk_bytes)
    if chunks.total != total:
        raise StateError(f"another member sends {total} bytes of {chunks.total} of its tensors")
    for chunk in chunks.all:
        chunks.write(chunk, receiver.receive())
    receiver.receive()
    receiver.finish()
    return staged, (pickled, forms, rest)
