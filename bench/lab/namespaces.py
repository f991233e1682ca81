"""A lab whose nodes are network namespaces of Linux, joined by bridges."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from pycomm.bench.lab import rates
from pycomm.bench.lab.base import Lab, LabUnavailable, Traffic, interface_counts

TOOLS = ("ip", "tc", "unshare", "nsenter")
MOST_NODES = 250
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
            nodes: number of namespaces, 2 to `MOST_NODES`.
            rate: rates of each node's links, in the format of rates.py: "200mbit", ...
            node_rates: rates of nodes that differ, with as many links as the others.
            congestion: TCP's congestion control in the nodes. The default is not the kernel's
                default, since bbr paces itself by a model of the path that a token bucket upsets:
                it reaches half of a low rate.
            user_namespace: do without root's rights, even if this is root.

        Raises:
            LabUnavailable: the kernel, the user's rights or missing tools do not allow it.
            ValueError: an invalid rate or node.
        """
        super().__init__(nodes, rate)
        self.congestion = congestion
        self.node_rates = dict(node_rates or {})
        if not 2 <= nodes <= MOST_NODES:
            raise ValueError(f"a lab has 2 to {MOST_NODES} nodes, not {nodes}")
        unknown = [node for node in self.node_rates if not 0 <= node < nodes]
        if unknown:
            raise ValueError(f"no node {unknown[0]}: the nodes are 0 to {nodes - 1}")
        self._links = [rates.parse(self.node_rates.get(node, rate)) for node in range(nodes)]
        if len({len(links) for links in self._links}) != 1:
            raise ValueError("all nodes need the same number of links")
        missing = [tool for tool in TOOLS if not shutil.which(tool)]
        if missing:
            raise LabUnavailable(f"no {', '.join(missing)} (apt-get install iproute2 util-linux)")
        self._holders: list[subprocess.Popen[str]] = []
        self._user: list[str] = []
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
                _limit(port, self._links[node][link].received),
            ]
        self._shell(0, lines)
        for node in range(self.nodes):
            self._bring_up(link, node)
            self._shell(node + 1, [_limit(interface, self._links[node][link].sent)])

    def _bring_up(self, link: int, node: int, options: str = "") -> None:
        """Give a node's interface its address, and the node its congestion control."""
        control = "/proc/sys/net/ipv4/tcp_congestion_control"
        lines = [
            "ip link set dev lo up",
            f"ip addr add 10.77.{link}.{node + 1}/24 dev eth{link}",
            f"ip link set dev eth{link} up {options}",
            f"echo {self.congestion} >{control} || true",
            f"cat {control}",
        ]
        self.congestion = self._shell(node + 1, lines).strip()

    def _hold(self, enter: list[str]) -> int:
        """Create a namespace and return the process that keeps it alive."""
        holder = subprocess.Popen(
            [*enter, "sh", "-c", "echo ready; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # survives Ctrl-C; bytes are counted after it
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise LabUnavailable(holder.stderr.read().strip() or f"{' '.join(enter)} failed")
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
            raise LabUnavailable(done.stderr.strip())
        return done.stdout

    def wrap(self, node: int) -> list[str]:
        return self._enter(node + 1)

    def host(self, node: int) -> dict[str, str]:
        """Return the name by which Python, too, takes a node for a host of its own."""
        return {"PYCOMM_HOST_ID": f"node{node}"}

    def traffic(self) -> list[Traffic]:
        """Return the traffic of each interface of each node."""
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
        super().close()
        for holder in self._holders:
            holder.kill()
            holder.communicate()
        self._holders = []


def _limit(device: str, rate: str | None) -> str:
    """Return the shell line that limits the egress rate of a device from now on."""
    if rate is None:
        return f"tc qdisc del dev {device} root 2>/dev/null || true"
    return f"tc qdisc replace dev {device} root tbf rate {rate} burst {BURST} latency {QUEUE_MS}ms"
