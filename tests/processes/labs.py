"""Networks whose links a test cuts, mends and counts, a skip where the machine allows none, and
what ranks print."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pycomm.bench.lab.base import LabUnavailable
from pycomm.bench.lab.namespaces import Netlab
from pycomm.bench.lab.wan import WanLab
from pycomm.bench.netlab import wait

NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000  # sched.h


class FaultyNetlab(Netlab):
    """Nodes whose links can be cut."""

    def enter(self, node: int) -> None:
        """Move this process, which must have one thread, to a node's network permanently.

        Raises:
            LabUnavailable: the kernel refuses it.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        kinds = {"user": NEW_USER} if self._user else {}
        for kind, flag in (kinds | {"net": NEW_NETWORK}).items():
            with open(f"/proc/{self._holders[node + 1].pid}/ns/{kind}") as space:
                if libc.setns(space.fileno(), flag) != 0:
                    raise LabUnavailable(f"setns: {os.strerror(ctypes.get_errno())}")

    def cut(self, node: int, *, link: int = 0) -> None:
        """Drop all packets from and to a node from now on; its interface stays up."""
        self._shell(0, [f"ip link set dev port{link}.{node} nomaster"])

    def mend(self, node: int, *, link: int = 0) -> None:
        """Undo `cut` or `take_down`."""
        self._shell(0, [f"ip link set dev port{link}.{node} master switch{link}"])
        self._shell(node + 1, [f"ip link set dev eth{link} up"])

    def take_down(self, node: int, *, link: int = 0) -> None:
        """Set a node's interface down."""
        self._shell(node + 1, [f"ip link set dev eth{link} down"])


class CountedWanLab(WanLab):
    """Nodes with delay whose packets are counted."""

    def mark(self) -> None:
        """Begin to count one-way trips anew."""
        self._ask("mark")

    def trips(self) -> int:
        """Return the longest chain of one-way trips, each after the one before, since the mark.

        It does not depend on how fast this machine is: what a rank computes takes no trip.
        """
        return int(self._ask("trips"))

    def packets(self) -> tuple[int, int, int]:
        """Return how many packets were delivered, lost, and dropped because a queue was full."""
        delivered, lost, dropped = map(int, self._ask("packets").split())
        return delivered, lost, dropped


def near_hosts(nodes: int, rate: str = "80mbit", **options: Any) -> FaultyNetlab:
    """Return hosts in a network without delay."""
    try:
        return FaultyNetlab(nodes, rate, **options)
    except LabUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")


def far_hosts(nodes: int, rate: str = "200mbit", **options: Any) -> CountedWanLab:
    """Return hosts in a network with delay."""
    try:
        return CountedWanLab(nodes, rate, **options)
    except LabUnavailable as error:
        pytest.skip(f"no network namespaces with TUN devices: {error}")


def printed_by(lab: Any, job: str, folder: Path, *words: str, ranks_per_node: int = 1) -> str:
    """Run a program, with these words, as the ranks of a lab, and return what they print."""
    folder.mkdir(exist_ok=True)
    with (folder / "printed").open("w+") as printed:
        ranks = lab.start(
            [sys.executable, "-c", job, *words],
            ranks_per_node=ranks_per_node,
            env=dict(os.environ),
            stdout=printed,
            stderr=printed,
        )
        status = wait(ranks)
        printed.seek(0)
        text = printed.read()
    assert status == 0, text
    return text
