"""TCP link utilisation of collectives, beside Gloo and one plain stream of iperf3.

    python -m pycomm.bench.links --rate 1gbit,10gbit --congestion reno,bbr

joins two network namespaces by a link of each rate (netlab.py). Over the same link it measures one
stream of iperf3, then all_reduce and sendrecv of pycomm's core over TCP and of Gloo, in turns, and
then iperf3 again. Both operations send in both directions at once, so iperf3 also runs with a
stream each way: where the processors are the limit, that is slower than one direction.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pycomm.bench import netlab
from pycomm.bench.common import harness, tables
from pycomm.bench.common.harness import Origin, Row

STREAMS = ("stream", "stream both ways")
STREAM = (
    'if [ "$RANK" = 0 ]; then exec iperf3 -s -1 >/dev/null; fi; '
    "for i in 1 2 3 4 5 6 7 8 9; do sleep 0.2; "
    'iperf3 -c "$MASTER_ADDR" -t {seconds} {option} -J && exit; done'
)


def stream_rate(lab: netlab.Lab, seconds: float, ways: int = 1) -> float:
    """Return GB/s of one iperf3 stream to node 0, as the receiver counts them.

    Args:
        ways: 2 for a stream each way at the same time; their mean is returned.
    """
    option = "--bidir" if ways == 2 else ""
    command = ["sh", "-c", STREAM.format(seconds=seconds, option=option)]
    ranks = lab.start(command, stdout=subprocess.PIPE)
    output = ranks[1].communicate(timeout=60)[0]
    ranks[0].wait(10)
    text = output.decode()
    result = json.loads(text[text.rindex('{\n\t"start"') :])
    names = ["sum_received", "sum_received_bidir_reverse"][:ways]
    return sum(float(result["end"][name]["bits_per_second"]) for name in names) / ways / 8e9


def collectives(lab: netlab.Lab, op: str, options: argparse.Namespace) -> list[dict[str, str]]:
    """Return the rows of `python -m pycomm.bench` on both nodes."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.csv"
        bench = [sys.executable, "-m", "pycomm.bench", op, "-b", options.first, "-e", options.last]
        # The ranks are not pinned, since the threads of iperf3 and Gloo are not.
        bench += ["-f", "8", "-n", options.iterations, "-w", "1", "--pin", "0"]
        bench += ["--backend", "pycomm,gloo", "--csv", str(table)]
        env = dict(os.environ) | {"PYCOMM_TRANSPORT": "tcp", "PYCOMM_SOCKETS": options.sockets}
        if "," in lab.rate:
            links = range(len(lab.rate.split(",")))
            env["PYCOMM_INTERFACE"] = ",".join(f"eth{link}" for link in links)
        ranks = lab.start(
            [*bench, "--store", f"{folder}/store"], env=env, stdout=subprocess.DEVNULL
        )
        if netlab.wait(ranks) != 0:
            raise SystemExit("links: a rank failed")
        with table.open(newline="") as file:
            return list(csv.DictReader(file))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.links", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--rate", action="append", help="of a link, as netlab takes it; several times for several")
    add("--congestion", default="reno,bbr", help="TCP's congestion controls, comma-separated")
    add("--op", default="all_reduce,sendrecv", help="comma-separated")
    add("--sockets", default="2", help="of pycomm per peer (2)")
    add("-b", dest="first", default="1M", help="smallest size (1M)")
    add("-e", dest="last", default="64M", help="largest size (64M)")
    add("-n", dest="iterations", default="10", help="iterations (10)")
    add("--seconds", type=float, default=2, help="that iperf3 sends, three times (2)")
    add("--csv", default="", help="append all rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.links", *argv]))
    print("rate        control  op          size  backend     GB/s  of iperf3")
    for rate in options.rate or ["1gbit", "10gbit"]:
        for control in options.congestion.split(","):
            with netlab.Netlab(2, rate, congestion=control) as lab:
                before = stream_rate(lab, options.seconds)
                found = [
                    row for op in options.op.split(",") for row in collectives(lab, op, options)
                ]
                both_ways = stream_rate(lab, options.seconds, ways=2)
                after = stream_rate(lab, options.seconds)
                report(lab, [(before + after) / 2, both_ways], found, origin, options.csv)
    return 0


def report(
    lab: netlab.Lab, streams: list[float], found: list[dict[str, str]], origin: Origin, path: str
) -> None:
    """Print a table; append its rows to a CSV if `path` is not empty."""
    where = f"{lab.rate:<11} {lab.congestion:<8}"
    name = {"connection": lab.describe()}
    records = []
    for op, rate in zip(STREAMS, streams, strict=True):
        print(f"{where} {op:<18}iperf3   {rate:>7.4f} {rate / streams[0]:>10.2f}")
        row = Row("time", op, "iperf3", 2, 0, 0, "uint8", effbw=rate, **name)
        records.append(harness.record(row, origin))
    for row in found:
        if row["kind"] != "time":
            continue
        rate = float(row["effbw"])
        size = harness.format_size(int(row["size"]))
        cells = f"{row['op']:<10} {size:>5}  {row['backend']:<8} {rate:>7.4f}"
        print(f"{where} {cells} {rate / streams[0]:>10.2f}", flush=True)
        connection = f"{lab.describe()}; {row['connection']}"
        records.append(row | {"connection": connection, "command": origin.command})
    if path:
        tables.append(Path(path), records)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
