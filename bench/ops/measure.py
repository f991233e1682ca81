"""Measurement on one rank: verification, then all backends in turns, iteration by iteration."""

from __future__ import annotations

import argparse
import itertools
import os
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pycomm import _C
from pycomm.bench.common import harness
from pycomm.bench.common.harness import Row
from pycomm.bench.common.report import Report
from pycomm.bench.common.timing import calls_within, in_turns
from pycomm.bench.ops import backends, coded
from pycomm.bench.ops.operations import OPERATIONS, Case, Run, make_case
from pycomm.communicator import Communicator
from pycomm.env import host
from pycomm.straggler import quantile

SECONDS = 0.5  # time budget of the slowest backend at one size, unless -n is given
FEWEST, MOST = 20, 5000  # iterations


@dataclass
class Variant:
    """A backend with a codec, at one size: the unit that is timed in turns."""

    backend: backends.Backend
    codec: str
    case: Case
    run: Run
    buffers: tuple[Tensor, Tensor] | None = None
    """the memory of `run`, kept alive here since the core takes raw addresses"""
    wrong: int = 0
    err: float | None = None
    sent: float | None = None
    """bytes per call, on the rank that sends most"""
    samples: list[float] = field(default_factory=list)
    """microseconds"""
    cpu_seconds: float = 0.0
    """of all ranks, per call"""


class Rank:
    """The measurement on one rank. Rank 0 creates and prints the rows."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int, store: _C.Store) -> None:
        self.options, self.rank, self.ranks = options, rank, ranks
        # Collects the clocks of all ranks, in a separate group that works beside any backend.
        self.control = Communicator(store, rank, ranks, group="bench-control")
        place = store, rank, ranks, options.device
        self.backends = [backends.connect(name, *place) for name in options.backend]
        self._cores = os.sched_getaffinity(0)
        self._pin()

    def close(self) -> None:
        """Leave the group, and give back the cores that the main thread had."""
        os.sched_setaffinity(0, self._cores)
        for backend in self.backends:
            backend.close()
        self.control.close()

    def _pin(self) -> None:
        """Pin each rank's main thread to a core of its own, if the machine has enough.

        This runs after the backends have started, so that their own threads stay unpinned. Nodes
        that are namespaces share a machine, so LOCAL_RANK would not be unique.
        """
        machine = [0.0] * self.ranks
        machine[self.rank] = zlib.crc32(host().encode())
        machines = self.agree(machine, "sum")
        here = [rank for rank, one in enumerate(machines) if one == machine[self.rank]]
        cores = sorted(os.sched_getaffinity(0))
        if len(here) <= len(cores):
            os.sched_setaffinity(0, {cores[here.index(self.rank)]})

    def agree(self, values: Sequence[float], op: str) -> list[float]:
        """Reduce float64 values over the ranks."""
        found = array("d", values)
        self.control.all_reduce(found, op)
        return found.tolist()

    def cases(self) -> Iterator[tuple[int, Case | None]]:
        """Yield every size, dtype and reduction; None where a size is too small for the ranks."""
        op, options = OPERATIONS[self.options.op], self.options
        redops = options.redops if op.reduces else [""]
        for dtype, redop, size in itertools.product(options.dtypes, redops, options.sizes):
            place = {"rank": self.rank, "ranks": self.ranks}
            yield size, make_case(op, size, dtype=dtype, redop=redop, **place)

    def run(self, report: Report) -> bool:
        """Measure everything; return True if every result was correct."""
        right = True
        for size, case in self.cases():
            if case is None:
                report.note(f"# {harness.format_size(size)}: too small for {self.ranks} ranks")
                continue
            for row in self.measure(case, report):
                report.add(row)
                right = right and not row.wrong
        return right

    def explain(self, report: Report) -> None:
        """Print which algorithm each case takes, and why; ranks far from each other measure their
        links in their first call."""
        cores = [backend for backend in self.backends if isinstance(backend, backends.Core)]
        for backend in cores:
            x = torch.zeros(1)
            at = x.data_ptr()
            backend.communicator.run("all_reduce", at, at, 1, _C.DType.float32)
        for (_, case), backend, codec in itertools.product(self.cases(), cores, self.options.codec):
            if case is not None:
                name = " ".join([harness.format_size(case.size), case.dtype, backend.name, codec])
                report.note(f"{name.removesuffix(' none')}: {backend.explain(case, codec)}")

    def measure(self, case: Case, report: Report) -> list[Row]:
        variants = self.variants(case, report)
        if not variants:
            return []
        for variant in variants:
            for _ in range(self.options.check):
                self.verify(variant)
        self.make_time_buffers(variants)
        slowest = max(self.warm_up(variant) for variant in variants)
        count = self.options.iterations
        count = count or calls_within(SECONDS, slowest, FEWEST, MOST)
        self.time_in_turns(variants, count)
        return [self.row(variant) for variant in variants]

    def variants(self, case: Case, report: Report) -> list[Variant]:
        found = []
        for backend in self.backends:
            refused = backend.refuses(case)
            if refused:
                report.note(f"# {harness.format_size(case.size)}: {refused}")
                continue
            for codec in self.options.codec:
                if codec != "none" and not (
                    case.op.name in backend.coded and case.dtype in coded.ROUNDING
                ):
                    continue
                found.append(Variant(backend, codec, case, lambda: None))
        return found

    def verify(self, variant: Variant) -> None:
        """Run once on values with a known result. Adds to `wrong`; with a codec, sets `err`."""
        case = variant.case
        backend = variant.backend
        x, y = case.buffers(backend.allocate)
        run = backend.prepare(case, x, y, variant.codec)
        exact = variant.codec == "none"
        x.copy_(case.inputs(self.rank) if exact else coded.inputs(case, self.rank))
        run()
        result = y.cpu().double()
        if exact:
            ours = not case.op.to_root or self.rank == 0
            wrong = int((result != case.expected().double()).sum()) if ours else 0
            variant.wrong += int(self.agree([wrong], "sum")[0])
        else:
            variant.wrong += self.verify_coded(case, variant, result)

    def verify_coded(self, case: Case, variant: Variant, result: Tensor) -> int:
        """Return 0, or the count of all elements if the error is too large or ranks differ."""
        want = coded.expected(case)
        distances = [float((result - want).square().sum()), float(want.square().sum())]
        error, norm = self.agree(distances, "sum")
        variant.err = (error / norm) ** 0.5
        most = self.agree([coded.most_error(case, variant.codec)], "max")[0]
        same = True
        if case.op.name != "reduce_scatter":  # its result differs by rank
            checksum = _C.crc32c(result.numpy().tobytes())
            low, high = (self.agree([checksum], op)[0] for op in ("min", "max"))
            same = bool(low == high)
        return 0 if same and variant.err <= most else case.count

    def make_time_buffers(self, variants: Sequence[Variant]) -> None:
        """Allocate buffers: zeros for exact sums, which would overflow, gradients for averages."""
        for variant in variants:
            case = variant.case
            x, y = case.buffers(variant.backend.allocate)
            variant.run = variant.backend.prepare(case, x, y, variant.codec)
            if variant.codec != "none":
                x.copy_(coded.inputs(case, self.rank))
            variant.buffers = (x, y)

    def warm_up(self, variant: Variant) -> float:
        """Warm up without a fixed count; return seconds per call, equal on all ranks."""
        count = max(1, self.options.warmup)
        variant.run()  # a group's first call also exchanges what the ranks know of links
        before = variant.backend.sent_bytes()
        self.control.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            variant.run()
        seconds = (time.perf_counter() - begin) / count
        after = variant.backend.sent_bytes()
        if before is not None and after is not None:
            variant.sent = float(self.agree([(after - before) / count], "max")[0])
        return float(self.agree([seconds], "max")[0])

    def time_in_turns(self, variants: Sequence[Variant], count: int) -> None:
        """Time `count` iterations of each variant, one of them in a turn."""
        cpus = dict.fromkeys(range(len(variants)), 0.0)

        def before(v: int) -> None:
            self.control.barrier()
            cpus[v] -= time.process_time()

        def after(v: int) -> None:
            cpus[v] += time.process_time()

        runs = {v: variant.run for v, variant in enumerate(variants)}
        walls = in_turns(runs, count, before=before, after=after)
        for v, variant in enumerate(variants):
            variant.samples = [1e6 * sample for sample in self.agree(walls[v], "max")]
            variant.cpu_seconds = float(self.agree([cpus[v]], "sum")[0]) / (2 * count)

    def row(self, variant: Variant) -> Row:
        case = variant.case
        p50 = quantile(variant.samples, 0.5)
        rate = case.size / p50 / 1e3
        exact = variant.codec == "none"
        ratio = 1.0 if exact else coded.ratio(case, variant.codec)
        averages = case.op.reduces and not exact
        return Row(
            kind="time",
            op=case.op.name,
            backend=variant.backend.name,
            ranks=self.ranks,
            size=case.size,
            count=case.count,
            type=case.dtype,
            redop="avg" if averages else case.redop,
            codec=variant.codec,
            place="in" if case.op.in_place else "out",
            iterations=len(variant.samples),
            time_p50=p50,
            time_p99=quantile(variant.samples, 0.99),
            time_device=variant.run.time() if isinstance(variant.run, backends.TimedRun) else None,
            algbw=rate / ratio,
            busbw=rate / ratio * case.op.bus_factor(self.ranks),
            effbw=rate,
            wrong=variant.wrong if self.options.check else None,
            ratio=ratio,
            err=variant.err,
            wire_bytes=variant.sent,
            cpu_seconds=variant.cpu_seconds,
            connection=variant.backend.describe(),
        )
