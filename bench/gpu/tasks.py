"""The timings of `make gpu`, of one kind of implementation in a process that may crash.

    python -m pycomm.bench.gpu.tasks JOB

JOB is JSON, the arguments of `main`. Rows go to the CSV one by one, so that a crash or a timeout
keeps all earlier ones, and errors of single calls to standard error. After an error that makes the
GPU's context unusable no later call is made.

Calls on several sets of buffers, larger in total than the L2 cache, are captured in one CUDA graph,
so that the launch overhead of Python is excluded. Events time each replay, and the result is the
median of many replays.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import pycomm
from pycomm.bench.common import accelerator, tables
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.implementations import Unavailable, implementation

KINDS = ("native", "nvrtc", "triton", "reference")
"""all that the contract test covers"""
TIMED = KINDS[:3]
"""those whose kernels are timed: plain torch makes dozens of passes"""
OPS = ("encode", "encode_feedback", "decode", "decode_add")
SPECS = (
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int8:rounding=stochastic",
    "int8:block=2048",
    "int4",
    "int4:rounding=stochastic",
    "int4:block=32",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "sign",
    "topk:0.01",
    "topk:0.01,values=int8,indices=int12",
    "eden:bits=2",
    "eden:bits=1",
    "lossless",
)
IN_TRITON = ("fp", "bf", "int", "sign")
"""how the names of those begin that have kernels in Triton"""


@dataclass(frozen=True)
class GpuRow:
    """One timed kernel or, where kind is "check", the result of one suite without times."""

    kind: str  # one of TIMED; or check: `codec` names the suite
    contract: str  # of a check: "767 passed"
    codec: str
    op: str = ""
    numel: int = 0
    bytes: int = 0  # minimum memory traffic of the kernel
    microseconds: float = 0.0
    gbps: float = 0.0
    copy_gbps: float = 0.0  # device-to-device copy of numel values, bytes read plus written
    share: float = 0.0  # gbps / copy_gbps
    method: str = ""  # graph, or events if it cannot be captured

    def __str__(self) -> str:
        speed = f"{self.microseconds:>10.1f} us {self.gbps:>6.0f} GB/s ({self.share:.0%})"
        return f"{self.kind:<9} {self.numel:>9} {self.codec:<46} {self.op:<16} {speed}"


def table(folder: Path, machine: dict[str, Any], name: str = "gpu") -> Path:
    """Return a CSV of a device: of the "NVIDIA H200" gpu-nvidia-h200.csv."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine["device"].lower()).strip("-")
    return folder / f"{name}-{slug}.csv"


def time_kernel(kind: str, numel: int, spec: str, op: str) -> GpuRow:
    """Time one call of a codec.

    Raises:
        ImportError, Unavailable: there is no such implementation here.
    """
    codec = pycomm.codec(spec)
    run = implementation(codec.name, kind, accelerator.kind())
    moved = bytes_moved(codec, op, numel)
    sets = sets_needed(moved, l2_bytes())
    seconds, method = measure([call_of(run, codec, op, numel) for _ in range(sets)])
    gbps, copy = 1e-9 * moved / seconds, time_copy(numel)
    times = (round(1e6 * seconds, 3), round(gbps, 1), round(copy, 1), round(gbps / copy, 3))
    return GpuRow(kind, "", codec.spec(), op, numel, moved, *times, method)


def is_broken() -> bool:
    """Return True after an error that every later call would report again."""
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        return True
    return False


def main(
    kind: str,
    numels: Sequence[int],
    specs: Sequence[str],
    folder: str,
    machine: dict[str, Any],
) -> int:
    """Time all calls of a kind; return 1 if one has failed.

    Args:
        kind: one of TIMED.
        numels: values per call.
        specs: the codecs.
        folder: of the CSV.
        machine: columns that are equal in all rows.
    """
    told: set[str] = set()
    for numel, spec, op in itertools.product(numels, specs, OPS):
        if kind == "triton" and not spec.startswith(IN_TRITON):
            continue  # it has no such kernels
        try:
            row = time_kernel(kind, numel, spec, op)
        except (ImportError, Unavailable) as error:
            problem = f"{kind} has no {spec}: {error}"
        except Exception as error:  # compilers and CUDA raise their own types
            problem = f"{kind} {spec} {op} of {numel}: {error}"
        else:
            tables.append(table(Path(folder), machine), [asdict(row) | machine])
            print(row, flush=True)
            continue
        if problem not in told:  # a missing codec fails in each call
            told.add(problem)
            print(f"problem: {problem}", file=sys.stderr, flush=True)
        if is_broken():
            print(f"problem: {kind}: this call broke the GPU's context", file=sys.stderr)
            break
    return 1 if told else 0


SECONDS = 0.08  # per kernel


def bytes_moved(codec: Codec, op: str, numel: int) -> int:
    """Return the bytes that must cross the memory bus: each input once, each output once.

    A variable payload is written completely, with zeros after the used part.
    """
    floats = {"encode": 1, "encode_feedback": 3, "decode": 1, "decode_add": 2}[op]
    return 4 * numel * floats + codec.encoded_bytes(numel)


def sets_needed(set_bytes: int, l2_bytes: int) -> int:
    """Return how many sets of buffers to cycle through, so that none is still in L2 when reused."""
    return max(2, -(-3 * l2_bytes // set_bytes) + 1)


def call_of(run: Any, codec: Codec, op: str, numel: int) -> Callable[[], None]:
    """Return one call of a codec on buffers of its own."""
    x = torch.randn(numel, device=accelerator.kind())
    payload = codec.encode(x)
    if op == "decode":
        return lambda: run.decode(codec, payload, x, add=False)
    if op == "decode_add":
        return lambda: run.decode(codec, payload, x, add=True)
    residual = torch.randn_like(x) * 0.01 if op == "encode_feedback" else None
    args = EncodeArgs(x, payload, residual, residual, RandomKey(seed=1), 0)
    return lambda: run.encode(codec, args)


def measure(calls: list[Callable[[], None]]) -> tuple[float, str]:
    """Return the median seconds per call, and the method of timing."""
    gpu = accelerator.api()
    stream = gpu.Stream()
    stream.wait_stream(gpu.current_stream())  # which may still fill the calls' buffers
    with gpu.stream(stream):
        for call in calls:  # compiles, loads and warms up
            call()
    stream.synchronize()
    try:
        graph = gpu.CUDAGraph()
        with gpu.graph(graph, stream=stream):
            for call in calls:
                call()
    except RuntimeError:
        gpu.synchronize()
        with gpu.stream(stream):
            return _median(lambda: [call() for call in calls], stream) / len(calls), "events"
    with gpu.stream(stream):
        return _median(graph.replay, stream) / len(calls), "graph"


def _median(round_of_calls: Callable[[], Any], stream: torch.Stream) -> float:
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 10 or (time.perf_counter() < end and len(times) < 1000):
        times.append(accelerator.seconds(round_of_calls, stream))
    return statistics.median(times[2:])


def l2_bytes() -> int:
    """Size of the device's L2 cache."""
    return int(accelerator.api().get_device_properties(0).L2_cache_size)


@cache
def time_copy(numel: int) -> float:
    """Return GB/s, bytes read and written, of a device-to-device copy."""
    sets = sets_needed(8 * numel, l2_bytes())
    pairs = [[torch.randn(numel, device=accelerator.kind()) for _ in range(2)] for _ in range(sets)]
    seconds, _ = measure([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
    return 8e-9 * numel / seconds


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
