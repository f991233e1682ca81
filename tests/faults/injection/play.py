"""The player of a case: forks its ranks, injects the fault, and collects the ranks' reports."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.injection.case import ELASTIC, FROM_OUTSIDE, NETWORK, Case
from tests.faults.injection.rank import Rank, go_on, wait_for
from tests.processes.faulty_links import FaultyNetlab

CORE = 4 << 20
"""Maximum bytes of a core dump."""
MENDED = "mended"
"""Name of the file that announces that the network is restored."""
DUMPING = (signal.SIGSEGV, signal.SIGABRT, signal.SIGQUIT, signal.SIGBUS, signal.SIGFPE)
LIMIT = 20.0
"""Seconds after which a running rank counts as hung."""


@dataclass
class Played:
    """The outcome of a case, by rank."""

    case: Case
    at: float | None = None
    """time of the fault, in monotonic seconds of this machine"""
    said: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    stacks: str = ""

    def word(self, rank: int, word: str) -> dict[str, Any] | None:
        return self.said.get(rank, {}).get(word)


def limit_core_dumps() -> None:
    """Limit this process's core dumps to a small size; disable them if they go to a program."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    size = 0 if pattern.startswith("|") else CORE
    resource.setrlimit(resource.RLIMIT_CORE, (size, size))


def _rank_process(case: Case, rank: int, folder: str, pipe: int, lab: FaultyNetlab | None) -> None:
    """Run a forked rank to its end. Never returns."""
    gc.freeze()  # the rank looks for what it leaves behind itself, again and again
    log = open(f"{folder}/rank{rank}.log", "w")  # noqa: SIM115 - to the end of the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.dump_traceback_later(LIMIT - 2, file=log)
    os.chdir(folder)  # for core dumps, which are removed with it
    limit_core_dumps()
    for number in DUMPING:  # a shell may have set some to be ignored
        signal.signal(number, signal.SIG_DFL)

    def say(word: str, **facts: Any) -> None:
        line = json.dumps({"rank": rank, "word": word, **facts}) + "\n"
        os.write(pipe, line.encode())  # atomic, since it is shorter than PIPE_BUF

    code = 0
    try:
        if lab:
            lab.enter(rank)
        player = player_of(case, rank, folder, say)
        player.main()
        if rank not in case.leavers:
            if case.phase not in ELASTIC:
                if case.fault in ("down", "drop"):
                    wait_for(Path(folder, MENDED))
                go_on(case, rank, folder)
                player.check_memory()
            say("on")
    except SystemExit:
        code = 3
    except BaseException as error:
        code = 1
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the reader has ended
            say("broken", text=f"{type(error).__name__}: {error}"[:1500])
    log.flush()
    os._exit(code)


def player_of(case: Case, rank: int, folder: str, say: Any) -> Any:
    """Return the player of a rank."""
    if case.phase not in ELASTIC:
        return Rank(case, rank, folder, say)
    from tests.faults.injection.elastic import ElasticRank  # it needs torch

    return ElasticRank(case, rank, folder, say)


def play(case: Case, lab: FaultyNetlab | None = None) -> Played:
    """Play a case to its end, in at most `LIMIT` seconds. No process outlives it.

    Network faults need a `lab` with a node for each rank.
    """
    played = Played(case)
    if case.phase in ELASTIC:  # so that the forked ranks need not import it
        import torch  # noqa: F401

        from pycomm._build import load_c10d

        load_c10d()
    with tempfile.TemporaryDirectory(prefix="pycomm-faults-") as folder:
        reader, writer = os.pipe()
        children: dict[int, int] = {}
        sys.stdout.flush()
        for rank in range(case.ranks):
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                _rank_process(case, rank, folder, writer, lab)
            children[rank] = pid
        os.close(writer)
        try:
            _watch(played, reader, children, lab, Path(folder, MENDED))
        finally:
            if lab and case.fault in NETWORK:
                lab.mend(case.victim)
            os.close(reader)
            for pid in children.values():
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still ours
                os.waitpid(pid, 0)
        for rank in played.hung:
            with open(f"{folder}/rank{rank}.log") as log:
                played.stacks += f"rank {rank}:\n{log.read()}"
    return played


def lab_of(nodes: int) -> FaultyNetlab:
    """Make a network for fault injection, with a node per rank. It ends with this process."""
    lab = FaultyNetlab(nodes, "unlimited")
    atexit.register(lab.close)
    return lab


def _strike(case: Case, processes: list[int], lab: FaultyNetlab | None) -> float:
    """Inject the fault; return its time."""
    at = time.monotonic()
    if lab and case.fault == "down":
        lab.take_down(case.victim)
    elif lab and case.fault in ("drop", "vanish"):
        lab.cut(case.victim)
    for process in processes:
        if case.fault in ("stop", "pause"):
            os.kill(process, signal.SIGSTOP)
        elif case.fault == "crash":
            os.kill(process, DUMPING[int(case.how * len(DUMPING))])
        elif case.fault in ("kill", "kill2", "vanish"):
            os.kill(process, signal.SIGKILL)
    return at


def _watch(
    played: Played, reader: int, children: dict[int, int], lab: FaultyNetlab | None, mended: Path
) -> None:
    """Read the ranks' reports until all that can have finished; inject the fault meanwhile."""
    case = played.case
    outside = case.fault in FROM_OUTSIDE
    waited = set(children) - case.leavers
    end = time.monotonic() + LIMIT
    strike = None
    buffer = b""
    while waited and time.monotonic() < end:
        now = time.monotonic()
        if strike is not None and now >= strike:
            played.at = _strike(case, [children[rank] for rank in case.victims], lab)
            strike = None
        until = end if strike is None else strike
        ready, _, _ = select.select([reader], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            continue
        block = os.read(reader, 1 << 16)
        if not block:
            break
        *lines, buffer = (buffer + block).split(b"\n")
        for line in lines:
            facts = json.loads(line)
            rank, word = facts.pop("rank"), facts.pop("word")
            words = played.said.setdefault(rank, {})
            words[word] = facts
            if word == "fault":
                played.at = facts["at"]
            if word in ("on", "broken"):
                waited.discard(rank)
            if case.fault == "pause" and strike is None and word == "over":
                others = set(children) - case.victims
                if all(played.word(r, "over") for r in others):
                    os.kill(children[case.victim], signal.SIGCONT)
            if lab and word == "over" and all(played.word(r, word) for r in waited):
                lab.mend(case.victim)
                mended.touch()
            if word == "ready" and outside and all(played.word(r, word) for r in children):
                strike = time.monotonic() + case.delay
    played.hung = sorted(waited)
