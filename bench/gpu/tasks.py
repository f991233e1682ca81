"""The timings of `make gpu`, of one kind of implementation in a process that may crash.

    python -m pycomm.bench.gpu.tasks JOB

JOB is JSON, the arguments of `main`. Rows go to the CSV one by one, so that a crash or a timeout
keeps all earlier ones, and errors of single calls to standard error. After an error that makes the
GPU's context unusable the process exits with `BROKEN`.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import pycomm
from pycomm.bench.common import accelerator, tables
from pycomm.bench.gpu.timing import (
    bytes_moved,
    call_of,
    l2_bytes,
    measure,
    sets_needed,
    time_copy,
)
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
BROKEN = 3  # exit status: no later call can run in this process

copy_rate = cache(time_copy)


@dataclass(frozen=True)
class GpuRow:
    """One timed kernel or, where kind is "check", the result of one suite without times."""

    kind: str  # one of TIMED; or check: `codec` names the suite
    contract: str  # the contract test's result for this kind in this run: "767 passed"
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


Timed = Callable[[], GpuRow]


def calls_of(
    kind: str, numels: Sequence[int], specs: Sequence[str] = SPECS
) -> Iterator[tuple[str, Timed]]:
    """Yield the name of each call of a kind, and what times it."""
    for numel, spec, op in itertools.product(numels, specs, OPS):
        if (kind, spec) != ("triton", "lossless"):  # which has no kernels there
            yield f"{spec} {op} of {numel}", partial(time_kernel, kind, numel, spec, op)


def time_kernel(kind: str, numel: int, spec: str, op: str) -> GpuRow:
    """Time one call of a codec.

    Raises:
        ImportError, Unavailable: there is no such implementation here.
    """
    codec = pycomm.codec(spec)
    run = implementation(codec.name, kind, accelerator.kind())
    moved = bytes_moved(codec, op, numel)
    sets = sets_needed(moved, l2_bytes())
    timed = measure([call_of(run, codec, op, numel) for _ in range(sets)])
    return _row(kind, codec.spec(), op, numel, moved, *timed)


def _row(
    kind: str, codec: str, op: str, numel: int, moved: int, seconds: float, method: str
) -> GpuRow:
    gbps, copy = 1e-9 * moved / seconds, copy_rate(numel)
    times = (round(1e6 * seconds, 3), round(gbps, 1), round(copy, 1), round(gbps / copy, 3))
    return GpuRow(kind, "", codec, op, numel, moved, *times, method)


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
    contract: str,
    folder: str,
    machine: dict[str, Any],
) -> int:
    """Time all calls of a kind; return 1 if one has failed.

    Args:
        kind: one of TIMED.
        numels: values per call.
        specs: the codecs.
        contract: what the contract test has said of this kind.
        folder: of the CSV.
        machine: columns that are equal in all rows.
    """
    told: set[str] = set()
    for name, call in calls_of(kind, numels, specs):
        try:
            row = call()
        except (ImportError, Unavailable) as error:
            problem = f"{kind} has no {name.partition(' ')[0]}: {error}"
        except Exception as error:  # compilers and CUDA raise their own types
            problem = f"{kind} {name}: {error}"
        else:
            tables.append(
                table(Path(folder), machine), [asdict(row) | {"contract": contract} | machine]
            )
            print(row, flush=True)
            continue
        if problem not in told:  # a missing codec fails in each call
            told.add(problem)
            print(f"problem: {problem}", file=sys.stderr, flush=True)
        if is_broken():
            return BROKEN
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
