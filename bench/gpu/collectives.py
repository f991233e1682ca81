"""All-reduces of several ranks on one GPU; each rank is a thread with its own stream.

One GPU's memory takes the place of the links between GPUs, so its bandwidth is the limit: what
counts is the traffic of all ranks over the time of the slowest, relative to a device-to-device
copy. On the CPU, for tests, the same kernels run on threads.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import pycomm
from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.bench.common import accelerator

RANKS = (2, 4, 8)
CODECS = ("", "int8", "int4")  # "": exact
DTYPES = (torch.float32, torch.bfloat16)
NUMEL = 1 << 24  # values of a rank
ROUNDS = 20
DEADLINE = 60.0  # seconds for all rounds of one configuration
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""Ranks' kernels wait for each other: each stream needs its own queue, and eager loading."""


@dataclass(frozen=True)
class GpuCase:
    """One all-reduce."""

    ranks: int
    codec: str
    """ "": exact"""
    algo: str
    dtype: torch.dtype
    numel: int = NUMEL
    device: str = "cuda"
    """another: ranks are threads of the processor"""

    @property
    def op(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"all_reduce of {self.ranks} {self.algo or 'coded'} {name}"

    @property
    def traffic(self) -> int:
        """Return the bytes that all ranks read and write; see docs/algorithms.md, "On a GPU".

        For an exact all-reduce of b bytes on n ranks, each rank reads its input and publishes it
        (b). one_shot then reads n b and writes b; two_shot reads its share of all ranks (b), writes
        b/n, then reads and writes b. With a payload of k bytes, a rank reads b and writes k; reads
        k and writes k/n; reads k and writes b. The float32 copy of 16-bit values is not counted,
        since it need not leave the cache.
        """
        b = self.dtype.itemsize * self.numel
        if self.codec:
            k = pycomm.codec(self.codec).encoded_bytes(self.numel)
            return self.ranks * (2 * b + 3 * k + k // self.ranks)
        if self.algo == "one_shot":
            return self.ranks * (3 * b + self.ranks * b)
        return self.ranks * (5 * b + b // self.ranks)


def cases(numel: int, device: str) -> Iterator[GpuCase]:
    """Yield all cases, of so many values at the most."""
    for ranks, codec, dtype in product(RANKS, CODECS, DTYPES):
        for algo in ("",) if codec else ("one_shot", "two_shot"):
            yield GpuCase(ranks, codec, algo, dtype, min(numel, NUMEL), device)


class GpuRank:
    """A thread's tensor, stream and group. All memory is allocated before the rendezvous."""

    def __init__(self, store: _C.Store, rank: int, case: GpuCase) -> None:
        self.case, cuda = case, case.device == "cuda"
        self.stream = torch.cuda.Stream() if cuda else None
        self.tensor = torch.randn(case.numel, device=case.device).to(case.dtype)
        self.pieces = _C.Pieces()
        if case.codec:
            self.pieces.add(case.numel, _C.Codec(pycomm.codec(case.codec).spec()))
        # Space for the codecs, at most a float32 copy of all values.
        room = 8 * case.numel if case.codec else 0
        self.scratch = torch.empty(room, dtype=torch.uint8, device=case.device)
        if cuda:
            torch.cuda.synchronize()
        size = {} if cuda else {"staging_bytes": 1 << 20}
        index = torch.cuda.current_device() if cuda else -1
        self.group = _C.DeviceGroup(store, rank, case.ranks, index, timeout=DEADLINE, **size)

    def call(self) -> Callable[[], None]:
        x, numel, on = self.tensor.data_ptr(), self.tensor.numel(), {}
        dtype = core_dtype(self.tensor.dtype)
        if self.stream is not None:
            on = {"stream": self.stream.cuda_stream}
        if not self.case.codec:
            op, algo = _C.ReduceOp.avg, self.case.algo
            return lambda: self.group.all_reduce(x, numel, dtype, op, algo=algo, **on)
        scratch = (self.scratch.data_ptr(), self.scratch.numel())
        return lambda: self.group.all_reduce_coded(
            x, self.pieces, dtype=dtype, scratch=scratch, **on
        )

    def seconds(self, call: Callable[[], None]) -> list[float]:
        """Return each round's time on this stream, from the moment when all ranks have arrived."""
        times = []
        for _ in range(ROUNDS):
            if self.stream is None:
                self.group.barrier()
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            else:
                self.group.barrier(stream=self.stream.cuda_stream)
                times.append(accelerator.seconds(call, self.stream))
            self.group.check()
        return times


def measure(case: GpuCase) -> float:
    """Return the median seconds of the slowest rank, of ranks that are threads.

    Raises:
        pycomm.Error: the error of the first rank that failed.
    """
    store = _C.Store.local()
    found: list[Any] = [None] * case.ranks

    def main(rank: int) -> None:
        try:
            one = GpuRank(store, rank, case)
            try:
                found[rank] = one.seconds(one.call())
            finally:
                one.group.close()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(case.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    for rank, result in enumerate(found):
        if not isinstance(result, list):
            raise result or pycomm.Error(f"rank {rank} of {case.ranks} has not ended")
    slowest = [max(times) for times in zip(*found, strict=True)]
    return statistics.median(slowest[ROUNDS // 4 :])
