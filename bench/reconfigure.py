"""What a change of members costs on one machine: `reconfigure`, beside a new group of Gloo.

    python -m pycomm.bench.reconfigure -p 8 --transport auto,tcp

So many processes form a group. Then, in each turn:

    same      all of them form the group again
    replaced  one of them is killed by SIGKILL in the middle of an operation, and a process that has
              waited takes its place

Members call it together, once all know of the death. The time is that of the slowest. Gloo makes a
new group of the same processes over torch's TCPStore, as torchft's `ProcessGroupGloo` does, in the
same turns. After each, the group's first sum of whole numbers is compared with `==`; its time is a
column of its own. Medians are printed. How many round trips it takes between hosts is measured by
`python -m pycomm.bench.wan`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

import pycomm
from pycomm import elastic
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin

LIMIT = timedelta(seconds=60)
METHODS = ("pycomm", "gloo")
NUMEL = 1 << 18  # 1 MiB of float32: every link is used


class Member:
    """A process that is a member, or waits to be one, and the store through which all are told.

    Attributes:
        process: its number, from 0; those from `ranks` on wait at first.
    """

    def __init__(self, process: int, port: int, transport: str) -> None:
        self.process = process
        self.store = _distributed_c10d.TCPStore("127.0.0.1", port, timeout=2 * LIMIT)
        options = pycomm.Options(enable_reconfigure=True, transport=transport)
        dist.init_process_group(
            "pycomm",
            store=_distributed_c10d.HashStore(),
            rank=0,
            world_size=1,
            pg_options=options,
            timeout=LIMIT,
        )
        self.store.set(f"handle {process}", elastic.handle())

    def meet(self, topic: str, members: Sequence[int]) -> None:
        """Wait until all members are here."""
        self.store.set(f"{topic} {self.process}", "here")
        self.store.wait([f"{topic} {member}" for member in members])

    def form(self, uuid: int, members: Sequence[int]) -> None:
        handles = [self.store.get(f"handle {member}").decode() for member in members]
        elastic.reconfigure(uuid, handles, timeout=LIMIT)

    def gloo(self, topic: str, members: Sequence[int]) -> Any:
        store = _distributed_c10d.PrefixStore(topic, self.store)
        return _distributed_c10d.ProcessGroupGloo(
            store, members.index(self.process), len(members), LIMIT
        )

    def measure(self, topic: str, members: Sequence[int], make: Callable[[], Any]) -> Any:
        """Tell the store how long `make` and the first sum took, in seconds; return the group."""
        self.meet(topic, members)
        start = time.perf_counter()
        made = make() or elastic_backend()
        formed = time.perf_counter()
        total(made, members.index(self.process), len(members), 8)
        summed = time.perf_counter()
        total(made, members.index(self.process), len(members), NUMEL)
        self.store.set(f"{topic} took {self.process}", f"{formed - start} {summed - formed}")
        return made

    def until_lost(self) -> None:
        x = torch.zeros(NUMEL)
        try:
            while True:
                dist.all_reduce(x)
        except pycomm.Error:
            return


def elastic_backend() -> Any:
    found = pycomm.backend.find()
    assert found is not None
    return found


def total(group: Any, rank: int, size: int, numel: int) -> None:
    """Compare the first and the last number of a sum.

    Raises:
        AssertionError: it is wrong.
    """
    x = torch.full((numel,), float(rank + 1))
    group.allreduce([x]).wait()
    wanted = torch.full((numel,), size * (size + 1) / 2)
    if not torch.equal(x, wanted):
        raise AssertionError(f"rank {rank}: the sum over {size} members is wrong")


@dataclass(frozen=True)
class Turn:
    """A turn of the measurement: one of its members is killed, and another process joins."""

    number: int
    members: list[int]
    killed: int
    joins: int

    @property
    def after(self) -> list[int]:
        return [self.joins if member == self.killed else member for member in self.members]


def turns_of(ranks: int, repeats: int) -> list[Turn]:
    """Return all turns: in each another rank's process is replaced."""
    turns, members = [], list(range(ranks))
    for number in range(repeats):
        turns.append(Turn(number, members, members[number % ranks], ranks + number))
        members = turns[-1].after
    return turns


def take_turn(member: Member, turn: Turn) -> None:
    number, before, after = turn.number, turn.members, turn.after
    if member.process in before:
        member.measure(f"same {number}", before, lambda: member.form(2 * number + 1, before))
        member.measure(f"gloo same {number}", before, lambda: member.gloo(f"a{number}", before))
        member.meet(f"armed {number}", before)
        if member.process == turn.killed:
            Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        member.until_lost()
    if member.process in after:
        member.measure(f"replaced {number}", after, lambda: member.form(2 * number + 2, after))
        member.measure(f"gloo replaced {number}", after, lambda: member.gloo(f"b{number}", after))


def member_main(process: int, port: int, ranks: int, repeats: int, transport: str) -> None:
    torch.set_num_threads(1)
    member = Member(process, port, transport)
    turns = turns_of(ranks, repeats)
    if process < ranks:
        member.form(0, turns[0].members)
    for turn in turns:
        take_turn(member, turn)
    member.meet("end", turns[-1].after)
    dist.destroy_process_group()


def measure(options: argparse.Namespace, transport: str, origin: Origin) -> list[dict[str, object]]:
    """Return a row for each method.

    Raises:
        RuntimeError: a member failed.
    """
    ranks, repeats = options.ranks, options.repeats
    turns = turns_of(ranks, repeats)
    store = _distributed_c10d.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT
    )
    with tempfile.TemporaryFile() as printed:
        members: list[subprocess.Popen[bytes]] = []
        try:
            for process in range(ranks + repeats):
                words = ["member", str(process), str(store.port), str(ranks), str(repeats)]
                command = [sys.executable, "-m", "pycomm.bench.reconfigure", *words, transport]
                members.append(subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT))
            status = [member.wait(options.limit) for member in members]
        except subprocess.TimeoutExpired:
            status = [0]
        finally:
            for member in members:
                member.kill()
                member.wait()
        gone = {turn.killed for turn in turns}
        wanted = [-signal.SIGKILL if p in gone else 0 for p in range(ranks + repeats)]
        if status != wanted:
            printed.seek(0)
            text = printed.read().decode(errors="replace")
            raise RuntimeError(f"members ended with {status}, not {wanted}:\n{text}")
    rows = []
    for what in ("same", "replaced"):
        for method in METHODS:
            formed, summed = [], []
            for turn in turns:
                topic = f"{'gloo ' if method == 'gloo' else ''}{what} {turn.number} took"
                after = turn.members if what == "same" else turn.after
                took = [store.get(f"{topic} {member}").decode().split() for member in after]
                formed.append(max(float(one[0]) for one in took))
                summed.append(max(float(one[1]) for one in took))
            rows.append(
                {
                    "ranks": ranks,
                    "transport": transport if method == "pycomm" else "tcp",
                    "members": what,
                    "method": method,
                    "repeats": repeats,
                    "ms": f"{1e3 * statistics.median(formed):.1f}",
                    "most_ms": f"{1e3 * max(formed):.1f}",
                    "first_sum_ms": f"{1e3 * statistics.median(summed):.1f}",
                    **vars(origin),
                }
            )
    return rows


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["member"]:
        process, port, ranks, repeats = map(int, argv[1:5])
        member_main(process, port, ranks, repeats, argv[5])
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.reconfigure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-p", "--ranks", type=int, default=8, help="members (8)")
    add("--transport", default="auto,tcp", help="comma-separated (auto,tcp)")
    add("--repeats", type=int, default=5, help="turns; in each, one member is replaced (5)")
    add("--limit", type=float, default=300, help="seconds for all turns (300)")
    add("--csv", type=Path, help="append all rows to this file")
    options = parser.parse_args(argv)
    if options.ranks < 2 or options.repeats < 1:
        parser.error("want at least two ranks and one turn")
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.reconfigure", *argv]))
    print("ranks  transport  members   method      ms  most ms  first sum ms")
    try:
        for transport in options.transport.split(","):
            rows = measure(options, transport, origin)
            for row in rows:
                print(
                    f"{row['ranks']:>5}  {row['transport']:<9}  {row['members']:<8}  "
                    f"{row['method']:<6} {row['ms']:>7}  {row['most_ms']:>7}  "
                    f"{row['first_sum_ms']:>12}",
                    flush=True,
                )
            if options.csv:
                tables.append(options.csv, rows)
    except RuntimeError as error:
        print(f"reconfigure: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
