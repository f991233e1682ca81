"""A lab with delay and loss: namespaces whose packets a program of ours moves (link.cpp).

It needs no netem, and does the same on every kernel. Its rates count what tbf counts, so they mean
what they mean in namespaces.py.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pycomm import units
from pycomm.bench.lab import rates
from pycomm.bench.lab.base import LabUnavailable
from pycomm.bench.lab.namespaces import Netlab
from pycomm.bench.lab.rates import Rate

SOURCE = Path(__file__).with_name("link.cpp")
_LONGEST = 60.0  # seconds: a longer way is a mistake


@dataclass(frozen=True)
class Shape:
    """Treatment of the packets from one node to another."""

    delay: float = 0.0
    """seconds, one way"""
    loss: float = 0.0
    """share of packets, each by itself"""


def round_trip(text: str) -> float:
    """Parse "30ms".

    Raises:
        ValueError: it is no such time, or one that no link has.
    """
    if not re.fullmatch(r"0|[\d.]+(us|ms|s)", text):
        raise ValueError(f"cannot read the round trip {text!r}: want a time with a unit, as 30ms")
    time = units.parse_time(text)
    if time > _LONGEST:
        raise ValueError(f"the round trip {text} is impossible: want 0 to {_LONGEST:.0f}s")
    return time


@cache
def program() -> tuple[Path, object]:
    """Compile the link program; return it, and its folder, which ends with this process.

    It may run as root, so that it is in a new folder that nobody else can write.

    Raises:
        LabUnavailable: there is no compiler, or it failed.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise LabUnavailable("no C++ compiler for the link with delay (apt-get install g++)")
    folder = tempfile.TemporaryDirectory(prefix="pycomm-link-")
    made = Path(folder.name, "link")
    command = [*compiler.split(), "-std=c++17", "-O2", "-o", str(made), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LabUnavailable(f"{compiler} failed: {done.stderr.strip()}")
    return made, folder


class WanLab(Netlab):
    """Nodes whose packets take time to each other, and may be lost on the way."""

    def __init__(
        self,
        nodes: int,
        rate: str,
        *,
        shape: Shape | None = None,
        differ: Mapping[tuple[int, int], Shape] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            nodes, rate, options: as of `Netlab`; one link per node.
            shape: of the links between all pairs of nodes.
            differ: the shapes of ways that differ, by the nodes from and to which they lead.

        Raises:
            LabUnavailable: as of `Netlab`; also without TUN devices or a C++ compiler.
            ValueError: an invalid rate, node or line.
        """
        self.shape = shape or Shape()
        self._differ = dict(differ or {})
        self._link: subprocess.Popen[str] | None = None
        if "," in rate:
            raise ValueError("with delay or loss a node has one link")
        super().__init__(nodes, rate, **options)

    def _build_link(self, link: int, pids: Sequence[int]) -> None:
        enter = ["nsenter", *self._user] if self._user else []
        self._link = subprocess.Popen(
            [*enter, str(program()[0])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        lines = [f"node {pid} 10.77.{link}.{node + 1}" for node, pid in enumerate(pids)]
        for i, j in itertools.permutations(range(self.nodes), 2):
            way = self._differ.get((i, j), self.shape)
            lines.append(f"link {i} {j} {way.delay * 1e6} {way.loss}")
        for node in range(self.nodes):
            lines.append(_rate_line(node, self._links[node][link]))
        if self._ask("\n".join([*lines, "go"])) != "ready":
            assert self._link.stderr is not None
            raise LabUnavailable(self._link.stderr.read().strip() or "the link program failed")
        for node in range(self.nodes):
            self._bring_up(link, node, "mtu 1500 txqueuelen 4000")

    def _ask(self, line: str) -> str:
        link = self._link
        assert link is not None
        assert link.stdin is not None
        assert link.stdout is not None
        with suppress(BrokenPipeError):  # its answer, or the lack of one, tells
            link.stdin.write(line + "\n")
            link.stdin.flush()
        return link.stdout.readline().strip()

    def describe(self) -> str:
        s = self.shape
        words = [f"{1e3 * s.delay:g} ms one way"]
        words += [f"loss {100 * s.loss:g} %"] if s.loss else []
        words += ["some pairs differ"] if self._differ else []
        text = super().describe().replace(" by tbf", "")
        return f"{text}, {', '.join(words)}, in user space"

    def close(self) -> None:
        super().close()
        if self._link is not None:
            self._link.kill()
            self._link.communicate()
            self._link = None


def _rate_line(node: int, rate: Rate) -> str:
    sent, received = (
        0.0 if text is None else 8 * units.parse_rate(text)[0]
        for text in (rate.sent, rate.received)
    )
    return f"rate {node} {sent} {received}"


def parse(text: str) -> tuple[str, Shape | None]:
    """Return the rate of links, and their delay and loss if they have them (rates.py).

    Raises:
        ValueError: the text has another form.
    """
    rate, *far = text.split("@")
    if len(far) > 2:
        raise ValueError(f"cannot read {text!r}: want a rate, a round trip and a loss")
    rates.parse(rate)
    loss = units.parse_share(far[1]) if len(far) > 1 else 0.0
    return rate, Shape(delay=round_trip(far[0]) / 2, loss=loss) if far else None


def lab_of(nodes: int, rate: str, **options: Any) -> Netlab:
    """Return a lab whose links have a rate, or also a round trip and a loss.

    Args:
        nodes, options: as of `Netlab`.
        rate: the text, as of `parse`.

    Raises:
        ValueError: the text has another form.
    """
    rate, shape = parse(rate)
    return WanLab(nodes, rate, shape=shape, **options) if shape else Netlab(nodes, rate, **options)
