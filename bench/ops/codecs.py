"""Codecs on one core against memcpy in the same run.

python -m pycomm.bench codecs
python -m pycomm.bench codecs --codec int8,int4:block=64 -b 4M -e 4M
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pycomm import _C
from pycomm.bench.common import arguments
from pycomm.bench.common.harness import Row, format_size
from pycomm.bench.common.report import Column, Report
from pycomm.bench.common.timing import calls_within, in_turns
from pycomm.bench.ops import coded
from pycomm.codecs import ALIASES
from pycomm.codecs import codec as parse_codec
from pycomm.straggler import quantile

SECONDS = 0.3  # of the slowest call at one size
FEWEST, MOST = 6, 5000  # timed calls
COLUMNS = (
    Column("codec", 40),
    Column("op", 20),
    Column("backend", 10),
    Column("size", 5, format_size),
    Column("time_p50", 10, ".1f", "p50(us)"),
    Column("algbw", 7, ".2f"),
    Column("copybw", 7, ".2f"),
    Column("of_copy", 7, ".2f", "of copy"),
    Column("ratio", 6, ".2f"),
    Column("err", 8, ".1e"),
)
DEFAULT = [
    *ALIASES,
    "int8:rounding=stochastic",
    "int4:rounding=stochastic",
    "mxfp4:scale=ceil",
    "sign",
    "topk:0.01",
    "topk:0.01,values=int8,indices=int12",
    "eden:bits=4",
    "lossless",
    "lossless:bfloat16",
]
Run = Callable[[], object]


def specs(texts: Sequence[str]) -> list[str]:
    """Return the codecs' distinct canonical texts; by default every codec and short name."""
    return list(dict.fromkeys(parse_codec(text).spec() for text in texts or DEFAULT))


class Calls:
    """The timed calls: memcpy and a codec's functions, on buffers of their own."""

    def __init__(self, codec: _C.Codec, numel: int) -> None:
        # The core takes raw addresses, which do not keep the arrays alive, so they are stored here.
        self.x = x = coded.gradient(numel, 0)
        self.decoded = np.zeros_like(x)
        self.residual = np.zeros_like(x)
        self.target = np.empty_like(x)
        self.payload = np.zeros(codec.encoded_bytes(numel), np.uint8)
        source, out, residual, code = (
            array.ctypes.data for array in (x, self.decoded, self.residual, self.payload)
        )
        feedback = {"error": (residual, residual)}
        self.runs: dict[str, Run] = {
            "copy": lambda: np.copyto(self.target, self.x),
            "encode": lambda: codec.encode(source, numel, code),
            "encode+residual": lambda: codec.encode(source, numel, code, **feedback),
            "decode": lambda: codec.decode(code, out, numel),
            "decode_add": lambda: codec.decode_add(code, out, numel),
        }


def time_calls(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Return microseconds of each call, in turns.

    Times are CPU times of this thread, which does all of the work, so other processes on the core
    do not count.
    """
    first = in_turns(runs, 1, clock=time.thread_time)
    count = calls_within(SECONDS, max(times[0] for times in first.values()), FEWEST, MOST)
    samples = in_turns(runs, count, clock=time.thread_time)
    return {name: [1e6 * sample for sample in times] for name, times in samples.items()}


def measure(spec: str, size: int) -> Iterator[Row]:
    """Yield the row of each of a codec's calls, relative to memcpy."""
    calls = Calls(_C.Codec(spec), size // 4)
    samples = time_calls(calls.runs)
    copy = size / quantile(samples.pop("copy"), 0.5) / 1e3
    err, wire_bytes = coded.one_coding(spec, size // 4, 0)
    for op, times in samples.items():
        p50 = quantile(times, 0.5)
        rate = size / p50 / 1e3
        yield Row(
            kind="codec",
            op=op,
            backend="native",
            ranks=1,
            size=size,
            count=size // 4,
            type="float32",
            codec=spec,
            iterations=len(times),
            time_p50=p50,
            time_p99=quantile(times, 0.99),
            algbw=rate,
            copybw=copy,
            of_copy=rate / copy,
            ratio=size / wire_bytes,
            err=err,
            wire_bytes=wire_bytes,
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser(prog="python -m pycomm.bench codecs", description=__doc__)
    arguments.add_sizes(parser, "1M", "64M", 64)
    what = f"of {', '.join(ALIASES)} and so on, with options (all)"
    kind = arguments.codecs
    parser.add_argument("--codec", type=kind, metavar="CODEC,...", help=what)
    arguments.add_csv(parser)
    options = parser.parse(argv)
    options.sizes = arguments.checked_sizes(parser, options)
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    chosen, sizes = specs(options.codec or []), options.sizes
    report = Report(COLUMNS, options)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        origin = report.origin
        report.header(f"codecs on one core of {origin.device}, {origin.simd}", origin.command)
        for size, spec in itertools.product(sizes, chosen):
            for row in measure(spec, size):
                report.add(row)
    finally:
        os.sched_setaffinity(0, cores)
    return 0
