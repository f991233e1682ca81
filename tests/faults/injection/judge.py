"""Requirements that must hold after a case, and the text of each breach."""

from __future__ import annotations

import re
from typing import Any

from tests.faults.injection.case import ELASTIC, NETWORK, Case
from tests.faults.injection.play import Played

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
