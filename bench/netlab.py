"""Rate-limited links on one machine: each node is a network namespace behind token buckets.

    python -m pycomm.bench.netlab --nodes 4 --ranks-per-node 2 --rate 1gbit -- COMMAND
    python -m pycomm.bench.netlab --rate "1gbit 30s:100mbit" --node 1=10mbit/100mbit -- COMMAND

runs the command once per rank, with torchrun's environment, prints the bytes that crossed each
interface, and exits as the ranks do: 0, or the status of the first that failed. All nodes hang on
one switch; what a node sends and what it receives is limited at the ends of its own link, so links
are full duplex. rates.py has the words for rates. Root is not needed where the kernel allows user
namespaces.

Nothing can be left behind. A namespace, with all that is in it, lives as long as the process that
holds it open, which ends when its standard input does; and each rank has a keeper (keeper.py) that
ends whatever the rank has started. So an exception, Ctrl-C and kill -9 all end the same way, and
the program stops when the process that has started it is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pycomm.bench import node_shell, rates
from pycomm.bench.lab import (
    Lab,
    Paced,
    Rank,
    Traffic,
    Unavailable,
    interface_bytes,
    interface_counts,
    wait,
)
from pycomm.bench.rates import UNLIMITED

__all__ = [
    "UNLIMITED",
    "Lab",
    "Netlab",
    "Paced",
    "Traffic",
    "Unavailable",
    "interface_bytes",
    "interface_counts",
    "open_lab",
    "wait",
]

TOOLS = ("ip", "tc", "unshare", "nsenter")
BURST = 128 * 1024  # bytes that may pass at once: two of the kernel's largest packets
QUEUE_MS = 50  # a packet that would wait longer in the bucket is dropped


class Netlab(Lab):
    """Nodes as network namespaces, joined by bridges; tbf limits both ends of each link."""

    interface = "eth0"  # of every node; each has its own
    master = "10.77.0.1"

    def __init__(
        self,
        nodes: int,
        rate: str,
        *,
        node_rates: Mapping[int, str] | None = None,
        congestion: str = "reno",
        user_namespace: bool = False,
    ) -> None:
        """
        Args:
            nodes: number of namespaces, 2 to 250.
            rate: of each node's links, as rates.py has it: "200mbit", "100mbit/1gbit", ...
            node_rates: of nodes that differ, with as many links as the others.
            congestion: TCP's congestion control in the nodes. The default is not that of the
                kernel, since bbr paces itself by a model of the path that a token bucket upsets: it
                reaches half of a low rate.
            user_namespace: do without root's rights, even if this is root.

        Raises:
            Unavailable: the kernel, the user's rights or missing tools do not allow it.
            ValueError: a rate or a node that cannot be.
        """
        super().__init__(nodes, rate)
        self.congestion = congestion
        self.node_rates = dict(node_rates or {})
        if not 2 <= nodes <= 250:
            raise ValueError(f"a lab has 2 to 250 nodes, not {nodes}")
        unknown = [node for node in self.node_rates if not 0 <= node < nodes]
        if unknown:
            raise ValueError(f"no node {unknown[0]}: the nodes are 0 to {nodes - 1}")
        self._links = [rates.parse(self.node_rates.get(node, rate)) for node in range(nodes)]
        if len({len(links) for links in self._links}) != 1:
            raise ValueError("all nodes need the same number of links")
        missing = [tool for tool in TOOLS if not shutil.which(tool)]
        if missing:
            raise Unavailable(f"no {', '.join(missing)} (apt-get install iproute2 util-linux)")
        self._holders: list[subprocess.Popen[str]] = []
        self._user: list[str] = []
        self._closing = threading.Event()
        self._clock: threading.Thread | None = None
        try:
            self._build(user_namespace or os.geteuid() != 0)
        except BaseException:
            self.close()
            raise

    def _build(self, user_namespace: bool) -> None:
        become_root = ["--user", "--map-root-user"] if user_namespace else []
        switch = self._hold(["unshare", *become_root, "--net"])
        if become_root:
            self._user = ["--user", "--preserve-credentials", "--target", str(switch)]
        in_user = ["nsenter", *self._user] if become_root else []
        pids = [self._hold([*in_user, "unshare", "--net"]) for _ in range(self.nodes)]
        for link in range(len(self._links[0])):
            self._build_link(link, pids)

    def _build_link(self, link: int, pids: Sequence[int]) -> None:
        switch, interface = f"switch{link}", f"eth{link}"
        lines = [f"ip link add name {switch} type bridge", f"ip link set dev {switch} up"]
        for node, pid in enumerate(pids):
            port = f"port{link}.{node}"
            lines += [
                f"ip link add name {port} type veth peer name {interface} netns {pid}",
                f"ip link set dev {port} master {switch} up",
                _limit(port, self._links[node][link][0].received),
            ]
        self._shell(0, lines)
        for node in range(self.nodes):
            lines = [
                "ip link set dev lo up",
                f"ip addr add 10.77.{link}.{node + 1}/24 dev {interface}",
                f"ip link set dev {interface} up",
                f"echo {self.congestion} >/proc/sys/net/ipv4/tcp_congestion_control || true",
                "cat /proc/sys/net/ipv4/tcp_congestion_control",
                _limit(interface, self._links[node][link][0].sent),
            ]
            self.congestion = self._shell(node + 1, lines).strip()

    def _hold(self, enter: list[str]) -> int:
        """Makes a namespace and returns the process that keeps it."""
        holder = subprocess.Popen(
            [*enter, "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the ranks; bytes are counted after it
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise Unavailable(holder.stderr.read().strip() or f"{' '.join(enter)} failed")
        return holder.pid

    def _enter(self, holder: int) -> list[str]:
        pid = str(self._holders[holder].pid)
        return ["nsenter", *self._user, f"--net=/proc/{pid}/ns/net"]

    def _shell(self, holder: int, lines: Sequence[str]) -> str:
        script = "\n".join(["set -e", *lines])
        done = subprocess.run(
            [*self._enter(holder), "sh", "-c", script], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise Unavailable(done.stderr.strip())
        return done.stdout

    def start(self, command: Sequence[str], **options: Any) -> list[Rank]:
        """As of every lab. The first ranks to start also start the clock of changing rates."""
        started = super().start(command, **options)
        self._start_clock()
        return started

    def start_mpi(self, command: Sequence[str], *, ranks_per_node: int = 1) -> list[Rank]:
        """Starts the command's ranks by Open MPI's `mpirun`, which runs on the first node.

        Raises:
            Unavailable: there is no mpirun.
        """
        if not shutil.which("mpirun"):
            raise Unavailable("no mpirun (apt-get install openmpi-bin)")
        nodes = {f"10.77.0.{node + 1}": self.wrap(node) for node in range(self.nodes)}
        hosts = ",".join(f"{address}:{ranks_per_node}" for address in nodes)
        shell = shlex.join([sys.executable, "-I", "-S", node_shell.__file__])
        settings = {
            "plm_rsh_agent": shell,
            "plm_rsh_no_tree_spawn": "1",
            "btl_tcp_if_include": self.interface,
            "oob_tcp_if_include": self.interface,
            "hwloc_base_binding_policy": "none",
        }
        env = {f"OMPI_MCA_{name}": value for name, value in settings.items()}
        env |= {"NETLAB_NODES": json.dumps(nodes)} | self.environment()
        count = str(self.nodes * ranks_per_node)
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        mpirun = ["mpirun", *root, "--host", hosts, "-n", count, *command]
        started = [self._keep(0, mpirun, dict(os.environ) | env)]
        self._start_clock()
        return started

    def _start_clock(self) -> None:
        if self._clock is None:
            self._clock = threading.Thread(
                target=self._change_rates, args=(time.monotonic(),), daemon=True
            )
            self._clock.start()

    def _change_rates(self, start: float) -> None:
        changes: dict[float, dict[int, list[str]]] = {}
        for node, links in enumerate(self._links):
            for link, course in enumerate(links):
                for rate in course[1:]:
                    lines = changes.setdefault(rate.since, {})
                    lines.setdefault(0, []).append(_limit(f"port{link}.{node}", rate.received))
                    lines.setdefault(node + 1, []).append(_limit(f"eth{link}", rate.sent))
        for since, holders in sorted(changes.items()):
            if self._closing.wait(start + since - time.monotonic()):
                return
            for holder, lines in holders.items():
                self._shell(holder, lines)

    def wrap(self, node: int) -> list[str]:
        return self._enter(node + 1)

    def traffic(self) -> list[Traffic]:
        found = []
        for node, holder in enumerate(self._holders[1:]):
            counts = interface_counts(holder.pid)
            names = [f"eth{link}" for link in range(len(self._links[0]))]
            found += [Traffic(node, name, *counts[name]) for name in names]
        return found

    def describe(self) -> str:
        who = "user namespace" if self._user else "root"
        each = "" if "/" in self.rate else " each way"
        others = "".join(f", node {n} {rate}" for n, rate in sorted(self.node_rates.items()))
        return (
            f"{self.nodes} network namespaces ({who}), {self.rate}{each} by tbf{others}, "
            f"TCP {self.congestion}"
        )

    def close(self) -> None:
        self._closing.set()
        if self._clock is not None:
            self._clock.join()
        super().close()
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders = []


def _limit(device: str, rate: str | None) -> str:
    """The shell's line that limits what leaves a device, from now on."""
    if rate is None:
        return f"tc qdisc del dev {device} root 2>/dev/null || true"
    return f"tc qdisc replace dev {device} root tbf rate {rate} burst {BURST} latency {QUEUE_MS}ms"


def open_lab(nodes: int, rate: str, *, paced: bool = False) -> tuple[Lab, str]:
    """Returns real links where they can be made, else (or if asked) paced ones and the reason."""
    if paced:
        return Paced(nodes, rate), "paced links were asked for"
    try:
        return Netlab(nodes, rate), ""
    except Unavailable as error:
        return Paced(nodes, rate), str(error)


def show(traffic: Sequence[Traffic]) -> str:
    """A table of what crossed each interface."""
    lines = [f"{'node':>4} {'interface':>9} {'sent bytes':>16} {'received bytes':>16}"]
    for t in traffic:
        lines.append(f"{t.node:>4} {t.interface:>9} {t.sent:>16,} {t.received:>16,}")
    return "\n".join(lines)


def node_rate(text: str) -> tuple[int, str]:
    """ "2=100mbit" as a node and its rate."""
    node, equals, rate = text.partition("=")
    if not equals or not node.isdigit():
        raise argparse.ArgumentTypeError(f"want NODE=RATE, such as 2=100mbit, not {text!r}")
    return int(node), rate


class _Ended(Exception):
    """Something outside ends the lab; the argument is the exit status."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.netlab",
        description=__doc__,
        epilog=rates.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2, help="network namespaces (2)")
    add("--ranks-per-node", type=int, default=1, help="(1)")
    add("--rate", default="200mbit", help="of each node's links (200mbit); the words are below")
    add(
        "--node", type=node_rate, action="append", default=[], help="NODE=RATE: of one that differs"
    )
    add("--congestion", default="reno", help="TCP's congestion control (reno)")
    add("--mpi", action="store_true", help="let Open MPI's mpirun start the ranks")
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
        with Netlab(
            args.nodes,
            args.rate,
            node_rates=dict(args.node),
            congestion=args.congestion,
            user_namespace=args.user_namespace,
        ) as lab:
            print(f"netlab: {lab.describe()}", file=sys.stderr)
            try:
                start = lab.start_mpi if args.mpi else lab.start
                ranks = start(args.command, ranks_per_node=args.ranks_per_node)
                status = wait(ranks, watch=watch)
            except _Ended as ended:
                status = int(ended.args[0])
            lab.stop()
            print(show(lab.traffic()), file=sys.stderr)
            return status
    except Unavailable as error:
        print(f"netlab: namespaces cannot be made here: {error}", file=sys.stderr)
        return 2
    except ValueError as error:
        parser.error(str(error))
    except _Ended as ended:
        return int(ended.args[0])


if __name__ == "__main__":
    sys.exit(main())
