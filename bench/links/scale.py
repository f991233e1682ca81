"""Start-up, memory, sockets and latency of many ranks on one machine, beside Gloo.

    python -m pycomm.bench links scale -p 8,16,32

`core-shm` and `core-tcp` are pycomm's core without torch; `pycomm-shm`, `pycomm-tcp` and `gloo` are
backends of torch.distributed. Each has its own processes, forked from this one, and they take turns
in `--rounds`. Values are per rank, as the maximum over the ranks: seconds to make the group and to
do a first all_reduce (start), and by how much the proportional set size (shared pages count by
their share) and the number of sockets grow by all of this. Times are medians on rank 0, in
microseconds.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import _C
from pycomm.bench.common.arguments import some_of
from pycomm.bench.common.timing import in_turns

# Name in torch.distributed (none: the core alone), and PYCOMM_TRANSPORT.
BACKENDS = {
    "core-shm": ("", "auto"),
    "core-tcp": ("", "tcp"),
    "pycomm-shm": ("pycomm", "auto"),
    "pycomm-tcp": ("pycomm", "tcp"),
    "gloo": ("gloo", ""),
}
SIZES = (8, 4096, 1 << 20)
TIMES = ("barrier_us", *(f"all_reduce_{size}_us" for size in SIZES))
HEAD = (
    "ranks     backend round start_s memory_KiB sockets barrier_us          8         4K         1M"
)
Call = Callable[[], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-p", dest="ranks", default="8,16,32", help="numbers of ranks, comma-separated")
    known = some_of("backend", BACKENDS)
    add("--backend", type=known, default=list(BACKENDS), help="comma-separated")
    add("--rounds", type=int, default=1, help="how often each takes its turn (1)")


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


def core_calls(rank: int, ranks: int, folder: str) -> list[Call]:
    group = _C.Communicator(_C.Store.file(folder), rank, ranks, _C.CommunicatorOptions())
    arrays = [np.ones(max(2, size // 4), np.float32) for size in SIZES]

    def all_reduce(x: np.ndarray) -> Call:
        return lambda: group.all_reduce(x.ctypes.data, x.size, _C.DType.float32, _C.ReduceOp.max)

    return [group.barrier, *(all_reduce(x) for x in arrays)]


def torch_calls(name: str, rank: int, ranks: int, store: Any) -> list[Call]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(name, store=store, rank=rank, world_size=ranks)
    tensors = [torch.ones(max(2, size // 4)) for size in SIZES]

    def all_reduce(tensor: torch.Tensor) -> Call:
        return lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX)

    return [dist.barrier, *(all_reduce(tensor) for tensor in tensors)]


def rank_main(
    report: Any, backend: str, rank: int, ranks: int, folder: str, port: int, gate: Any
) -> None:
    torch_name, transport = BACKENDS[backend]
    os.environ |= {"PYCOMM_TRANSPORT": transport, "GLOO_SOCKET_IFNAME": "lo"}
    memory, sockets = proportional_kib(), socket_count()
    store = None
    if torch_name:  # before the clock starts: a failed connect is tried again after seconds
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    gate.wait()
    begin = time.perf_counter()
    calls = (
        torch_calls(torch_name, rank, ranks, store)
        if torch_name
        else core_calls(rank, ranks, folder)
    )
    calls[1]()
    found = {"start_s": time.perf_counter() - begin}
    few = max(3, 64 // ranks)
    for name, call in zip(TIMES, calls, strict=True):
        samples = in_turns({name: call}, few if name == TIMES[-1] else 10 * few)[name]
        found[name] = 1e6 * statistics.median(samples)
    gate.wait()
    found["memory_kib"] = proportional_kib() - memory
    found["sockets"] = socket_count() - sockets
    gate.wait()
    report.send(found)
    report.close()
    os._exit(0)  # skip the exit of 32 interpreters, which takes long


def measure(backend: str, ranks: int) -> dict[str, float]:
    """Run one set of ranks; return the largest value of each measure, but rank 0's times."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(ranks)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, backend, rank, ranks, folder, port, gate)
            process = context.Process(target=rank_main, args=given)
            process.start()
            theirs.close()
            started.append((process, ours))
        results = [ours.recv() for _, ours in started]
        for process, _ in started:
            process.join()
    most = {name: max(r[name] for r in results) for name in ("start_s", "memory_kib", "sockets")}
    return most | {name: results[0][name] for name in TIMES}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of ranks, round and backend."""
    if any(BACKENDS[name][0] for name in options.backend):
        import pycomm.backend  # noqa: F401  (with torch; once, before the ranks are forked)
    for ranks in map(int, options.ranks.split(",")):
        for turn in range(options.rounds):
            for backend in options.backend:
                yield {"ranks": ranks, "backend": backend, "round": turn, **measure(backend, ranks)}


def line(row: dict[str, Any]) -> str:
    cells = [f"{row['ranks']:>5} {row['backend']:>11} {row['round']:>5}"]
    cells += [f"{row['start_s']:>7.3f} {row['memory_kib']:>10.0f} {row['sockets']:>7.0f}"]
    return " ".join([*cells, *(f"{row[name]:>10.1f}" for name in TIMES)])
