"""Chain: messages from one rank along others, each of which passes them on as they come.

The first message is the header, and the sizes of the others follow from it. Every message ends with
a byte that says whether its sender goes on: one that has failed, or has lost its own sender, says
so in its next message, which has the size that is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import tee

import torch
import torch.distributed as dist

from pycomm.errors import Error

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
