"""What one rank measures: verification, then iterations of all backends in turns."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pycomm import _C
from pycomm.bench import backends, harness
from pycomm.bench.backends import Backend
from pycomm.bench.harness import Row
from pycomm.bench.operations import OPERATIONS, Array, Case, Run, make_case
from pycomm.bench.report import Report

BLOCKS = 10  # of iterations per backend, taken in turns
SECONDS = 0.5  # that all iterations of one backend at one size take, unless -n says how many
FEWEST, MOST = 20, 5000  # iterations


@dataclass
class Variant:
    """A backend with a codec, at one size: what is timed in turns."""

    backend: Backend
    codec: str
    spec: str
    run: Run
    buffers: tuple[Array, Array] | None = None
    """what `run` works on: the core takes addresses, which keep nothing alive"""
    wrong: int = 0
    err: float | None = None
    sent: int | None = None
    samples: list[float] = field(default_factory=list)


class Rank:
    """What one rank does. The rows are made and printed on rank 0."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int, folder: Path) -> None:
        self.options, self.rank, self.ranks = options, rank, ranks
        # Reads the clocks of all ranks; in a group of its own, so that it works beside any backend.
        control = _C.CommunicatorOptions()
        control.group = "bench-control"
        self.control = _C.Communicator(_C.Store.file(str(folder)), rank, ranks, control)
        self.backends = backends.connect(options.backend, folder, rank, ranks)
        self.specs = {codec: _spec(codec) for codec in options.codec}
        if options.pin:
            _pin(rank, ranks)

    def close(self) -> None:
        for backend in self.backends:
            backend.close()
        del self.control

    def agree(self, values: Array, op: str) -> Array:
        """Reduce float64 values over the ranks."""
        values = np.ascontiguousarray(values, np.float64)
        member = _C.ReduceOp.__members__[op]
        self.control.all_reduce(values.ctypes.data, values.size, _C.DType.float64, member)
        return values

    def run(self, report: Report) -> bool:
        """Measure everything; True if every result was right."""
        right = True
        for size in self.options.sizes:
            case = make_case(
                OPERATIONS[self.options.op],
                size,
                dtype=self.options.dtype,
                redop=self.options.redop,
                rank=self.rank,
                ranks=self.ranks,
            )
            if case is None:
                report.note(f"# {harness.format_size(size)}: too small for {self.ranks} ranks")
                continue
            for row in self.measure(case, report):
                report.add(row)
                right = right and not row.wrong
        return right

    def measure(self, case: Case, report: Report) -> list[Row]:
        variants = self.variants(case)
        for variant in variants:
            if self.options.check:
                self.verify(case, variant)
        self.make_time_buffers(case, variants)
        for variant in variants:
            self.time(variant, max(1, self.options.warmup))
        counts = [self.iterations(variant) for variant in variants]
        for block in range(BLOCKS):
            for variant, count in zip(variants, counts, strict=True):
                share = count * (block + 1) // BLOCKS - count * block // BLOCKS
                before = variant.backend.sent_bytes()
                variant.samples += self.time(variant, share + 1)[1:]  # the first has cold caches
                after = variant.backend.sent_bytes()
                if before is not None and after is not None:
                    variant.sent = (variant.sent or 0) + after - before
            report.advance(f"{harness.format_size(case.size)}, block {block + 1} of {BLOCKS}")
        return [self.row(case, variant) for variant in variants]

    def variants(self, case: Case) -> list[Variant]:
        found = []
        for backend in self.backends:
            for codec in self.options.codec:
                coded = codec != "none"
                if coded and (backend.name != "pycomm" or case.dtype != "float32"):
                    continue
                found.append(Variant(backend, codec, self.specs[codec], run=lambda: None))
        return found

    def verify(self, case: Case, variant: Variant) -> None:
        """One run on values whose result is known. Sets `wrong` and, with a codec, `err`."""
        x, y = variant.backend.buffers(case)
        run = variant.backend.prepare(case, x, y, variant.spec)
        if variant.codec == "none":
            x[:] = case.stored(case.inputs(self.rank))
            run()
            ours = not case.op.to_root or self.rank == 0
            wrong = int(np.count_nonzero(y != case.expected())) if ours else 0
        else:
            x[:] = _gradient(case.count, self.rank)
            run()
            mean = sum(_gradient(case.count, r).astype(np.float64) for r in range(self.ranks))
            mean /= self.ranks
            variant.err = float(np.linalg.norm(x - mean) / np.linalg.norm(mean))
            # All ranks must have the same bits, and an error of 1 would be that of sending nothing.
            checksum = _C.crc32c(x.tobytes())
            low, high = (self.agree(np.array([checksum]), op)[0] for op in ("min", "max"))
            wrong = 0 if low == high and variant.err < 1 else case.count
        variant.wrong = int(self.agree(np.array([wrong]), "sum")[0])

    def make_time_buffers(self, case: Case, variants: Sequence[Variant]) -> None:
        """Zeros for exact sums, which would overflow in time; an average of gradients does not."""
        for variant in variants:
            x, y = variant.backend.buffers(case)
            if variant.codec != "none":
                x[:] = _gradient(case.count, self.rank)
            variant.run = variant.backend.prepare(case, x, y, variant.spec)
            variant.buffers = (x, y)

    def time(self, variant: Variant, count: int) -> list[float]:
        """Microseconds of each of `count` iterations, on its slowest rank."""
        run, clock = variant.run, time.perf_counter_ns
        samples = np.empty(count)
        gc.disable()
        self.control.barrier()
        for i in range(count):
            begin = clock()
            run()
            samples[i] = clock() - begin
        gc.enable()
        return [float(sample) / 1e3 for sample in self.agree(samples, "max")]

    def iterations(self, variant: Variant) -> int:
        if self.options.iterations:
            return int(self.options.iterations)
        once = harness.quantile(self.time(variant, 5), 0.5)  # equal on all ranks
        return max(FEWEST, min(MOST, int(SECONDS * 1e6 / once)))

    def row(self, case: Case, variant: Variant) -> Row:
        p50 = harness.quantile(variant.samples, 0.5)
        rate = case.size / p50 / 1e3
        payload = 1.0
        if variant.codec != "none":
            payload = case.size / _C.Codec(variant.spec).encoded_bytes(case.count)
        return Row(
            kind="time",
            op=case.op.name,
            backend=variant.backend.name,
            ranks=self.ranks,
            size=case.size,
            count=case.count,
            type=case.dtype,
            redop="avg" if variant.codec != "none" else case.redop,
            codec=variant.codec,
            iterations=len(variant.samples),
            time_p50=p50,
            time_p99=harness.quantile(variant.samples, 0.99),
            algbw=rate / payload,
            busbw=rate / payload * case.op.bus_factor(self.ranks),
            effbw=rate,
            wrong=variant.wrong if self.options.check else None,
            ratio=payload,
            err=variant.err,
            wire_bytes=None
            if variant.sent is None
            else variant.sent / (len(variant.samples) + BLOCKS),
            connection=variant.backend.describe(),
        )


def _gradient(count: int, rank: int) -> Array:
    """What a codec meets in training: values near a normal distribution, different on each rank."""
    return np.random.default_rng(rank).standard_normal(count, dtype=np.float32)


def _spec(codec: str) -> str:
    """The core's text of a codec. Short names are pycomm.codecs', which needs torch."""
    canonical = "+" not in codec and codec.partition(":")[0] in _C.codec_names()
    if codec == "none" or canonical:
        return codec
    from pycomm.codecs import codec as parse

    return parse(codec).spec()


def _pin(rank: int, ranks: int) -> None:
    """Each rank's main thread on a core of its own, where there are enough.

    After the backends have started, so that their own threads stay free to run anywhere.
    """
    cores = sorted(os.sched_getaffinity(0))
    local = int(os.environ.get("LOCAL_RANK", rank))
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) <= len(cores):
        os.sched_setaffinity(0, {cores[local]})
