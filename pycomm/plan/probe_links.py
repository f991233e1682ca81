"""What a link of two ranks is like, and what more ranks than cores cost."""

from __future__ import annotations

import time

from pycomm.communicator import Communicator
from pycomm.plan import simulate
from pycomm.plan.algorithms import Size
from pycomm.plan.cluster import Link
from pycomm.plan.codecs import NONE
from pycomm.plan.probe_ranks import PAUSE, Ranks, all_reduces
from pycomm.plan.probed import Crowd, Probe

SHORT, FIRST, LONGEST = 8, 1 << 20, 64 << 20  # bytes of messages
SMALL = 64 << 10  # of a buffer whose messages from all ranks fit the queues of a switch
MANY = 256  # small messages that are on their way at once


def measure(
    ranks: Ranks, level: str, member: int, memory: float, budget: float
) -> tuple[Link, Communicator]:
    """From all-reduces of two ranks, short and long.

    A short one waits for one message each way. Two shots between two ranks send a buffer of b bytes
    once each way, fold it, and wait for two rounds; so the rate is what a longer buffer takes more
    time for. The core's time gives what a byte costs there, less folding.
    """
    algos = {name: "auto" if level == "intra" else name for name in ("one_shot", "two_shot")}
    groups = {
        name: Communicator(ranks.store, member, 2, group=f"probe-{level}-{name}", algo=algo)
        for name, algo in algos.items()
    }
    short, _ = all_reduces(groups["one_shot"], SHORT, max(5, round(120 * budget)))
    group = groups["two_shot"]
    seconds, core = all_reduces(group, FIRST, 4)
    # All sizes cost their longer part, as the planner's formulas do; so they are long.
    length, times = FIRST, max(3, min(20, round(budget / 4 / seconds)))
    while length < LONGEST and 3 * seconds * (2 * length / FIRST) < budget / 2:
        length *= 2
    seconds, core = all_reduces(group, FIRST, times)
    longer, longer_core = all_reduces(group, length, 5) if length > FIRST else (seconds, core)
    rate, per_byte = FIRST / seconds, core / FIRST
    if longer > seconds:  # else other work was in the way of the shorter
        rate = (length - FIRST) / (longer - seconds)
    if length > FIRST:
        per_byte = (longer_core - core) / (length - FIRST)
    message = min(short / 2, _message(groups["one_shot"]))
    rested, _ = all_reduces(group, FIRST, 5, pause=PAUSE)
    link = Link(
        name="probed",
        rate=rate,
        latency=max(0.0, short - message),
        message=message if level == "inter" else 0.0,
        byte=max(0.0, per_byte - 1 / memory) if level == "inter" else 0.0,
        burst=max(0.0, seconds - rested) * rate if level == "inter" else 0.0,
    )
    return link, group


def _message(group: Communicator) -> float:
    """Seconds of one of many small messages each way, none of which waits for another."""
    peer, out = 1 - group.rank, bytearray(SHORT)
    samples = []
    for _ in range(5):
        group.barrier()
        begin = time.perf_counter()
        requests = [group.recv(bytearray(SHORT), peer) for _ in range(MANY)]
        requests += [group.send(out, peer) for _ in range(MANY)]
        for request in requests:
            request.wait()
        samples.append((time.perf_counter() - begin) / MANY)
    return min(samples)


def crowd(ranks: Ranks, members: int, found: Probe | None, budget: float) -> Crowd | None:
    """From all-reduces of more ranks of a machine than it has cores.

    The time of a core in a longer buffer gives what a byte costs there, less folding; what a small
    one takes beyond what the planner says is waiting for a core, in each of two rounds.

    Args:
        ranks: all call it.
        members: how many of them talk.
        found: what is known so far, on rank 0; it gets the result, the others None.
        budget: seconds to take.
    """
    if ranks.rank >= members:
        return None
    name = f"probe-crowd-{members}"
    group = Communicator(ranks.store, ranks.rank, members, group=name, algo="two_shot")
    seconds, core = all_reduces(group, FIRST, 3, pause=PAUSE)
    length = FIRST
    while length < LONGEST and 3 * seconds * (2 * length / FIRST) < budget / 2:
        length *= 2
    times = max(3, min(10, round(budget / 3 / (seconds + PAUSE))))
    small, _ = all_reduces(group, SMALL, 10, pause=PAUSE)
    _, core = all_reduces(group, FIRST, times, pause=PAUSE)
    longer_core = all_reduces(group, length, 3)[1] if length > FIRST else core
    if found is None:
        return None
    plain = found.cluster(members)
    byte = plain.inter.byte
    if length > FIRST:
        per_byte = (longer_core - core) / (length - FIRST)
        moved = 2 * (members - 1) / members
        folded = 1 / plain.holding(length // 4).processor.memory
        byte = max(byte, (per_byte - folded) / moved)
    crowded = found.crowded(Crowd(members, byte, 0.0)).cluster(members)
    expected = simulate.all_reduce(crowded, NONE, "two_shot", Size.of(SMALL // 4, NONE))
    return Crowd(members, byte, max(0.0, small - expected) / 2)
