"""The player of a case, which leads the ranks through it and injects the fault, and its judge."""

from __future__ import annotations

import re
import signal
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.injection.case import ELASTIC, FROM_OUTSIDE, NETWORK, Case
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


# ------------------------------------------------------------------ the judge
# Requirements that must hold after a case, and the text of each breach.


DEATH = 0.2
"""The promised limit in seconds from a death to the last survivor's error."""
DEATHS = ("kill", "kill2", "crash", "raise", "exit", "_exit")
KINDS = {
    **dict.fromkeys(DEATHS, frozenset({"PeerLost"})),
    **dict.fromkeys(("stop", "pause", *NETWORK), frozenset({"Timeout"})),
    **dict.fromkeys(("fork", "descriptors", "slow"), frozenset({None})),
    "socket": {"PeerLost", None},  # or it has reconnected
    "memory": {"Error", None},  # or it had enough memory in reserve
    "abort": {"Error"},
}


def survivors(case: Case) -> list[int]:
    return [rank for rank in range(case.ranks) if rank not in case.leavers]


def breaches(played: Played) -> list[str]:
    """Return all breaches but those of times; see `latest`."""
    case = played.case
    wrong = [played.broken] if played.broken else []
    for rank in survivors(case):
        over, left = played.word(rank, "over"), played.word(rank, "left")
        if over is not None:
            wrong += [f"rank {rank}: {what}" for what in _of_error(case, over, rank)]
        if left:
            wrong += [f"rank {rank} leaves behind {n} {what}" for what, n in left.items()]
    return wrong


def _of_error(case: Case, over: dict[str, Any], rank: int) -> list[str]:
    kind, text = over.get("error"), over.get("text", "")
    allowed = set(KINDS[case.fault])
    if case.phase == "shutdown":
        allowed |= {None}  # its part may be done
    if case.phase in ("init", *ELASTIC) and "did not come (here)" in text:
        # Nobody can know of a rank that died before it joined; the endpoint of a member is asked
        # after a while, and one that dumps core still has it then.
        allowed |= {"Timeout"}
    hosts = [r * 2 // case.ranks for r in range(case.ranks)] if case.transport == "auto" else []
    if case.phase == "init" and any(
        not {r for r, h in enumerate(hosts) if h == host} - case.victims for host in set(hosts)
    ):
        allowed |= {"Timeout"}  # nor from another host, where no witness is left
    if case.phase == "split" and case.fault == "abort":
        allowed |= {"PeerLost"}  # the rank was in the new group already
    wrong = []
    if case.fault == "down" and case.phase == "split":
        allowed |= {"Error"}  # a rank without an interface cannot join
    if kind not in allowed:
        return [f"{kind}, not {allowed}: {text}"]
    if kind is None:
        return []
    if case.fault == "pause" and rank == case.victim:
        return []  # it learns that the group failed; a wrong result would be reported
    cut_off = case.fault in ("down", "drop") and rank == case.victim
    if cut_off and kind == "Error":  # it knows that it has no interface
        return []
    if case.fault == "socket" or cut_off:  # neither end of a cut connection is more to blame
        return [] if re.search(r"rank \d", text) else [f"names nobody: {text}"]
    named = blamed(text) & case.victims
    if not named or (kind == "PeerLost" and over["named"] not in named):
        wrong.append(f"does not name rank {' or '.join(map(str, case.victims))}: {text}")
    operating = case.phase in ("steady", "shutdown") and over["op"]
    if operating and not _names_call(over, text):
        wrong.append(f"does not name {over['op']} #{over['seq']}: {text}")
    return wrong


def blamed(text: str) -> set[int]:
    """Return the ranks that an error text blames."""
    lists = re.findall(r"did not come \([^)]+\): ([\d, ]+)", text)
    lists += re.findall(r"(?:no connection with|cannot join:) ranks? (\d+)", text)
    verbs = "is|are|has|have|does|do|died|left|was|aborted|differs|differ"
    lists += re.findall(rf"\branks? (\d[\d, -]*)(?: \([^)]*\))? (?:{verbs})\b", text)
    lists += re.findall(r"^rank (\d+): no memory", text)
    ranks = set()
    for part in ",".join(lists).replace(" ", "").split(","):
        first, _, last = part.partition("-")
        if first:
            ranks |= set(range(int(first), int(last or first) + 1))
    return ranks


def _names_call(over: dict[str, Any], text: str) -> bool:
    if over["op"] == "send_recv" and re.search(r"\b(send|recv)\b", text):
        return True
    if over["error"] == "Error":  # an abort reports the state of the rank that aborted
        return bool(re.search(r"#\d+\b|\b(send|recv)\b", text))
    if over["op"] in ("broadcast", "scatter"):  # a root runs ahead, and others report their state
        return f"{over['op']} #" in text
    # The reporting rank may be a call behind or ahead of this one.
    near = "|".join(str(over["seq"] + d) for d in (-1, 0, 1))
    return bool(re.search(rf"#({near})\b", text))


def latest(played: Played) -> float | None:
    """Return the seconds from the fault to the last survivor's error; None if there was none."""
    overs = [played.word(rank, "over") for rank in survivors(played.case)]
    times = [over["at"] for over in overs if over and over.get("error")]
    if not times or played.at is None:
        return None
    return max(times) - played.at


def is_late(played: Played) -> bool:
    """Return whether survivors took longer than promised to learn of a death."""
    overs = [played.word(rank, "over") for rank in survivors(played.case)]
    known = all(over and over.get("error") == "PeerLost" for over in overs)
    return known and (latest(played) or 0.0) > DEATH
