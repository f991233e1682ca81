"""Chain: messages from one rank along others, each of which passes them on as they come.

Every message has a header, which travels ahead of the message before it, so that the receiver can
have its memory ready. The last header says that the sender had all of them; one that has lost its
own sender says so instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import torch
import torch.distributed as dist

from pycomm.errors import Error

# Tags that a program will not use for its own sends: a pair for each transfer, since receives that
# were posted for one that has failed would take messages of the next.
_TAGS, PAIRS = 0x70630000, 0x8000
_AHEAD = 2  # messages whose memory is ready, and messages on their way out
_CODED, _PLAIN, _END, _FAILED = range(4)

Message = tuple[torch.Tensor, bool]
"""Bytes (uint8, on the CPU), and whether they are coded."""


class Sender:
    """Sends messages to one rank.

    Args:
        group: the ranks.
        peer: the rank that receives them.
        device: a device whose tensors the group moves.
        transfer: number of the transfer, 0 to PAIRS - 1; the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, peer: int, device: torch.device, transfer: int
    ) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._tag = _TAGS + 2 * transfer
        self._announced: deque[int] = deque()
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def announce(self, size: int, coded: bool) -> None:
        self._announced.append(size)
        self._header(size, _CODED if coded else _PLAIN)

    def send(self, content: torch.Tensor) -> None:
        """Send the next message that was announced; wait for one of those before."""
        self._announced.popleft()
        self._issue(content, self._tag + 1)

    def end(self) -> None:
        """Tell that these were all, and wait until all are sent."""
        self._header(0, _END)
        self._finish()

    def fail(self) -> None:
        """Tell the receiver that no more will come, if it can still be told."""
        with suppress(Exception):
            while self._announced:
                self.send(torch.zeros(self._announced[0], dtype=torch.uint8, device="cpu"))
            self._header(0, _FAILED)
            self._finish()

    def _header(self, size: int, kind: int) -> None:
        self._issue(torch.tensor([size, kind], dtype=torch.int64, device="cpu"), self._tag)

    def _issue(self, content: torch.Tensor, tag: int) -> None:
        content = content.to(self._device)
        # Several headers fit beside each message.
        self._sent.append((self._group.send([content], self._peer, tag), content))
        while len(self._sent) > 2 * _AHEAD:
            self._sent.popleft()[0].wait()

    def _finish(self) -> None:
        while self._sent:
            self._sent.popleft()[0].wait()


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
        self._tag = _TAGS + 2 * transfer
        self._headers: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._expected = 0
        self._coming: deque[tuple[dist.Work, torch.Tensor, int, bool]] = deque()
        self._over = False  # nothing more comes

    def expect(self, headers: int) -> None:
        """Let so many more headers come, so that their memory is ready ahead."""
        self._expected += headers
        while self._expected and len(self._headers) <= _AHEAD:
            self._expected -= 1
            self._post_header()

    def receive(self, rooms: Iterable[tuple[int, int] | None]) -> Iterator[Message]:
        """Yield the messages: one for each room, its bytes at the begin of a buffer of that size.

        Args:
            rooms: sizes of the buffers, and of the messages that are not coded, in bytes; None: of
                any size.

        Raises:
            Error: a message does not fit, or the sender has lost its own sender.
        """
        for room in rooms:
            size, kind = self._header()
            fits = room is None or (size == room[1] if kind == _PLAIN else size <= room[0])
            if kind not in (_CODED, _PLAIN) or size < 0 or not fits:
                raise Error(f"rank {self._peer} announces {size} bytes (kind {kind}) for {room}")
            if self._to is not None:
                self._to.announce(size, kind == _CODED)
            self._post(size, size if room is None else room[0], kind == _CODED)
            if len(self._coming) == _AHEAD:
                yield self._next()
        while self._coming:
            yield self._next()

    def end(self) -> None:
        """Wait for the sender's word that it had all messages itself, and pass it on."""
        _, kind = self._header()
        if kind != _END:
            raise Error(f"rank {self._peer} sends more (kind {kind}) than the state has")
        if self._to is not None:
            self._to.end()

    def fail(self) -> None:
        """Tell the next rank that this one has failed, and take what is still sent to it.

        So the sender does not wait for this rank until the group's deadline.
        """
        if self._to is not None:
            self._to.fail()
        with suppress(Exception):  # the sender may be what has failed
            while not self._over:
                while self._coming:
                    self._wait(self._coming.popleft()[0])
                if not self._headers:
                    self._post_header()
                size, kind = self._header()
                if kind in (_CODED, _PLAIN):
                    self._post(size, size, False)

    def _post(self, size: int, room: int, coded: bool) -> None:
        # Zeros, since a coded message may claim to have more bytes than it has.
        buffer = torch.zeros(room, dtype=torch.uint8, device=self._device)
        work = self._group.recv([buffer[:size]], self._peer, self._tag + 1)
        self._coming.append((work, buffer, size, coded))

    def _post_header(self) -> None:
        header = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._headers.append((self._group.recv([header], self._peer, self._tag), header))

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except BaseException:
            self._over = True
            raise

    def _next(self) -> Message:
        work, buffer, size, coded = self._coming.popleft()
        self._wait(work)
        content = buffer.cpu()
        if self._to is not None:
            self._to.send(content[:size])
        return content, coded

    def _header(self) -> tuple[int, int]:
        work, header = self._headers.popleft()
        self.expect(0)
        self._wait(work)
        size, kind = header.tolist()
        self._over = kind in (_END, _FAILED)
        if kind == _FAILED:
            raise Error(f"rank {self._peer} has lost the rank before it, or failed itself")
        return size, kind


def send_ahead(sender: Sender, messages: Iterable[Callable[[], Message]]) -> None:
    """Send messages; each is made while those before are on their way.

    Args:
        sender: where to.
        messages: functions that wait for a message that is being made.
    """
    waiting: deque[torch.Tensor] = deque()
    for made in messages:
        content, coded = made()
        sender.announce(content.numel(), coded)
        waiting.append(content)
        if len(waiting) == _AHEAD:
            sender.send(waiting.popleft())
    while waiting:
        sender.send(waiting.popleft())
