"""All-reduce timings of several ranks on one GPU; each rank is a thread with its own stream.

    CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER python -m pycomm.bench.gpu.collectives

One GPU's memory takes the place of the links between GPUs, so its bandwidth is the limit. A line
reports the traffic of all ranks over the time of the slowest, relative to a device-to-device copy.
The output is JSON, a line for each algorithm or its error, and `make gpu` adds it to its CSV. On
the CPU (`--device cpu`), for tests, the same kernels run on threads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

import pycomm
from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.bench.gpu.timing import time_copy

RANKS = (2, 4, 8)
CODECS = ("", "int8", "int4")  # "": exact
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 20
DEADLINE = 60.0  # seconds for all rounds of one configuration


@dataclass(frozen=True)
class MeasuredLine:
    """The result of one algorithm and codec."""

    ranks: int
    codec: str
    algo: str
    dtype: str
    numel: int
    bytes: int  # read and written by all ranks together
    microseconds: float
    gbps: float


def traffic(
    ranks: int, numel: int, codec: str, algo: str, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes that all ranks read and write; see docs/algorithms.md, "On a GPU".

    For an exact all-reduce of b bytes on n ranks, each rank reads its input and publishes it (b).
    one_shot then reads n b and writes b; two_shot reads its share of all ranks (b), writes b/n,
    then reads and writes b. With a payload of k bytes, a rank reads b and writes k; reads k and
    writes k/n; reads k and writes b. The float32 copy of 16-bit values is not counted, since it
    need not leave the cache.
    """
    b = dtype.itemsize * numel
    if codec:
        k = pycomm.codec(codec).encoded_bytes(numel)
        return ranks * (2 * b + 3 * k + k // ranks)
    if algo == "one_shot":
        return ranks * (3 * b + ranks * b)
    return ranks * (5 * b + b // ranks)


class GpuRank:
    """A thread's tensor, stream and group. All memory is allocated before the rendezvous."""

    def __init__(
        self,
        store: _C.Store,
        rank: int,
        ranks: int,
        numel: int,
        device: str,
        codec: str,
        dtype: torch.dtype,
    ) -> None:
        self.cuda = device == "cuda"
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.tensor = torch.randn(numel, device=device).to(dtype)
        self.pieces = _C.Pieces()
        if codec:
            self.pieces.add(numel, _C.Codec(pycomm.codec(codec).spec()))
        # Space for the codecs, at most a float32 copy of all values.
        self.scratch = torch.empty(8 * numel if codec else 0, dtype=torch.uint8, device=device)
        if self.cuda:
            torch.cuda.synchronize()
        size = {} if self.cuda else {"staging_bytes": 1 << 20}
        index = torch.cuda.current_device() if self.cuda else -1
        self.group = _C.DeviceGroup(store, rank, ranks, index, timeout=DEADLINE, **size)

    def call(self, codec: str, algo: str) -> Callable[[], None]:
        x, numel, on = self.tensor.data_ptr(), self.tensor.numel(), {}
        dtype = core_dtype(self.tensor.dtype)
        if self.stream is not None:
            on = {"stream": self.stream.cuda_stream}
        if not codec:
            op = _C.ReduceOp.avg
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
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.group.barrier(stream=self.stream.cuda_stream)
                begin.record(self.stream)
                call()
                end.record(self.stream)
                self.stream.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
            self.group.check()
        return times


def measure(
    ranks: int, numel: int, codec: str, algo: str, dtype: torch.dtype, device: str
) -> MeasuredLine:
    """Time one configuration, on ranks that are threads.

    Raises:
        pycomm.Error: the error of the first rank that failed.
    """
    store = _C.Store.local()
    found: list[Any] = [None] * ranks

    def main(rank: int) -> None:
        try:
            one = GpuRank(store, rank, ranks, numel, device, codec, dtype)
            try:
                found[rank] = one.seconds(one.call(codec, algo))
            finally:
                one.group.close()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    for rank, result in enumerate(found):
        if not isinstance(result, list):
            raise result or pycomm.Error(f"rank {rank} of {ranks} has not ended")
    slowest = [max(times) for times in zip(*found, strict=True)]
    seconds = statistics.median(slowest[ROUNDS // 4 :])
    moved = traffic(ranks, numel, codec, algo, dtype)
    name, times = (
        str(dtype).removeprefix("torch."),
        (round(1e6 * seconds, 3), 1e-9 * moved / seconds),
    )
    return MeasuredLine(ranks, codec, algo, name, numel, moved, *times)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.gpu.collectives", description="Times all-reduces on one GPU."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--numel", type=int, default=1 << 24, help="values of a rank")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if options.device == "cuda":
        print(json.dumps({"copy_gbps": time_copy(options.numel)}), flush=True)
    for ranks in options.ranks:
        for codec, dtype in product(CODECS, DTYPES):
            for algo in ("",) if codec else ("one_shot", "two_shot"):
                try:
                    line = measure(ranks, options.numel, codec, algo, dtype, options.device)
                    print(json.dumps(asdict(line)), flush=True)
                except (pycomm.Error, RuntimeError) as error:
                    problem = f"{ranks} ranks, {codec or algo} of {dtype}: {error}"
                    print(json.dumps({"problem": problem}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
