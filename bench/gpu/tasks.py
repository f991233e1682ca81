"""The timing tasks of `make gpu`, run one after the other in a process that may crash.

    python -m pycomm.bench.gpu.tasks < tasks.json

workers.py starts this program. It writes a line of JSON when a task begins, then one for each
row or problem. After an error that makes the GPU's context unusable the process exits, and a new
one continues.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

import pycomm
from pycomm.bench.gpu.results import GpuRow
from pycomm.bench.gpu.timing import (
    bytes_moved,
    call_of,
    conversion_of,
    l2_bytes,
    measure,
    sets_needed,
    time_copy,
    topk_of_torch,
)
from pycomm.codecs import convert
from pycomm.codecs.implementations import Unavailable, implementation

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
CONVERSIONS = (
    (torch.float32, torch.float32),  # unscale and clip, which torch does in separate passes
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),  # the end of a compressed all-reduce
)
REFERENCE_NUMEL = 1 << 22  # plain torch makes dozens of passes and temporaries
CONVERT, TOPK = "convert", "torch.topk"
BROKEN = 3  # exit status: no later task can run in this process

copy_rate = cache(time_copy)


@dataclass(frozen=True)
class Task:
    """One codec's calls, all conversions, or torch.topk, by one implementation at one size."""

    kind: str
    what: str  # a codec, CONVERT or TOPK
    numel: int

    def __str__(self) -> str:
        return f"{self.kind} {self.what} of {self.numel}"


def tasks_of(kinds: tuple[str, ...], numels: tuple[int, ...]) -> list[Task]:
    """Return all tasks."""
    tasks = []
    for kind in kinds:
        for numel in (REFERENCE_NUMEL,) if kind == "reference" else numels:
            tasks += [Task(kind, what, numel) for what in (CONVERT, *SPECS)]
    return tasks + [Task("torch", TOPK, numel) for numel in numels]


def perform(task: Task) -> Iterator[GpuRow | str]:
    """Yield a row for each call, or an error text for a call that fails."""
    if task.what == TOPK:
        calls = [("", lambda: time_topk(task.numel))]
    elif task.what == CONVERT:
        calls = [
            (f"{source} to {target}", lambda pair=(source, target): time_conversion(task, *pair))
            for source, target in CONVERSIONS
        ]
    else:
        name = pycomm.codec(task.what).name
        try:
            implementation(name, task.kind, "cuda")
        except (ImportError, Unavailable) as reason:
            yield f"{task.kind} has no {name}: {reason}"
            return
        calls = [(op, lambda op=op: time_kernel(task, op)) for op in OPS]
    for name, call in calls:
        try:
            yield call()
        except Exception as error:  # compilers and CUDA raise their own types
            yield f"{task.kind} {task.what} {name}: {error}"


def time_kernel(task: Task, op: str) -> GpuRow:
    """Time one call of a codec."""
    codec, numel = pycomm.codec(task.what), task.numel
    run = implementation(codec.name, task.kind, "cuda")
    moved = bytes_moved(codec, op, numel)
    sets = sets_needed(moved, l2_bytes())
    seconds, method = measure([call_of(run, codec, op, numel) for _ in range(sets)])
    return _row(task.kind, codec.spec(), op, numel, moved, seconds, method)


def time_conversion(task: Task, source: torch.dtype, target: torch.dtype) -> GpuRow:
    """Time `pycomm.convert` from one dtype to another."""
    run, numel = convert.implementation(task.kind, "cuda"), task.numel
    moved = numel * (source.itemsize + target.itemsize)
    calls = range(sets_needed(moved, l2_bytes()))
    seconds, method = measure([conversion_of(run, source, target, numel) for _ in calls])
    name = f"{source} to {target}".replace("torch.", "")
    return _row(task.kind, name, "convert", numel, moved, seconds, method)


def time_topk(numel: int) -> GpuRow:
    """Time torch.topk, the baseline of topk."""
    seconds, method = measure([topk_of_torch(numel) for _ in range(2)])
    return _row("torch", "torch.topk 1 %", "topk", numel, 4 * numel, seconds, method)


def _row(
    kind: str, codec: str, op: str, numel: int, moved: int, seconds: float, method: str
) -> GpuRow:
    gbps, copy = 1e-9 * moved / seconds, copy_rate(numel)
    times = (round(1e6 * seconds, 3), round(gbps, 1), round(copy, 1), round(gbps / copy, 3))
    return GpuRow(kind, "", codec, op, numel, moved, *times, method)


def is_broken() -> bool:
    """Return True after an error that every later call would report again."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def main() -> int:
    tasks = [Task(**task) for task in json.load(sys.stdin)]
    for number, task in enumerate(tasks):
        print(json.dumps({"task": number}), flush=True)
        for found in perform(task):
            message = {"problem": found} if isinstance(found, str) else {"row": vars(found)}
            print(json.dumps(message), flush=True)
        if is_broken():
            return BROKEN
    return 0


if __name__ == "__main__":
    sys.exit(main())
