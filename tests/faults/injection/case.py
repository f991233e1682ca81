"""One case: a group of ranks, what they call, who of them fails, how and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

FAULTS = ("kill", "kill2", "stop", "raise", "exit", "_exit", "socket", "slow", "memory", "abort")
"""SIGKILL, of one rank or of two at once, as when a host dies; SIGSTOP; an exception in the caller,
sys.exit, os._exit; its connections are cut one way or both; it sleeps; it has no memory left; it
aborts from another thread."""
NETWORK = ("down", "drop", "vanish")
"""The victim's interface is taken down; all that it sends and is sent is lost; the same, and then
it is killed, as if its host had lost its power. Each rank needs a network of its own."""
FROM_OUTSIDE = ("kill", "kill2", "stop", *NETWORK)
"""Those that hit a process wherever it is."""
PHASES = ("init", "split", "steady", "shutdown")
PHASES_OF = {
    "kill": PHASES,
    "kill2": PHASES,
    "stop": PHASES,
    "_exit": PHASES,
    **dict.fromkeys(NETWORK, ("split", "steady")),
    "abort": ("split", "steady", "shutdown"),  # before there is a group there is nothing to abort
}
"""Faults that may come in other phases than the steady one."""
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
CODECS = ("quant", "quant:bits=4", "topk:density=0.1")
CODED = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Call:
    """What all ranks call together."""

    op: str
    numel: int
    codec: str = ""
    root: int = 0

    def __str__(self) -> str:
        return f"{self.op}{' ' + self.codec if self.codec else ''} of {self.numel}"


HUNGRY = Call("all_reduce", 1_000_000, "quant")
"""A call that needs memory of its own."""


@dataclass(frozen=True)
class Case:
    """Everything about a case but what the machine makes of it."""

    seed: int
    number: int
    world: str
    transport: str
    ranks: int
    victim: int
    fault: str
    phase: str
    calls: tuple[Call, ...]
    async_op: bool
    delay: float
    """seconds from the start of the phase to the fault"""
    how: float
    """0 to 1: what else the fault may choose"""

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take: short where it is what ends the wait."""
        return 0.4 if self.fault in ("stop", *NETWORK) else 8.0

    @property
    def meeting(self) -> float:
        """Seconds that ranks wait for each other before they are connected."""
        return 1.0 if self.phase in ("init", "split") else 8.0

    @property
    def without_memory_at(self) -> int:
        """Number of the call, `HUNGRY`, that its victim makes with no memory left; -1: none."""
        return int(20 * self.how) if self.fault == "memory" else -1

    @property
    def victims(self) -> set[int]:
        """All ranks that it hits."""
        return {self.victim, (self.victim + (self.fault == "kill2")) % self.ranks}

    @property
    def leavers(self) -> set[int]:
        """The ranks that cannot go on after it."""
        stays = self.fault in ("socket", "slow", "memory", "abort", "down", "drop")
        return set() if stays else self.victims

    def __str__(self) -> str:
        calls = ", ".join(map(str, self.calls))
        victims = " and ".join(map(str, sorted(self.victims)))
        return (
            f"case {self.number}: {self.fault} of rank {victims} of {self.ranks}, "
            f"{self.transport}, {self.phase} + {self.delay * 1e3:.1f} ms, "
            f"{'async' if self.async_op else 'sync'} {calls}"
        )


def _call(rng: random.Random, ranks: int, op: str) -> Call:
    numel = int(10 ** rng.uniform(0, 5.3))
    codec = rng.choice(CODECS) if op in CODED and rng.random() < 0.4 else ""
    return Call(op, numel, codec, rng.randrange(ranks))


def draw(
    seed: int,
    number: int,
    *,
    transports: Sequence[str],
    faults: Sequence[str] = FAULTS,
    phases: Sequence[str] = PHASES,
) -> Case:
    """Return case `number` of a seed; of these transports, faults and phases."""
    rng = random.Random(f"{seed}/{number}")
    fault = rng.choice(list(faults))
    transport = "tcp" if fault in ("socket", *NETWORK) else rng.choice(list(transports))
    ranks = rng.choice((3, 4) if fault == "kill2" else (2, 3, 4))
    # Most cases are about operations.
    possible = PHASES_OF.get(fault, ("steady",))
    others = [phase for phase in phases if phase != "steady" and phase in possible]
    phase = "steady"
    if others and ("steady" not in phases or rng.random() < 0.3):
        phase = rng.choice(others)
    calls = tuple(_call(rng, ranks, rng.choice(OPS)) for _ in range(rng.choice((1, 1, 2, 4))))
    if fault == "memory":  # none of them may have taken already what the hungry one needs
        calls = (Call("broadcast", 100),)
    span = {"init": 0.01, "split": 0.006, "steady": 0.02, "shutdown": 0.002}[phase]
    return Case(
        seed=seed,
        number=number,
        world="core",
        transport=transport,
        ranks=ranks,
        victim=rng.randrange(ranks),
        fault=fault,
        phase=phase,
        calls=calls,
        async_op=rng.random() < 0.5,
        delay=rng.uniform(0, span),
        how=rng.random(),
    )
