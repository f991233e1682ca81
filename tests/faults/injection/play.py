"""The player of a case: it leads the ranks through the case, and injects the fault."""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.injection.case import ELASTIC, FROM_OUTSIDE, Case
from tests.faults.injection.player import DUMPING, Broken, Player
from tests.faults.injection.rank import Rank
from tests.processes.labs import FaultyNetlab

LIMIT = 20.0
"""Seconds after which a running rank counts as hung."""


@dataclass
class Played:
    """The outcome of a case."""

    case: Case
    said: dict[int, dict[str, Any]] = field(default_factory=dict)
    """what each rank has said, by word"""
    struck: float | None = None
    """time of a fault from outside, in monotonic seconds of this machine"""
    broken: str = ""
    """what ranks raised where they should not, and the stacks of those that hang"""

    def word(self, rank: int, word: str) -> Any:
        return self.said.get(rank, {}).get(word)

    @property
    def at(self) -> float | None:
        """Return the time of the fault."""
        return self.word(self.case.victim, "fault") or self.struck


def play(case: Case, lab: FaultyNetlab | None = None) -> Played:
    """Play a case to its end. No process outlives it.

    Network faults need a `lab` with a node for each rank.
    """
    played = Played(case)
    kind = Rank
    if case.phase in ELASTIC:
        from tests.faults.injection.elastic import ElasticRank  # it needs torch

        kind = ElasticRank
    with tempfile.TemporaryDirectory(prefix="pycomm-faults-") as folder:

        def make(rank: int, say: Any) -> Rank:
            if lab:
                lab.enter(rank)
            return kind(case, rank, folder, say)

        player = Player(make, Path(folder), LIMIT)
        played.said = player.said
        try:
            for rank in range(case.ranks):
                player.start(rank)
            _lead(player, played, lab)
        except Broken as broken:
            played.broken = str(broken)
        finally:
            if lab:
                lab.mend(case.victim)
            player.stop()
    return played


def _lead(player: Player, played: Played, lab: FaultyNetlab | None) -> None:
    case = played.case
    left = [rank for rank in player.numbers if rank not in case.leavers]
    handles = list(player.tell("meet").values())  # of an elastic group; else None of each
    if case.phase in ELASTIC:
        if case.phase == "rejoin":
            player.tell("form", 1, handles)
        first = player.numbers if case.phase == "reconfigure" else player.numbers[:-1]
        player.tell("form", 2, handles[: len(first)], to=first)
    if case.fault in FROM_OUTSIDE:
        player.schedule(case.delay, partial(_strike, player, played, lab))
    player.send("operate", handles)
    if case.fault == "pause":
        player.gather("over", [rank for rank in left if rank not in case.victims])
        player.kill(case.victim, signal.SIGCONT)
    player.gather("over", left)
    if lab:
        lab.mend(case.victim)
    player.gather("operate", left)
    player.tell("go_on", left, [handles[rank] for rank in left], to=left)


def _strike(player: Player, played: Played, lab: FaultyNetlab | None) -> None:
    """Inject the fault from outside."""
    case = played.case
    played.struck = time.monotonic()
    if lab and case.fault == "down":
        lab.take_down(case.victim)
    elif lab and case.fault in ("drop", "vanish"):
        lab.cut(case.victim)
    for rank in case.victims:
        if case.fault in ("stop", "pause"):
            player.kill(rank, signal.SIGSTOP)
        elif case.fault == "crash":
            player.kill(rank, DUMPING[int(case.how * len(DUMPING))])
        elif case.fault in ("kill", "kill2", "vanish"):
            player.kill(rank, signal.SIGKILL)
