"""Rates of collectives over links, near and far, beside Gloo and iperf3.

    python -m pycomm.bench links --rate 1gbit,10gbit --round-trip 0 --control reno,bbr
    python -m pycomm.bench links --round-trip 30ms,100ms,200ms --loss 0,0.1%,1%
    python -m pycomm.bench links --paths 1gbit,1gbit --paths 1gbit,100mbit

In each lab of two nodes pycomm and Gloo run each call in turns, then iperf3 fills the link both
ways with 1, 2, 4 and 8 streams, of which the best is kept. Bytes per second are those that a rank
sends: the whole tensor in all_reduce (with a codec, its payload), sendrecv and, from its root, in
broadcast, half of it in the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm import _C
from pycomm.bench.common.arguments import (
    Parser,
    add_csv,
    checked,
    counts,
    listed,
    rates,
    some_of,
)
from pycomm.bench.common.arguments import count as whole
from pycomm.bench.common.report import Column, Report
from pycomm.bench.common.timing import in_turns
from pycomm.bench.lab.jobs import ask
from pycomm.bench.lab.namespaces import Netlab
from pycomm.bench.lab.rates import parse as parse_rates
from pycomm.bench.lab.wan import lab_of, round_trip
from pycomm.bench.ops.backends import coded_run
from pycomm.bench.ops.operations import OPERATIONS, make_case
from pycomm.plan.options import count
from pycomm.units import parse_share

CODEC = "quant:bits=8"
CODED = "_int8"
"""ending of the operations with this codec, which groups of pycomm have"""
STREAMS = (1, 2, 4, 8)
SENT = dict.fromkeys(("all_reduce", "all_reduce_int8", "broadcast", "sendrecv"), 1.0)
SENT |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0.5)
"""the operations, each with the share of the tensor that a rank of two sends"""
BACKENDS = ("pycomm", "gloo")
COLUMNS = (
    *(Column("rate", 8), Column("control", -7), Column("round_trip_ms", 13), Column("loss", 6)),
    *(Column("operation", -15), Column("bytes", 9), Column("backend", -8)),
    *(Column("ms", 8), Column("mbit_per_s", 10), Column("how", -10)),
)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m pycomm.bench links", description=__doc__)
    add = parser.add_argument
    lists = {
        "rate": (rates, "200mbit", "of each node"),
        "round-trip": (listed(checked(round_trip)), "30ms,100ms,200ms", "of the link"),
        "loss": (listed(checked(parse_share)), "0,0.1%,1%", "of packets"),
        "control": (listed(), "reno", "TCP's congestion controls"),
    }
    for name, (kind, default, what) in lists.items():
        told = f"comma-separated, {what} ({default})".replace("%", "%%")
        add(f"--{name}", type=kind, default=default, help=told)
    for name, known in (("operation", SENT), ("backend", BACKENDS)):
        what = f"comma-separated ({','.join(known)})"
        add(f"--{name}", type=some_of(name, known), default=list(known), help=what)
    what = "instead: rates of several links between two nodes, without delay: 1gbit,100mbit"
    add("--paths", type=checked(parse_rates), action="append", default=[], help=what)
    what = "of a call's tensor (8192,16777216)"
    add("--bytes", type=counts, default="8192,16777216", help=what)
    add("--repeats", type=count, default=5, help="calls of each backend, in turns (5)")
    add("--iperf-time", type=whole, default=5, help="seconds of each run of iperf3, 0: none (5)")
    add_csv(parser)
    options = parser.parse(argv)
    if options.paths:
        parser.refuse(argv, "--paths", "rate", "round_trip", "loss", "control", "iperf_time")
    if (least := min(options.bytes)) < 8:
        parser.error(f"--bytes {least}: want at least 8, a value for each of two ranks")
    if "pycomm" not in options.backend and all(name.endswith(CODED) for name in options.operation):
        parser.error(f"--backend gloo has no {', '.join(options.operation)}")
    return options


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    report = Report(COLUMNS, options, hidden=())
    report.header()
    for row in run(options):
        report.add(row)
    return 0


def iperf3(lab: Netlab, streams: int, time_s: int, control: str) -> float:
    """Return the bit/s of the slower direction while both are full, or 0 if iperf3 fails."""
    server = subprocess.Popen(
        lab.kept(0, ["iperf3", "-s", "-1"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(0.5)
        words = ["iperf3", "-c", lab.master, "-P", str(streams), "--bidir", "-J"]
        words += ["-t", str(time_s), "-O", "2", "-C", control]
        done = subprocess.run(
            lab.kept(1, words), capture_output=True, text=True, timeout=time_s + 60
        )
        end = json.loads(done.stdout).get("end", {})
        ways = ("sum_received", "sum_received_bidir_reverse")
        return min((float(end.get(way, {}).get("bits_per_second", 0)) for way in ways), default=0)
    except (ValueError, subprocess.TimeoutExpired):
        return 0.0
    finally:
        server.kill()
        server.wait()


def best_iperf3(lab: Netlab, time_s: int) -> tuple[float, str]:
    """Return the most bit/s that iperf3 reaches, and how; 0: it is not there, or failed."""
    if not shutil.which("iperf3"):
        return 0.0, ""
    return max(
        (iperf3(lab, streams, time_s, control), f"{streams} x {control}")
        for control in ("bbr", "cubic")
        for streams in STREAMS
    )


def measure(lab: Netlab, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one lab: each call and backend, and the best of iperf3.

    Raises:
        Failed: a rank failed.
    """
    paths = range(lab.rate.count(",") + 1)
    env = {"PYCOMM_INTERFACE": ",".join(f"eth{path}" for path in paths)}
    words = options.operation, options.bytes, options.repeats, options.backend
    for one in ask(lab, time_calls, *words, env=env):
        operation, size, backend = one["operation"], one["bytes"], one["backend"]
        coded = operation.endswith(CODED)
        payload = _C.Codec(CODEC).encoded_bytes(size // 4) if coded else size
        middle = statistics.median(one["seconds"])
        rate = 8 * payload * SENT[operation] / middle / 1e6
        yield _row(operation, size, backend, f"{1e3 * middle:.1f}", rate)
    if options.iperf_time and not options.paths:
        most, how = best_iperf3(lab, options.iperf_time)
        if most:
            yield _row("stream", 0, "iperf3", "", most / 1e6) | {"how": how}


def _row(operation: str, size: int, backend: str, ms: str, rate: float) -> dict[str, Any]:
    row = {"operation": operation, "bytes": size, "backend": backend, "how": "", "ms": ms}
    return row | {"mbit_per_s": f"{rate:.1f}"}


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all links."""
    lists = (options.rate, options.control, options.round_trip, options.loss)
    links = [[paths, "reno", "0", "0"] for paths in options.paths]
    for rate, control, trip, loss in links or itertools.product(*lists):
        ms = f"{1e3 * round_trip(trip):g}"
        far = "" if ms == "0" and loss == "0" else f"@{trip}@{loss}"
        with lab_of(2, rate + far, congestion=control) as lab:
            # Of the nodes, which have another one where the kernel lacks what was asked for.
            place = {"rate": rate, "control": lab.congestion, "round_trip_ms": ms}
            yield from (place | {"loss": loss} | row for row in measure(lab, options))


# ------------------------------------------------------------------------ ranks


def begin(_: object = None) -> None:
    """Wait for an instant that rank 0 chooses. The nodes of a lab share one clock.

    A barrier would release ranks half a round trip apart. A rank that hears of the instant too late
    begins later, and the others wait for it.
    """
    before = time.monotonic()
    dist.barrier()
    lead = 0.25 + 2 * (time.monotonic() - before)  # one packet may be lost and repeated
    instant = torch.tensor([time.monotonic() + lead], dtype=torch.float64)
    dist.broadcast(instant, 0)
    time.sleep(max(0.0, instant.item() - time.monotonic()))


def slowest(calls: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Return the seconds of each call on the slowest rank, `count` of each. Collective."""
    found = {}
    for name, samples in in_turns(calls, count, settle=0, before=begin).items():
        most = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = most.tolist()
    return found


def time_calls(
    operations: list[str], sizes: list[int], repeats: int, backends: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of the calls of each operation and size, by backend. Collective."""
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", timeout=limit)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.new_group(backend=name, timeout=limit) for name in backends}
    for size, operation in itertools.product(sizes, operations):
        op = OPERATIONS[operation.removesuffix(CODED)]
        case = make_case(op, size, dtype="float32", redop="sum", rank=rank, ranks=ranks)
        assert case is not None
        calls = {}
        for name, group in groups.items():
            x, y = case.buffers()
            if not operation.endswith(CODED):
                call = op.torch(group, case, x, y)
            elif name == "pycomm":
                call = coded_run(group, case, x, y, CODEC)
            else:
                continue
            try:
                call()
            except RuntimeError:
                if name == "gloo":  # which lacks some
                    continue
                raise
            calls[name] = call
        for name, times in slowest(calls, repeats).items():
            yield {"operation": operation, "bytes": size, "backend": name, "seconds": times}
    dist.barrier()
    for group in groups.values():
        dist.destroy_process_group(group)
    dist.destroy_process_group()
