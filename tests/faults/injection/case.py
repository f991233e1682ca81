"""Cases of fault injection: a group of ranks, its calls, the victim, the fault and its moment."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

FAULTS = (
    *("kill", "kill2", "crash", "stop", "pause", "raise", "exit", "_exit", "socket", "slow"),
    *("memory", "abort", "fork", "descriptors"),
)
"""SIGKILL, of one rank or of two at once, as when a host dies; a signal that dumps core; SIGSTOP,
for ever or until the others have given up and use their memory for something else; an exception in
the caller, sys.exit, os._exit; its connections are cut one way or both; it sleeps; it has no memory
left; it aborts from another thread, forks a child that calls, or closes the descriptors of shared
memory."""
NETWORK = ("down", "drop", "vanish")
"""The victim's interface is taken down; all of its traffic is lost; all traffic is lost, and then
it is killed, as if its host had lost power. Each rank needs a network of its own."""
FROM_OUTSIDE = ("kill", "kill2", "crash", "stop", "pause", *NETWORK)
"""Faults that hit a process at any point of its execution."""
LASTS = ("socket", "slow", "memory", "fork", "descriptors")
"""Faults after which all ranks may continue unaffected."""
PHASES = ("init", "split", "steady", "shutdown")
ELASTIC = ("join", "rejoin", "reconfigure")
"""Phases of a group whose members change: a process joins, one that had left comes back, and the
members form the group once more. They are played if they are asked for."""
PHASES_OF = {
    "kill": PHASES,
    "kill2": PHASES,
    "crash": PHASES,
    "stop": PHASES,
    "_exit": PHASES,
    **dict.fromkeys(NETWORK, ("split", "steady")),
    "abort": ("split", "steady", "shutdown"),  # abort needs an existing group
}
"""Faults that may occur in phases other than the steady one."""
FAULTS_OF_ELASTIC = ("kill", "kill2", "crash", "stop", "_exit")
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
OPS += ("broadcast", "scatter", "send_recv")
CODECS = ("quant", "quant:bits=4", "topk:density=0.1")
CODED = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Call:
    """A call that all ranks make together."""

    op: str
    numel: int
    codec: str = ""
    root: int = 0

    def __str__(self) -> str:
        return f"{self.op}{' ' + self.codec if self.codec else ''} of {self.numel}"


MEET, MEETING = Call("all_reduce", 1), 4096
"""A call that no rank ends before all have begun it, and after how many of a case's it comes."""
HUNGRY = Call("all_reduce", 1_000_000, "quant")
"""A call that needs memory of its own."""


@dataclass(frozen=True)
class Case:
    """The complete description of a case."""

    seed: int
    number: int
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
    """0 to 1: selects a variant of the fault"""

    @property
    def is_apart(self) -> bool:
        """Return whether each rank has a network of its own."""
        return self.fault in NETWORK

    @property
    def timeout(self) -> float:
        """Return an operation's timeout in seconds, short where the timeout ends the wait."""
        return 0.4 if self.fault in ("stop", "pause", *NETWORK) else 8.0

    @property
    def rendezvous(self) -> float:
        """Return the timeout of the rendezvous in seconds."""
        return 1.0 if self.phase in ("init", "split", *ELASTIC) else 8.0

    @property
    def without_memory_at(self) -> int:
        """Return the number of the victim's call, `HUNGRY`, without memory; -1: none."""
        return int(20 * self.how) if self.fault == "memory" else -1

    @property
    def victims(self) -> set[int]:
        """Return all ranks that the fault hits."""
        return {self.victim, (self.victim + (self.fault == "kill2")) % self.ranks}

    @property
    def leavers(self) -> set[int]:
        """Return the ranks that cannot continue after the fault."""
        stays = self.fault in ("pause", *LASTS, "abort", "down", "drop")
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
    """Draw case `number` of a seed, among these transports, faults and phases."""
    rng = random.Random(f"{seed}/{number}")
    fault = rng.choice(list(faults))
    transport = "tcp" if fault in ("socket", *NETWORK) else rng.choice(list(transports))
    if fault == "descriptors":
        transport = "shm"
    ranks = rng.choice((3, 4) if fault == "kill2" else (2, 3, 4))
    # Most cases are about operations.
    possible = PHASES_OF.get(fault, ("steady",))
    if fault in FAULTS_OF_ELASTIC:
        possible += ELASTIC
    others = [phase for phase in phases if phase != "steady" and phase in possible]
    phase = "steady"
    if others and ("steady" not in phases or rng.random() < 0.3):
        phase = rng.choice(others)
    ops = OPS[:4] if phase in ELASTIC else OPS
    calls = tuple(_call(rng, ranks, rng.choice(ops)) for _ in range(rng.choice((1, 1, 2, 4))))
    if fault == "pause":  # large enough to be used in place
        calls = tuple(replace(call, numel=call.numel + 1000) for call in calls)
    if phase in ELASTIC:  # whose group is torch's, where hooks alone encode
        calls = tuple(replace(call, codec="") for call in calls)
    if fault == "memory":  # no earlier call may have allocated what the victim's call needs
        calls = (Call("broadcast", 100),)
    span = {"init": 0.01, "split": 0.006, "steady": 0.02, "shutdown": 0.002}
    span |= dict.fromkeys(ELASTIC, 0.03)
    return Case(
        seed=seed,
        number=number,
        transport=transport,
        ranks=ranks,
        victim=rng.randrange(ranks),
        fault=fault,
        phase=phase,
        calls=calls,
        async_op=rng.random() < 0.5,
        delay=rng.uniform(0, span[phase]),
        how=rng.random(),
    )
