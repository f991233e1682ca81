"""What each rank calls: the ranks compare their calls, so that none is paired with another.

Horovod pairs calls by name, in whatever order ranks make them. Here ranks make them in one order,
as with `torch.distributed`, and each call is preceded by a small message that says which one it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pycomm.errors import WireMismatch
from pycomm.horovod.basics import world
from pycomm.policy.exchange import answer, bytes_of, device_of

TEXT = 200  # bytes of a call's text that travel, for the error


class Call:
    """One call of a collective on this rank.

    Args:
        text: what must be equal on all of them: name, dtype, shape, options.
        number: what may differ, and the others need.
    """

    def __init__(self, text: str, number: int = 0) -> None:
        self.group = world()
        self.size = self.group.size()
        self._number = number
        self._rows: list[torch.Tensor] = []
        self._work: Any = None
        if self.size > 1:
            written = text.encode()
            head = hashlib.blake2b(written, digest_size=16).digest()
            own = bytearray(head + written[:TEXT].ljust(TEXT) + number.to_bytes(8, "little"))
            sent = torch.frombuffer(own, dtype=torch.uint8).to(device_of(self.group))
            self._rows = [torch.empty_like(sent) for _ in range(self.size)]
            self._work = dist.all_gather(self._rows, sent, group=self.group, async_op=True)

    def is_answered(self) -> bool:
        """Return whether `check` would return at once."""
        return self._work is None or self._work.is_completed()

    def check(self) -> list[int]:
        """Wait for the other ranks' messages, and return their numbers, in rank order.

        Raises:
            WireMismatch: another rank makes another call; on all ranks.
        """
        if self.size == 1:
            return [self._number]
        rows = [bytes_of(answer(self._work, row)) for row in self._rows]
        for rank, row in enumerate(rows):
            if row[:16] != rows[0][:16]:
                texts = [r[16 : 16 + TEXT].decode(errors="replace").strip() for r in (rows[0], row)]
                raise WireMismatch(
                    f"rank {dist.get_rank()}: rank 0 calls {texts[0]}, and rank {rank} calls "
                    f"{texts[1]}: all ranks must make the same calls of pycomm.horovod, "
                    "with the same arguments, in one order"
                )
        return [int.from_bytes(row[-8:], "little") for row in rows]


class Handle:
    """An operation that runs; `synchronize` returns its result, `poll` says whether it has one.

    Args:
        call: what the ranks compare; None: nothing.
        work: the operation, with `wait` and `is_completed`.
        finish: returns the result, once.
    """

    def __init__(self, call: Call | None, work: Any, finish: Callable[[], Any]) -> None:
        self._call, self._work = call, work
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the end, and return the tensor.

        Raises:
            Error: the operation failed; the text says which rank and why.
        """
        if self._call is not None:
            self._call.check()
            self._call = None
        self._work.wait()
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        answered = self._call is None or self._call.is_answered()
        return answered and bool(self._work.is_completed())
