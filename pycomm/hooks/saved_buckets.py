"""The buckets of a loaded state, by which the first steps after a load are reduced.

DDP makes new buckets after its first backward (with static_graph after two), and a bucket decides
which values each rank owns. A state that was saved after that belongs to the final buckets, and is
loaded before they exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Future = torch.futures.Future[torch.Tensor]
Names = tuple[str, ...]


class SavedBuckets:
    """Reduces one step by the buckets that a checkpoint names, whatever DDP's own are.

    From the first bucket on that differs, buckets are kept until the last one of the step. If they
    are not of the same values in all, or of one dtype and device each, they are reduced as DDP made
    them. All of it is decided by what is equal on all ranks: DDP's buckets and the saved names.

    Args:
        saved: names of each bucket's parameters, in the order of reduction.
        numel: function that returns the number of values of a parameter.
        reduce: function that averages a bucket in place.
        wait: function that waits for a future of `reduce`.
    """

    def __init__(
        self,
        saved: Sequence[Names],
        numel: Callable[[str], int],
        reduce: Callable[[torch.Tensor, Names], Future],
        wait: Callable[[Future], object],
    ) -> None:
        self._saved = list(saved)
        self._numel, self._reduce, self._wait = numel, reduce, wait
        self._held: list[tuple[torch.Tensor, Names, Future]] = []
        self._started: list[tuple[torch.Tensor, Sequence[torch.Tensor], Future]] = []

    def reduce(self, tensor: torch.Tensor, names: Names, *, last: bool) -> Future:
        """Average a bucket of DDP, in place; after the last one of the step, call `finish`.

        Args:
            tensor: the gradients of the named parameters, one behind the other.
            names: its parameters.
            last: it is the last bucket of the step.
        """
        if not self._held and self._saved[:1] == [names]:
            del self._saved[0]
            return self._reduce(tensor, names)
        devices: list[int | str | torch.device] = [] if tensor.is_cpu else [tensor.device]
        future: Future = torch.futures.Future(devices=devices)
        self._held.append((tensor, names, future))
        if last:
            self._start()
        return future

    def finish(self) -> None:
        """Wait for the buckets that were kept, after the step has ended.

        Raises:
            Error: a reduction failed. The backward raises it, and waits for no bucket.
        """
        for bucket, places, reduction in self._started:
            self._wait(reduction)
            if places[0].data_ptr() != bucket.data_ptr():
                values = torch.split(bucket, [place.numel() for place in places])
                for place, value in zip(places, values, strict=True):
                    place.copy_(value)
        for tensor, _, future in self._held:
            future.set_result(tensor)

    def _start(self) -> None:
        parts = self._parts()
        if parts is None:
            for tensor, names, _ in self._held:
                self._started.append((tensor, [tensor], self._reduce(tensor, names)))
            return
        buckets = [[parts[name] for name in names] for names in self._saved]
        for names, places in zip(self._saved, buckets, strict=True):
            bucket = torch.cat(places)
            self._started.append((bucket, places, self._reduce(bucket, names)))

    def _parts(self) -> dict[str, torch.Tensor] | None:
        """Return each parameter's values; None: they cannot be reduced by the saved buckets."""
        parts: dict[str, torch.Tensor] = {}
        for tensor, names, _ in self._held:
            sizes = [self._numel(name) for name in names]
            if tensor.is_sparse or sum(sizes) != tensor.numel():
                return None
            parts.update(zip(names, torch.split(tensor.view(-1), sizes), strict=True))
        if sorted(name for names in self._saved for name in names) != sorted(parts):
            return None
        for names in self._saved:
            if len({(parts[name].dtype, parts[name].device) for name in names}) > 1:
                return None
        return parts
