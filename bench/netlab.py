"""Rate-limited links on one machine: each node is a network namespace behind token buckets.

    python -m pycomm.bench.netlab --nodes 4 --ranks-per-node 2 --rate 1gbit -- COMMAND
    python -m pycomm.bench.netlab --rate 1gbit --node 1=10mbit/100mbit -- COMMAND
    python -m pycomm.bench.netlab --rate 200mbit@60ms@0.1% -- COMMAND

runs the command once per rank, with torchrun's environment, prints the bytes that crossed each
interface, and exits with 0, or with the status of the first rank that failed. All nodes connect to
one switch. The egress and ingress of a node are limited at the ends of its own link, so links are
full duplex. With a delay or a loss, a program moves the packets in user space (lab/wan.py).
lab/rates.py defines the format of rates. Root is not needed where the kernel allows user
namespaces.

Nothing is left behind. A namespace and its contents live as long as the process that holds it open,
and that process ends when its standard input is closed. Each rank has a subreaper
(lab/subreaper.py) that ends all processes that the rank has started. So an exception, Ctrl-C and
kill -9 all have the same effect, and the program stops when the process that started it is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from pycomm.bench.__main__ import reported
from pycomm.bench.common.arguments import Parser, nodes
from pycomm.bench.lab import rates
from pycomm.bench.lab.base import Lab as Lab
from pycomm.bench.lab.base import LabUnavailable as LabUnavailable
from pycomm.bench.lab.base import Traffic as Traffic
from pycomm.bench.lab.base import interface_counts as interface_counts
from pycomm.bench.lab.base import wait as wait
from pycomm.bench.lab.namespaces import Netlab as Netlab
from pycomm.bench.lab.wan import lab_of
from pycomm.plan.options import count


def open_lab(nodes: int, rate: str, *, paced: bool = False) -> tuple[Lab, str]:
    """Return real links if possible; otherwise, or if asked, paced ones and the reason."""
    if paced:
        return Lab(nodes, rate), "paced links were asked for"
    try:
        return Netlab(nodes, rate), ""
    except LabUnavailable as error:
        return Lab(nodes, rate), str(error)


def show(traffic: Sequence[Traffic]) -> str:
    """Return a table of the traffic of each interface."""
    lines = [f"{'node':>4} {'interface':>9} {'sent bytes':>16} {'received bytes':>16}"]
    for t in traffic:
        lines.append(f"{t.node:>4} {t.interface:>9} {t.sent:>16,} {t.received:>16,}")
    return "\n".join(lines)


def node_rate(text: str) -> tuple[int, str]:
    """Parse "2=100mbit" into a node and its rate."""
    node, equals, rate = text.partition("=")
    if not equals or not node.isdigit():
        raise argparse.ArgumentTypeError(f"want NODE=RATE, such as 2=100mbit, not {text!r}")
    return int(node), rate


class _Ended(Exception):
    """A signal or the parent's death ends the lab; the argument is the exit status."""


def main() -> int:
    parser = Parser(
        prog="python -m pycomm.bench.netlab",
        description=__doc__,
        epilog=rates.__doc__,
    )
    add = parser.add_argument
    add("--nodes", type=nodes, default=2, help="network namespaces (2)")
    add("--ranks-per-node", type=count, default=1, help="(1)")
    add("--rate", default="200mbit", help="of each node's links (200mbit); the words are below")
    add(
        "--node", type=node_rate, action="append", default=[], help="NODE=RATE: of one that differs"
    )
    add("--congestion", default="reno", help="TCP's congestion control (reno)")
    add("--user-namespace", action="store_true", help="use one even as root")
    add("command", nargs="+", help="after --")
    args = parser.parse_args()

    def end(number: int, _: object) -> None:
        raise _Ended(128 + number)

    for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(caught) != signal.SIG_IGN:
            signal.signal(caught, end)
    parent = os.getppid()

    def watch() -> None:
        if os.getppid() != parent:
            raise _Ended(128 + signal.SIGHUP)

    try:
        kept = {"congestion": args.congestion, "user_namespace": args.user_namespace}
        with lab_of(args.nodes, args.rate, node_rates=dict(args.node), **kept) as lab:
            print(f"netlab: {lab.describe()}", file=sys.stderr)
            try:
                ranks = lab.start(args.command, ranks_per_node=args.ranks_per_node)
                status = wait(ranks, watch=watch)
            except _Ended as ended:
                status = int(ended.args[0])
            lab.stop()
            print(show(lab.traffic()), file=sys.stderr)
            return status
    except (OSError, ValueError) as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except _Ended as ended:
        return int(ended.args[0])


if __name__ == "__main__":
    sys.exit(reported(main))
