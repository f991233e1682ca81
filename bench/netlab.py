"""Rate-limited links on one machine: each node is a network namespace behind a token bucket.

    python -m pycomm.bench.netlab --nodes 2 --rate 200mbit -- python train.py

starts one rank per node with torchrun's environment. The nodes hang on one switch; what a node
sends and what it receives is limited to the rate, so its link is full duplex. With the rate
"1gbit,200mbit" each node has two links, eth0 and eth1, each with a switch of its own. Root is not
needed where the kernel allows user namespaces.

Nothing can be left behind: a namespace lives as long as the process that holds it open, that
process ends when its standard input does, and ranks are killed with their parent. So an exception,
Ctrl-C and kill -9 all end the same way.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

INTERFACE = "eth0"  # of every node; each has its own
UNLIMITED = "unlimited"  # a rate
BURST = 128 * 1024  # bytes that may pass at once: two of the kernel's largest packets
QUEUE_MS = 50  # a packet that would wait longer in the bucket is dropped


class Unavailable(RuntimeError):
    """Namespaces cannot be made here; the text says why."""


class Lab(ABC):
    """Nodes that ranks run on. A context manager: leaving it ends every rank."""

    interface: str
    master: str
    congestion: str

    def __init__(self, nodes: int, rate: str) -> None:
        self.nodes, self.rate = nodes, rate
        self._ranks: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def wrap(self, node: int) -> list[str]:
        """The command that runs what follows it on a node."""

    @abstractmethod
    def sent_bytes(self, node: int) -> int | None:
        """Bytes that a node has sent over its link since the start; None: not counted."""

    @abstractmethod
    def describe(self) -> str:
        """One line for people."""

    def extra_environment(self) -> dict[str, str]:
        return {}

    def start(
        self,
        command: Sequence[str],
        *,
        ranks_per_node: int = 1,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> list[subprocess.Popen[bytes]]:
        """Starts the command once per rank, with torchrun's variables added to `env`."""
        base = dict(os.environ if env is None else env) | self.extra_environment()
        base |= {name: self.interface for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")}
        base |= {"MASTER_ADDR": self.master, "MASTER_PORT": str(_free_port())}
        base |= {"WORLD_SIZE": str(self.nodes * ranks_per_node)}
        base |= {"LOCAL_WORLD_SIZE": str(ranks_per_node)}
        started = []
        for rank in range(self.nodes * ranks_per_node):
            node, local_rank = divmod(rank, ranks_per_node)
            place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(node)}
            die_with_parent = ["setpriv", "--pdeathsig", "KILL", "--"]
            started.append(
                subprocess.Popen(
                    [*self.wrap(node), *die_with_parent, *command],
                    env=base | place,
                    stdout=stdout,
                    stderr=stderr,
                )
            )
        self._ranks += started
        return started

    def stop(self) -> None:
        """Ends every rank that still runs: politely, then for sure."""
        for rank in self._ranks:
            rank.terminate()
        deadline = time.monotonic() + 3
        for rank in self._ranks:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()
        self._ranks = []

    def close(self) -> None:
        """Ends the ranks and takes the nodes down."""
        self.stop()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Netlab(Lab):
    """Nodes as network namespaces, joined by bridges; tbf limits both ends of each link."""

    interface = INTERFACE
    master = "10.77.0.1"

    def __init__(self, nodes: int, rate: str, *, congestion: str = "reno") -> None:
        """
        Args:
            nodes: number of namespaces, 2 to 250.
            rate: of each node's link in each direction, as `tc` writes it: "200mbit", "1gbit"; or
                "unlimited". Several, joined by a comma, make as many links.
            congestion: TCP's congestion control in the nodes. The default is not that of the
                kernel, since bbr paces itself by a model of the path that a token bucket upsets: it
                reaches half of a low rate.

        Raises:
            Unavailable: the kernel, the user's rights or missing tools do not allow it.
        """
        super().__init__(nodes, rate)
        self.congestion = congestion
        missing = [
            tool for tool in ("ip", "tc", "unshare", "nsenter", "setpriv") if not shutil.which(tool)
        ]
        if missing:
            raise Unavailable(f"no {', '.join(missing)} (apt-get install iproute2 util-linux)")
        self._holders: list[subprocess.Popen[str]] = []
        self._user: list[str] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        become_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        switch = self._hold(["unshare", *become_root, "--net"])
        if become_root:
            self._user = ["--user", "--preserve-credentials", "--target", str(switch)]
        in_user = ["nsenter", *self._user] if become_root else []
        pids = [self._hold([*in_user, "unshare", "--net"]) for _ in range(self.nodes)]

        for link, rate in enumerate(self.rate.split(",")):
            self._build_link(link, rate, pids)

    def _build_link(self, link: int, rate: str, pids: Sequence[int]) -> None:
        limit = f"root tbf rate {rate} burst {BURST} latency {QUEUE_MS}ms"
        limited = rate != UNLIMITED
        switch, interface = f"switch{link}", f"eth{link}"
        lines = [f"ip link add name {switch} type bridge", f"ip link set dev {switch} up"]
        for i, pid in enumerate(pids):
            port = f"port{link}.{i}"
            lines += [
                f"ip link add name {port} type veth peer name {interface} netns {pid}",
                f"ip link set dev {port} master {switch} up",
            ]
            lines += [f"tc qdisc add dev {port} {limit}"] if limited else []
        self._shell(0, lines)
        for i in range(self.nodes):
            lines = [
                "ip link set dev lo up",
                f"ip addr add 10.77.{link}.{i + 1}/24 dev {interface}",
                f"ip link set dev {interface} up",
                f"echo {self.congestion} >/proc/sys/net/ipv4/tcp_congestion_control || true",
                "cat /proc/sys/net/ipv4/tcp_congestion_control",
            ]
            lines += [f"tc qdisc add dev {interface} {limit}"] if limited else []
            self.congestion = self._shell(i + 1, lines).strip()

    def _hold(self, enter: list[str]) -> int:
        """Makes a namespace and returns the process that keeps it."""
        holder = subprocess.Popen(
            [*enter, "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise Unavailable(holder.stderr.read().strip() or f"{' '.join(enter)} failed")
        return holder.pid

    def _enter(self, holder: int) -> list[str]:
        pid = str(self._holders[holder].pid)
        if not self._user:
            return ["nsenter", f"--net=/proc/{pid}/ns/net"]
        return ["nsenter", *self._user, f"--net=/proc/{pid}/ns/net"]

    def _shell(self, holder: int, lines: Sequence[str]) -> str:
        script = "\n".join(["set -e", *lines])
        done = subprocess.run(
            [*self._enter(holder), "sh", "-c", script], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise Unavailable(done.stderr.strip())
        return done.stdout

    def wrap(self, node: int) -> list[str]:
        return self._enter(node + 1)

    def sent_bytes(self, node: int) -> int:
        return interface_bytes(INTERFACE, self._holders[node + 1].pid)

    def describe(self) -> str:
        who = "user namespace" if self._user else "root"
        return (
            f"{self.nodes} network namespaces ({who}), {self.rate} each way by tbf, "
            f"TCP {self.congestion}"
        )

    def close(self) -> None:
        super().close()
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders = []


class Paced(Lab):
    """Nodes that are only processes: pycomm paces its own sockets. Other backends run unlimited."""

    interface = "lo"
    master = "127.0.0.1"
    congestion = "of the system"

    def wrap(self, node: int) -> list[str]:
        return []

    def sent_bytes(self, node: int) -> None:
        return None

    def describe(self) -> str:
        if self.rate == UNLIMITED:
            return f"{self.nodes} processes on one machine"
        return f"{self.nodes} processes on one machine, pycomm paces itself to {self.rate}"

    def extra_environment(self) -> dict[str, str]:
        if self.rate == UNLIMITED:
            return {}
        return {"PYCOMM_TRANSPORT": "tcp", "PYCOMM_LINK": self.rate}


def open_lab(nodes: int, rate: str, *, paced: bool = False) -> tuple[Lab, str]:
    """Returns real links where they can be made, else (or if asked) paced ones and the reason."""
    if paced:
        return Paced(nodes, rate), "paced links were asked for"
    try:
        return Netlab(nodes, rate), ""
    except Unavailable as error:
        return Paced(nodes, rate), str(error)


def interface_bytes(interface: str, pid: int | str = "self") -> int:
    """Bytes sent so far by an interface of the network namespace of a process."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    raise ValueError(f"process {pid} has no interface {interface}")


def wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all ranks; returns 0, or at once the exit status of the first that failed."""
    running = list(ranks)
    while running:
        for rank in running:
            status = rank.poll()
            if status:
                return status if status > 0 else 128 - status
        running = [rank for rank in running if rank.returncode is None]
        time.sleep(0.05)
    return 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pycomm.bench.netlab", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rate", default="200mbit", help="of each link, as tc writes it")
    parser.add_argument("--congestion", default="reno", help="TCP's congestion control")
    parser.add_argument("command", nargs="+", help="after --")
    args = parser.parse_args()
    try:
        lab = Netlab(args.nodes, args.rate, congestion=args.congestion)
    except Unavailable as error:
        print(f"netlab: namespaces cannot be made here: {error}", file=sys.stderr)
        return 2
    with lab:
        print(f"netlab: {lab.describe()}", file=sys.stderr)
        try:
            return wait(lab.start(args.command, ranks_per_node=args.ranks_per_node))
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
