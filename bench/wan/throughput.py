"""Rates of collectives over links with delay and loss, beside Gloo and iperf3.

    python -m pycomm.bench.wan.throughput --quick
    python -m pycomm.bench.wan.throughput --round-trip 30ms,100ms,200ms --loss 0,0.1%,1%
    python -m pycomm.bench.wan.throughput --paths 1gbit,1gbit --paths 1gbit,100mbit

In each lab (lab.py) of two nodes, pycomm and Gloo run each call in turns (transfer.py), then iperf3
fills the link both ways with 1, 2, 4 and 8 streams; its best is kept. Medians are printed, and
written with the command that made them. Bytes per second are those that a rank sends: for two ranks
the whole tensor in all_reduce (with a codec, its payload) and, from its root, in broadcast, half of
it in the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycomm import _C
from pycomm.bench.common import tables
from pycomm.bench.common.arguments import some_of
from pycomm.bench.common.harness import Origin
from pycomm.bench.lab.base import Unavailable, wait
from pycomm.bench.lab.namespaces import Netlab
from pycomm.bench.wan.lab import WanLab
from pycomm.bench.wan.shape import Shape, changed, seconds
from pycomm.bench.wan.steps import Failed
from pycomm.bench.wan.transfer import CODEC

STREAMS = (1, 2, 4, 8)
SENT = {"all_reduce": 1.0, "all_reduce_int8": 1.0, "broadcast": 1.0}
SENT |= dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), 0.5)
"""the operations, each with the share of the tensor that a rank of two sends"""
BACKENDS = ("pycomm", "gloo")


def iperf3(lab: WanLab, streams: int, time_s: int, control: str) -> float:
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


def best_iperf3(lab: WanLab, time_s: int) -> tuple[float, str]:
    """Return the most bit/s that iperf3 reaches, and how."""
    if not shutil.which("iperf3"):
        return 0.0, "not installed"
    found = [
        (iperf3(lab, streams, time_s, control), f"{streams} x {control}")
        for control in ("bbr", "cubic")
        for streams in STREAMS
    ]
    return max(found)


def measure(
    lab: Netlab, operations: str, sizes: str, repeats: int, backends: str, link: str = ""
) -> dict[str, list[float]]:
    """Return the seconds of each call by "operation/bytes/backend"; pycomm paces itself to `link`.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        file = Path(folder) / "found"
        words = [str(file), operations, sizes, str(repeats), backends]
        command = [sys.executable, "-m", "pycomm.bench.wan.transfer", *words]
        env = dict(os.environ) | {"PYCOMM_INTERFACE": interfaces_of(lab)}
        env |= {"PYCOMM_LINK": link} if link else {}
        status = wait(lab.start(command, env=env, stdout=printed, stderr=printed))
        lab.stop()
        if status != 0 or not file.exists():
            printed.seek(0)
            raise Failed(f"a rank failed:\n{printed.read().decode(errors='replace')}")
        found: dict[str, list[float]] = json.loads(file.read_text())
        return found


def interfaces_of(lab: Netlab) -> str:
    """Return all interfaces of a node, as PYCOMM_INTERFACE has them."""
    return ",".join(f"eth{link}" for link in range(lab.rate.count(",") + 1))


def rates(lab: Netlab, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each call and backend, and the best of iperf3.

    Raises:
        Failed: a rank failed.
    """
    operations, backends = ",".join(options.operation), ",".join(options.backend)
    calls = (operations, options.bytes, options.repeats, backends, options.link)
    for key, took in measure(lab, *calls).items():
        operation, size, backend = key.split("/")
        if options.link and backend == "pycomm":
            backend += f", link {options.link}"
        middle = statistics.median(took)
        payload = int(size)
        if operation == "all_reduce_int8":
            payload = _C.Codec(CODEC).encoded_bytes(payload // 4)
        bits = 8 * payload * SENT[operation]
        yield {
            "operation": operation,
            "bytes": int(size),
            "backend": backend,
            "ms": f"{1e3 * middle:.1f}",
            "mbit_per_s": f"{bits / middle / 1e6:.1f}",
        }
    if options.iperf_time and isinstance(lab, WanLab):
        most, how = best_iperf3(lab, options.iperf_time)
        yield {
            "operation": f"stream ({how})",
            "bytes": 0,
            "backend": "iperf3",
            "ms": "0.0",
            "mbit_per_s": f"{most / 1e6:.1f}",
        }


def show(row: Mapping[str, Any]) -> None:
    print(
        f"{row['rate']:>8}  {row['round_trip_ms']:>7} ms  {row['loss']:>5}"
        f"  {row['operation']:<19}  {row['bytes']:>9}  {row['backend']:<7}"
        f"  {row['ms']:>7}  {row['mbit_per_s']:>7}",
        flush=True,
    )


def measure_paths(paths: str, options: argparse.Namespace, origin: Origin) -> None:
    """Measure two nodes with several links each; Gloo uses the first one."""
    place = {"rate": paths, "round_trip_ms": "0", "loss": "0"}
    records = []
    with Netlab(2, paths) as lab:
        for row in rates(lab, options):
            show({**place, **row})
            records.append({**place, **row, **vars(origin)})
    if options.csv:
        tables.append(Path(options.csv), records)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.wan.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--round-trip", default="30ms,100ms,200ms", help="comma-separated (30ms,100ms,200ms)")
    add("--loss", default="0,0.1%,1%", help="comma-separated (0,0.1%%,1%%)")
    add("--rate", default="200mbit", help="comma-separated, of each node (200mbit)")
    add(
        "--operation",
        type=some_of("operation", SENT),
        default=list(SENT),
        help=f"comma-separated ({','.join(SENT)})",
    )
    add(
        "--backend",
        type=some_of("backend", BACKENDS),
        default=list(BACKENDS),
        help="comma-separated (pycomm,gloo)",
    )
    add(
        "--paths",
        action="append",
        default=[],
        help="instead: rates of several links between two nodes, without delay: 1gbit,100mbit",
    )
    add("--link", default="", help="PYCOMM_LINK: the rate to which pycomm paces itself (none)")
    add("--bytes", default="8192,16777216", help="of a call's tensor (8192,16777216)")
    add("--repeats", type=int, default=5, help="calls of each backend, in turns (5)")
    add("--iperf-time", type=int, default=5, help="seconds of each run of iperf3, 0: none (5)")
    add("--quick", action="store_true", help="all_reduce at 60 ms with a loss of 0 and 0.1 %%")
    add("--csv", default="", help="append the rows to this file")
    options = parser.parse_args(argv)
    if options.quick:
        options.round_trip, options.loss, options.operation = "60ms", "0,0.1%", ["all_reduce"]
        options.repeats = 3
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.wan.throughput", *argv]))
    print("    rate  round trip   loss  operation                bytes  backend       ms   Mbit/s")
    try:
        for paths in options.paths:
            measure_paths(paths, options, origin)
        for rate in options.rate.split(",") if not options.paths else ():
            for text in options.round_trip.split(","):
                for loss in options.loss.split(","):
                    trip = seconds("round trip", text)
                    shape = changed(Shape(delay=trip / 2), {"loss": loss})
                    place = {"rate": rate, "round_trip_ms": f"{1e3 * trip:g}", "loss": loss}
                    records: list[dict[str, Any]] = []
                    with WanLab(2, rate, shape=shape) as lab:
                        for row in rates(lab, options):
                            show({**place, **row})
                            records.append({**place, **row, **vars(origin)})
                    if options.csv:
                        tables.append(Path(options.csv), records)
    except (Failed, ValueError) as error:
        print(f"wan: {error}", file=sys.stderr)
        return 2
    except Unavailable as error:
        print(f"wan: the lab cannot be made here: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
