"""The stream on which buckets of a device are reduced, beside backward."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """A stream of high priority, for work that backward's stream does not wait for.

    Work is queued by the thread that calls, and in its order: it may call a process group, as any
    code of that thread may.

    Args:
        device: a device that is not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device, priority=-1)

    def run(
        self, tensor: torch.Tensor, work: Callable[[], None]
    ) -> torch.futures.Future[torch.Tensor]:
        """Queue work after what is queued on the current stream.

        Args:
            tensor: tensor that the work reads and writes.
            work: queues it on the current stream, which it finds to be this one.

        Returns:
            A future of `tensor`. Whoever waits for it makes its own current stream wait.
        """
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device])
        with self._stream:
            work()
            future.set_result(tensor)
        return future

    def read(self, flag: torch.Tensor) -> bool:
        """Return a flag (one value) that work here has computed; waits for that work alone."""
        with self._stream:
            return bool(flag)
