"""Times all-reduces of several ranks on one GPU: each is a thread with a stream of its own.

    CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER python -m pycomm.bench.gpu_collectives

One GPU's memory carries what links between GPUs would, so the limit is its bandwidth: a line is the
traffic of all ranks over the time of the slowest, as a share of a device-to-device copy. Written as
JSON, a line for each way or for what went wrong with it; `make gpu` puts them into its CSV. On the
CPU (`--device cpu`) the same kernels run on threads; that is for tests.
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
from pycomm.bench.gpu_timing import time_copy

RANKS = (2, 4, 8)
CODECS = ("", "int8", "int4")  # "": exact
DTYPES = (torch.float32, torch.bfloat16)
ROUNDS = 20
DEADLINE = 60.0  # seconds for all rounds of one line


@dataclass(frozen=True)
class Line:
    """One way of all ranks to reduce."""

    ranks: int
    codec: str
    algo: str
    dtype: str
    numel: int
    bytes: int  # that all ranks together read and write
    microseconds: float
    gbps: float


def traffic(
    ranks: int, numel: int, codec: str, algo: str, dtype: torch.dtype = torch.float32
) -> int:
    """Bytes that all ranks read and write in memory; see docs/algorithms.md, "On a GPU".

    Exact, of b bytes: a rank reads its b and shows them (b); one_shot then reads n b and writes b;
    two_shot reads b, its share of all ranks, writes b/n, and reads and writes b. With k bytes of
    payload: reads b, writes k; reads k, writes k/n; reads k and writes b. The float32 of 16-bit
    values is not counted: it need not leave the cache.
    """
    b = dtype.itemsize * numel
    if codec:
        k = pycomm.codec(codec).encoded_bytes(numel)
        return ranks * (2 * b + 3 * k + k // ranks)
    if algo == "one_shot":
        return ranks * (3 * b + ranks * b)
    return ranks * (5 * b + b // ranks)


class Rank:
    """A thread's tensor, stream and group. All memory is there before ranks meet."""

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
        # Of codecs, and float32 of all values at most.
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
        """Each round's time on our stream, from the moment when all ranks have come."""
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


def measure(ranks: int, numel: int, codec: str, algo: str, dtype: torch.dtype, device: str) -> Line:
    """Time one way, on ranks that are threads.

    Raises:
        pycomm.Error: what the first rank to fail says.
    """
    store = _C.Store.local()
    found: list[Any] = [None] * ranks

    def main(rank: int) -> None:
        try:
            one = Rank(store, rank, ranks, numel, device, codec, dtype)
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
    return Line(ranks, codec, algo, name, numel, moved, *times)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.gpu_collectives", description="Times all-reduces on one GPU."
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
