"""Start-up, memory, sockets and latency of many ranks on one machine, beside Gloo.

    python -m pycomm.bench.scale -p 8,16,32 --csv scale.csv

`core-shm` and `core-tcp` are pycomm's core without torch; `pycomm-shm`, `pycomm-tcp` and `gloo` are
backends of torch.distributed. Each has its own processes, forked from this one, and they take turns
in `--rounds`. Values are per rank, as the maximum over the ranks:

* start: seconds to make the group and to do a first all_reduce
* memory: growth of the proportional set size (shared pages count by their share) by all of this
* sockets: growth of their number

Times are medians on rank 0, in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import _C
from pycomm.bench.common import harness, tables
from pycomm.bench.common.harness import Origin

# Name in torch.distributed (none: the core alone), and PYCOMM_TRANSPORT.
BACKENDS = {
    "core-shm": ("", "auto"),
    "core-tcp": ("", "tcp"),
    "pycomm-shm": ("pycomm", "auto"),
    "pycomm-tcp": ("pycomm", "tcp"),
    "gloo": ("gloo", ""),
}
SIZES = (8, 4096, 1 << 20)
MEASURES = ("start_s", "memory_kib", "sockets", "barrier_us")
COLUMNS = ("ranks", "backend", "round", *MEASURES, *(f"all_reduce_{size}_us" for size in SIZES))
ALL_REDUCES = COLUMNS[-len(SIZES) :]
Result = dict[str, float]
Call = Callable[[], Any]


def proportional_kib() -> int:
    gc.collect()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise ValueError("the kernel does not tell the Pss")


def socket_count() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd") / name
        count += path.is_symlink() and os.readlink(path).startswith("socket:")
    return count


def core_calls(rank: int, ranks: int, folder: str) -> tuple[Call, list[Call]]:
    group = _C.Communicator(_C.Store.file(folder), rank, ranks, _C.CommunicatorOptions())
    arrays = [np.ones(max(2, size // 4), np.float32) for size in SIZES]

    def all_reduce(x: np.ndarray) -> Call:
        return lambda: group.all_reduce(x.ctypes.data, x.size, _C.DType.float32, _C.ReduceOp.max)

    return group.barrier, [all_reduce(x) for x in arrays]


def torch_store(rank: int, ranks: int, port: int) -> Any:
    """Return the rendezvous store. (After a failed connect, torch waits up to seconds to retry.)"""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, ranks, rank == 0)


def torch_calls(name: str, rank: int, ranks: int, store: Any) -> tuple[Call, list[Call]]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(name, store=store, rank=rank, world_size=ranks)
    tensors = [torch.ones(max(2, size // 4)) for size in SIZES]

    def all_reduce(tensor: torch.Tensor) -> Call:
        return lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX)

    return dist.barrier, [all_reduce(tensor) for tensor in tensors]


def median_us(call: Call, count: int) -> float:
    samples = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples) * 1e6


def rank_main(backend: str, rank: int, ranks: int, folder: str, port: int, gate: Any) -> Result:
    torch_name, transport = BACKENDS[backend]
    os.environ |= {"PYCOMM_TRANSPORT": transport, "GLOO_SOCKET_IFNAME": "lo"}
    memory, sockets = proportional_kib(), socket_count()
    store = torch_store(rank, ranks, port) if torch_name else None
    gate.wait()
    begin = time.perf_counter()
    if torch_name:
        barrier, calls = torch_calls(torch_name, rank, ranks, store)
    else:
        barrier, calls = core_calls(rank, ranks, folder)
    calls[0]()
    result: Result = {"start_s": time.perf_counter() - begin}
    few = max(3, 64 // ranks)
    for name, call in zip(ALL_REDUCES, calls, strict=True):
        call()
        result[name] = median_us(call, few if name == ALL_REDUCES[-1] else 10 * few)
    result["barrier_us"] = median_us(barrier, 10 * few)
    gate.wait()
    result["memory_kib"] = proportional_kib() - memory
    result["sockets"] = socket_count() - sockets
    gate.wait()
    return result


def target(report: Any, *args: Any) -> None:
    report.send(rank_main(*args))
    report.close()
    os._exit(0)  # skip the exit of 32 interpreters, which takes long


def measure(backend: str, ranks: int) -> Result:
    """Run one set of ranks; return the largest value of each measure, but rank 0's times."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(ranks)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            args = (theirs, backend, rank, ranks, folder, port, gate)
            process = context.Process(target=target, args=args)
            process.start()
            theirs.close()
            started.append((process, ours))
        results = [ours.recv() for _, ours in started]
        for process, _ in started:
            process.join()
    most = {name: max(r[name] for r in results) for name in ("start_s", "memory_kib", "sockets")}
    return results[0] | most


def show(row: dict[str, Any]) -> None:
    cells = [f"{row['ranks']:>5} {row['backend']:>11} {row['round']:>5}"]
    cells += [f"{row['start_s']:>7.3f} {row['memory_kib']:>10.0f} {row['sockets']:>7.0f}"]
    cells += [f"{row[name]:>10.1f}" for name in ("barrier_us", *ALL_REDUCES)]
    print(" ".join(cells), flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.scale", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("-p", dest="ranks", default="8,16,32", help="numbers of ranks, comma-separated")
    add("--backend", default=",".join(BACKENDS), help="comma-separated")
    add("--rounds", type=int, default=1, help="how often each takes its turn (1)")
    add("--csv", help="append all rows to this file")
    options = parser.parse_args(argv)
    backends = options.backend.split(",")
    unknown = [name for name in backends if name not in BACKENDS]
    if unknown:
        parser.error(f"no backend is called {unknown[0]!r}: want some of {', '.join(BACKENDS)}")
    if any(BACKENDS[name][0] for name in backends):
        import pycomm.backend  # noqa: F401  (with torch; once, before the ranks are forked)
    origin = vars(Origin.here(shlex.join(["python", "-m", "pycomm.bench.scale", *argv])))
    sizes = "".join(f" {harness.format_size(size):>10}" for size in SIZES)
    print(f"ranks     backend round start_s memory_KiB sockets barrier_us{sizes}")
    for ranks in map(int, options.ranks.split(",")):
        for turn in range(options.rounds):
            for backend in backends:
                row = {"ranks": ranks, "backend": backend, "round": turn}
                row |= measure(backend, ranks)
                show(row)
                if options.csv:
                    record = {name: row[name] for name in COLUMNS} | origin
                    tables.append(Path(options.csv), [record])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
