"""Ranks of a device group: threads, each with a GPU or, on the CPU, with shared memory.

A job gets a Rank and works on numpy arrays that it has put on the rank's device, so that one suite
runs on both. On the CPU the kernels are the GPU's, compiled by the C++ compiler.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from pycomm import _C, _test
from tests.ranks import good, in_processes, on_threads

Job = Callable[["Rank"], Any]
ARENA = 64 << 20
# Slots are a few kilobytes, so larger data take many rounds.
OPTIONS = {"timeout": 20.0, "blocks": 3, "staging_bytes": 3 * 2 * 4096, "coded_bytes": 1 << 16}


class Buffer:
    """The bytes of an array in a rank's device memory, at an offset from an aligned address."""

    def __init__(self, rank: Rank, array: np.ndarray, shift: int = 0) -> None:
        self.rank, self.dtype, self.shape = rank, array.dtype, array.shape
        flat = np.frombuffer(array.tobytes(), dtype=np.uint8)
        self.shift, self.bytes = shift, flat.size
        if rank.cuda:
            self.memory = rank.take(flat.size + 16)
            rank.copy(self.memory[shift : shift + flat.size], flat.copy())
            start = self.memory.data_ptr()
        else:
            room = np.zeros(flat.size + 80, dtype=np.uint8)
            self.memory = room[-room.ctypes.data % 16 :]
            self.memory[shift : shift + flat.size] = flat
            start = self.memory.ctypes.data
        self.address = start + shift

    def get(self) -> np.ndarray:
        self.rank.synchronize()
        flat = self.memory[self.shift : self.shift + self.bytes]
        if self.rank.cuda:
            flat = self.rank.fetch(flat)
        return np.frombuffer(flat.tobytes(), dtype=self.dtype).reshape(self.shape)


class Rank:
    """One rank: `group` is its device group, `stream` the stream of its work."""

    def __init__(self, store: _C.Store, rank: int, size: int, cuda: bool, options: dict[str, Any]):
        self.rank, self.size, self.cuda, self.stream = rank, size, cuda, 0
        if cuda:
            import torch

            self.torch_stream = torch.cuda.Stream()
            self.stream = self.torch_stream.cuda_stream
            # Memory is allocated before the rendezvous: allocations may wait for peers' kernels.
            self.arena, self.used = torch.zeros(ARENA, dtype=torch.uint8, device="cuda"), 0
            # So may a copy of memory that is not pinned, while it holds the driver's lock.
            self.pinned = torch.empty(ARENA, dtype=torch.uint8, pin_memory=True)
            torch.cuda.synchronize()
        index = 0 if cuda else -1
        self.group = _test.DeviceGroup(store, rank, size, index, **{**OPTIONS, **options})

    def put(self, array: np.ndarray, shift: int = 0) -> Buffer:
        return Buffer(self, array, shift)

    def take(self, size: int) -> Any:
        begin = self.used
        self.used += -(-size // 256) * 256
        assert self.used <= ARENA, "the job needs a larger arena"
        return self.arena[begin : begin + size]

    def pinned_for(self, tensor: Any) -> Any:
        """Return pinned memory with the place of a tensor in the arena."""
        begin = tensor.data_ptr() - self.arena.data_ptr()
        return self.pinned[begin : begin + tensor.numel()]

    def copy(self, to: Any, array: np.ndarray) -> None:
        import torch

        pinned = self.pinned_for(to)
        pinned.copy_(torch.from_numpy(array))
        with torch.cuda.stream(self.torch_stream):
            to.copy_(pinned, non_blocking=True)

    def fetch(self, tensor: Any) -> np.ndarray:
        import torch

        pinned = self.pinned_for(tensor)
        with torch.cuda.stream(self.torch_stream):
            pinned.copy_(tensor, non_blocking=True)
        self.torch_stream.synchronize()
        return pinned.numpy().copy()

    def call(self, op: str, *args: Any, **kwargs: Any) -> None:
        coded = op.endswith("_coded")
        run = self.group.run_coded if coded else self.group.run
        run(op.removesuffix("_coded"), *args, **kwargs, stream=self.stream)

    def all_reduce(self, x: Buffer, op: str = "sum", dtype: str = "float32", **more: Any) -> None:
        """Reduce a buffer in place."""
        kind = _C.DType.__members__[dtype], _C.ReduceOp.__members__[op]
        self.call("all_reduce", x.address, x.address, x.shape[0], *kind, **more)

    def synchronize(self) -> None:
        if self.cuda:
            self.torch_stream.synchronize()
        self.group.check()


@contextlib.contextmanager
def joined(store: _C.Store, rank: int, size: int, cuda: bool, options: Any) -> Iterator[Rank]:
    one = Rank(store, rank, size, cuda, options)
    try:
        yield one
    finally:
        one.group.close()


def attempt(size: int, job: Job, *, cuda: bool = False, **options: Any) -> list[Any]:
    """Run ``job(rank)`` on ranks that are threads; a rank's error is its outcome."""
    store = _C.Store.local()

    def main(rank: int) -> Any:
        with joined(store, rank, size, cuda, options) as one:
            return job(one)

    return on_threads(range(size), main, 60)


def run(size: int, job: Job, *, cuda: bool = False, **options: Any) -> list[Any]:
    """Run as `attempt` does, but raise the first error of any rank."""
    return good(attempt(size, job, cuda=cuda, **options))


def _of_process(
    folder: str, size: int, cuda: bool, job: Job, options: dict[str, Any], rank: int
) -> Any:
    with joined(_C.Store.file(folder), rank, size, cuda, options) as one:
        return job(one)


def run_processes(size: int, job: Job, *, cuda: bool = False, **options: Any) -> list[Any]:
    """Run as `run` does, on processes."""
    with tempfile.TemporaryDirectory() as folder:
        main = partial(_of_process, folder, size, cuda, job, options)
        return in_processes(size, main, 100, "spawn" if cuda else "fork")
