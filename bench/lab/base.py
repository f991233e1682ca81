"""Labs: sets of nodes that ranks run on, and the lifetime of the ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from pycomm.bench.lab import busy_cores, subreaper
from pycomm.bench.lab.rates import UNLIMITED

Rank = subprocess.Popen[bytes]
Kind = TypeVar("Kind", bound="Lab")
GRACE = 3.0  # seconds that a rank gets to end after SIGTERM


class LabUnavailable(RuntimeError):
    """Namespaces cannot be created here; the text gives the reason."""


@dataclass(frozen=True)
class Traffic:
    """The bytes over one interface of a node since the start, headers included."""

    node: int
    interface: str
    sent: int
    received: int


class Lab:
    """A set of nodes that ranks run on. Leaving this context manager ends every rank.

    These nodes are plain processes: pycomm paces its sockets; other backends are unlimited.
    """

    interface = "lo"
    master = "127.0.0.1"
    congestion = "of the system"

    def __init__(self, nodes: int, rate: str) -> None:
        self.nodes, self.rate = nodes, rate
        self._ranks: list[Rank] = []
        self._busy: Rank | None = None

    def wrap(self, node: int) -> list[str]:
        """Return the command prefix that runs a command on a node."""
        return []

    def describe(self) -> str:
        """Return a one-line description."""
        paced = f", pycomm paces itself to {self.rate}" if self.rate != UNLIMITED else ""
        return f"{self.nodes} processes on one machine{paced}"

    def environment(self) -> dict[str, str]:
        """Return the rendezvous and interface variables, common to all ranks; new in every call."""
        names = {name: self.interface for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")}
        return names | {"MASTER_ADDR": self.master, "MASTER_PORT": str(_free_port())}

    def host(self, node: int) -> dict[str, str]:
        """Return variables of a node alone, by which its links have their rate."""
        paced = {"PYCOMM_TRANSPORT": "tcp", "PYCOMM_LINK": self.rate}
        return paced if self.rate != UNLIMITED else {}

    def start(
        self,
        command: Sequence[str],
        *,
        ranks_per_node: int = 1,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> list[Rank]:
        """Start the command once per rank, with torchrun's variables added to `env`.

        Call this in a thread that outlives the ranks: for the kernel, the thread is their parent.
        """
        base = dict(os.environ if env is None else env) | self.environment()
        base |= {"WORLD_SIZE": str(self.nodes * ranks_per_node)}
        base |= {"LOCAL_WORLD_SIZE": str(ranks_per_node)}
        started = []
        for rank in range(self.nodes * ranks_per_node):
            node, local_rank = divmod(rank, ranks_per_node)
            place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(node)}
            mine = base | place | self.host(node)
            started.append(self._keep(node, command, mine, stdout, stderr))
        return started

    def kept(self, node: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs a command on a node, and ends it when this process ends."""
        keep = [sys.executable, "-I", "-S", subreaper.__file__, str(os.getpid())]
        return [*self.wrap(node), *keep, *command]

    def _keep(
        self,
        node: int,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
    ) -> Rank:
        """Start a command on a node; it ends with this process and with the lab."""
        self._keep_cores_busy()
        rank = subprocess.Popen(self.kept(node, command), env=env, stdout=stdout, stderr=stderr)
        self._ranks.append(rank)
        return rank

    def _keep_cores_busy(self) -> None:
        """Keep all processors from idling until the ranks are stopped, if links have a rate."""
        if self.rate != UNLIMITED and self._busy is None:
            command = [sys.executable, "-I", "-S", busy_cores.__file__, str(os.getpid())]
            self._busy = subprocess.Popen(command)

    def stop(self) -> None:
        """End every rank and its descendants: first with SIGTERM, then with SIGKILL."""
        for sent in (signal.SIGTERM, signal.SIGHUP, signal.SIGKILL):
            running = [rank for rank in self._ranks if rank.poll() is None]
            for rank in running:
                rank.send_signal(sent)
            deadline = time.monotonic() + GRACE
            while any(rank.poll() is None for rank in running) and time.monotonic() < deadline:
                time.sleep(0.01)
        self._ranks = []
        if self._busy is not None:
            self._busy.kill()
            self._busy.wait()
            self._busy = None

    def close(self) -> None:
        """End the ranks and remove the nodes."""
        self.stop()

    def __enter__(self: Kind) -> Kind:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait(ranks: Sequence[Rank], *, watch: Callable[[], None] | None = None) -> int:
    """Wait for all ranks; return 0, or immediately the exit status of the first that failed.

    Args:
        ranks: the result of `Lab.start`.
        watch: called repeatedly; an exception from it ends the wait.
    """
    running = list(ranks)
    while running:
        for rank in running:
            status = rank.poll()
            if status:
                return status if status > 0 else 128 - status
        running = [rank for rank in running if rank.returncode is None]
        if watch is not None:
            watch()
        time.sleep(0.05)
    return 0


def interface_counts(pid: int | str = "self") -> dict[str, tuple[int, int]]:
    """Return the bytes sent and received by each interface of a process's network namespace."""
    found = {}
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        received, sent = counts.split()[0], counts.split()[8]
        found[name.strip()] = (int(sent), int(received))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
