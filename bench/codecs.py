"""Codecs on one core against memcpy in the same run.

python -m pycomm.bench codecs
python -m pycomm.bench codecs --codec int8,int4:block=64 -b 4M -e 4M
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import time
from collections.abc import Callable, Sequence

import numpy as np

from pycomm import _C
from pycomm.bench import harness
from pycomm.bench.harness import Origin, Row
from pycomm.bench.report import Report
from pycomm.codecs import ALIASES, CODECS
from pycomm.codecs import codec as parse_codec

BLOCKS = 10
SECONDS = 0.05  # of one block
COLUMNS = (
    ("codec", 40, ""),
    ("op", 15, ""),
    ("size", 5, ""),
    ("time_p50", 10, ".1f"),
    ("algbw", 7, ".2f"),
    ("copybw", 7, ".2f"),
    ("of_copy", 7, ".2f"),
    ("ratio", 6, ".2f"),
    ("err", 8, ".1e"),
)
DEFAULT = [*ALIASES, "int8:rounding=stochastic", "int4:rounding=stochastic"]

Run = Callable[[], object]


def specs(texts: Sequence[str]) -> list[str]:
    """Canonical texts of the codecs, once each; none: every codec and short name."""
    covered = {parse_codec(text).name for text in DEFAULT}
    chosen = texts or [*DEFAULT, *(name for name in CODECS if name not in covered)]
    return list(dict.fromkeys(parse_codec(text).spec() for text in chosen))


class Calls:
    """What is timed: memcpy and a codec's calls, on buffers of their own."""

    def __init__(self, codec: _C.Codec, numel: int) -> None:
        # The core takes addresses, which keep nothing alive: the arrays stay here.
        self.x = x = np.random.default_rng(0).standard_normal(numel, dtype=np.float32)
        self.decoded = np.zeros_like(x)
        self.residual = np.zeros_like(x)
        self.target = np.empty_like(x)
        self.payload = np.zeros(codec.encoded_bytes(numel), np.uint8)
        source, out, owed, code = (
            array.ctypes.data for array in (x, self.decoded, self.residual, self.payload)
        )
        feedback = {"residual": owed, "new_residual": owed}
        plain = {}
        if codec.agrees:
            self.agreed = np.zeros(-(-numel // codec.granule), np.float32)
            codec.measure(source, numel, self.agreed.ctypes.data)
            plain = {"agreed": self.agreed.ctypes.data}
        self.runs: dict[str, Run] = {
            "copy": lambda: np.copyto(self.target, self.x),
            "encode": lambda: codec.encode(source, numel, code, **plain),
            "encode+residual": lambda: codec.encode(source, numel, code, **plain, **feedback),
            "decode": lambda: codec.decode(code, out, numel),
            "decode_add": lambda: codec.decode_add(code, out, numel),
        }

    def error(self) -> float:
        """The relative L2 error of one coding."""
        self.runs["encode"]()
        self.runs["decode"]()
        return float(np.linalg.norm(self.decoded - self.x) / np.linalg.norm(self.x))


def time_in_turns(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Microseconds per call, block by block in turns, so that all meet the same machine."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    clock = time.perf_counter_ns
    gc.disable()
    for block in range(BLOCKS + 1):
        for name, run in runs.items():
            end = clock() + SECONDS * 1e9
            while True:
                begin = clock()
                run()
                done = clock()
                if block > 0:  # the first warms up
                    samples[name].append((done - begin) / 1e3)
                if done >= end:
                    break
    gc.enable()
    return samples


def measure(spec: str, size: int, report: Report) -> None:
    codec, numel = _C.Codec(spec), size // 4
    calls = Calls(codec, numel)
    err = calls.error()
    samples = time_in_turns(calls.runs)
    copy = size / harness.quantile(samples.pop("copy"), 0.5) / 1e3
    for name, times in samples.items():
        p50 = harness.quantile(times, 0.5)
        rate = size / p50 / 1e3
        report.add(
            Row(
                kind="codec",
                op=name,
                backend="native",
                ranks=1,
                size=size,
                count=numel,
                type="float32",
                codec=spec,
                iterations=len(times),
                time_p50=p50,
                time_p99=harness.quantile(times, 0.99),
                algbw=rate,
                copybw=copy,
                of_copy=rate / copy,
                ratio=size / codec.encoded_bytes(numel),
                err=err,
                wire_bytes=codec.encoded_bytes(numel),
            )
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pycomm.bench codecs", description=__doc__)
    add = parser.add_argument
    add("-b", dest="first", type=harness.size_argument, default="1M", help="smallest size (1M)")
    add("-e", dest="last", type=harness.size_argument, default="64M", help="largest size (64M)")
    add("-f", dest="factor", type=float, default=64, help="factor between sizes (64)")
    add("--codec", default="", help="comma-separated; options of one with semicolons (all)")
    add("-J", "--json", help="write all rows to this file")
    add("--csv", help="append all rows to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    texts = [text.replace(";", ",") for text in options.codec.split(",") if text]
    chosen = specs(texts)
    sizes = list(harness.sizes(options.first, options.last, options.factor))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench", "codecs", *argv]))
    report = Report(COLUMNS, len(chosen) * len(sizes))
    with report.progress():
        report.header(f"codecs on one core of {origin.device}, {origin.simd}", origin.command)
        for size in sizes:
            for spec in chosen:
                measure(spec, size, report)
                report.advance(spec)
    report.save(origin, json_path=options.json, csv_path=options.csv)
    return 0
