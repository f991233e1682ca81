"""Schedule of the soak: the events of a cycle, drawn from the seed and the cycle's number."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

RANKS = 3
ELDER = 0
"""The process that lives from the first cycle to the last. Its rank in the group changes."""
CODECS = ("none", "int8", "int4", "topk:0.05")
TRANSPORTS = ("shm", "tcp")
STORES = ("file", "tcp")
MISHAPS = ("codec", "groups", "split", "slow", "mismatch", "abort")
ON_TCP = (*MISHAPS, "cut", "cut")
STEPS = (5, 20)
JOINS = 4
"""How often a member goes and another one joins, in a cycle of an elastic group."""


@dataclass(frozen=True)
class GroupSetup:
    """How a group of all processes is made."""

    transport: str
    sockets: int
    store: str
    order: tuple[int, ...]
    """the processes by their rank in the group"""


@dataclass(frozen=True)
class Event:
    """Something that happens to all processes of a group, and then they train some steps."""

    what: str
    steps: int
    codec: str = ""
    process: int = ELDER
    """whom it befalls"""
    seconds: float = 0.0
    """when, or for how long"""
    seed: int = 0
    setup: GroupSetup | None = None


def _draw_setup(rng: random.Random) -> GroupSetup:
    order = list(range(RANKS))
    rng.shuffle(order)
    return GroupSetup(
        transport=rng.choice(TRANSPORTS),
        sockets=rng.choice((1, 2)),
        store=rng.choice(STORES),
        order=tuple(order),
    )


def draw(seed: int, number: int) -> list[Event]:
    """The events of a cycle: a start, mishaps, a death, a restart with all, mishaps, the end."""
    rng = random.Random(f"{seed}/{number}")
    victim = rng.choice([process for process in range(RANKS) if process != ELDER])

    def event(what: str, setup: GroupSetup | None = None) -> Event:
        return Event(
            what,
            steps=rng.randint(*STEPS),
            codec=rng.choice(CODECS),
            process=victim if what == "kill" else rng.randrange(RANKS),
            seconds=rng.uniform(0.02, 0.3),
            seed=rng.randrange(1 << 30),
            setup=_draw_setup(rng) if what == "abort" else setup,
        )

    events = []
    for what in ("start", "restart"):
        setup = _draw_setup(rng)
        events.append(event(what, setup))
        for mishap in rng.sample(ON_TCP if setup.transport == "tcp" else MISHAPS, 3):
            events.append(event(mishap))
            if mishap == "abort":
                assert events[-1].setup is not None
                setup = events[-1].setup
        if what == "start":
            events.append(event("kill"))
    return events


def draw_joins(seed: int, number: int) -> list[Event]:
    """The events of a cycle of an elastic group: a member leaves or dies, one joins, and so on."""
    rng = random.Random(f"joins {seed}/{number}")
    others = [process for process in range(RANKS) if process != ELDER]
    first = _draw_setup(rng)
    events = [Event("found", rng.randint(*STEPS), rng.choice(CODECS), setup=first)]
    for _ in range(JOINS):
        victim, seconds = rng.choice(others), rng.uniform(0.02, 0.3)
        what, steps = rng.choice(("quit", "die")), rng.randint(*STEPS)
        events.append(Event(what, steps, process=victim, seconds=seconds))
        order = replace(first, order=_draw_setup(rng).order)
        events.append(Event("return", rng.randint(*STEPS), process=victim, setup=order))
    seed = rng.randrange(1 << 30)
    return [replace(event, seed=seed) for event in events]
