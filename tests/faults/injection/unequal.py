"""Unequal arguments: one rank's call differs from the other ranks' in one of the possible ways.

Each case is a group of threads with the buffers of every call between guards of their own. Whatever
the odd rank does, every rank must get an error that names a rank, no rank may wait longer than the
deadline, and no byte outside of a buffer may change.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.errors import Error
from tests.collectives.ways import WAYS, calls
from tests.ranks import attempt

TIMEOUT = 4.0
"""Timeout in seconds of a wait for a call that a peer never makes."""
GUARD = 4096
"""Bytes before and after each buffer."""
REDUCING = ("all_reduce", "reduce_scatter", "reduce", "reduce_scatter_list")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
LISTED = ("all_gather_list", "reduce_scatter_list", "all_to_all_counts")
CODED = ("all_reduce_coded", "reduce_scatter_coded")
MOVING = ("all_gather", "all_to_all", "send_recv", "barrier")
OPS = tuple(dict.fromkeys((*REDUCING, *ROOTED, *LISTED, *CODED, *MOVING)))
DTYPES = ("float32", "int32", "float64", "int8", "float16", "uint8", "int64")
REDOPS = ("sum", "max", "min", "avg", "prod")
CODECS = ("quant", "quant:bits=4", "quant:bits=8,block=64", "cast:to=bfloat16", "topk:density=0.1")


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call."""

    op: str
    numel: int
    dtype: str = "float32"
    redop: str = "sum"
    root: int = 0
    codec: str = "quant"
    seed: int = 0
    skew: int = 0
    """of lists: elements by which the part of rank r is larger than that of rank r - 1"""


@dataclass(frozen=True)
class Case:
    """A call of all ranks but one, and the odd rank's calls instead: some or none."""

    number: int
    way: str
    ranks: int
    odd: int
    what: str
    ours: tuple[Arguments, ...]
    theirs: tuple[Arguments, ...]

    def __str__(self) -> str:
        return (
            f"case {self.number}, {self.way}: rank {self.odd} of {self.ranks} has another "
            f"{self.what}: {self.theirs} where the others have {self.ours}"
        )


def ways_to_differ(op: str) -> list[str]:
    """Return the arguments that can differ in a call of `op`."""
    what = ["op", "left out", "twice", "order"]
    if op != "barrier":
        what += ["numel"] * 3
    if op not in (*CODED, "barrier", "send_recv"):  # messages are untyped bytes
        what.append("dtype")
    if op in REDUCING:
        what.append("redop")
    if op in ROOTED:
        what += ["root"] * 2
    if op in LISTED:
        what += ["skew"] * 2
    if op in CODED:
        what += ["codec", "codec", "seed"]
    return what


def _other(rng: random.Random, choices: Any, than: Any) -> Any:
    return rng.choice([choice for choice in choices if choice != than])


def _vary(rng: random.Random, what: str, mine: Arguments, ranks: int) -> tuple[Arguments, ...]:
    """Return the odd rank's calls."""
    if what == "left out":
        return ()
    if what == "twice":
        return (mine, mine)
    if what == "op":
        return (replace(mine, op=_other(rng, OPS, mine.op), root=0),)
    if what == "numel":
        near = (mine.numel + 1, max(0, mine.numel - 1), 2 * mine.numel, mine.numel // 2)
        return (replace(mine, numel=_other(rng, (*near, 0, 1, 250_000), mine.numel)),)
    choices: dict[str, Any] = {
        "dtype": DTYPES,
        "redop": REDOPS,
        "root": range(ranks),
        "codec": CODECS,
        "seed": range(5),
        "skew": range(5),
    }
    return (replace(mine, **{what: _other(rng, choices[what], getattr(mine, what))}),)


def draw(seed: int, number: int, way: str | None = None) -> Case:
    """Return case `number` of a seed."""
    rng = random.Random(f"unequal {seed}/{number}")
    op, ranks = rng.choice(OPS), rng.choice((2, 3, 4))
    mine = Arguments(
        op,
        int(10 ** rng.uniform(0.5, 5.3)),
        "float32" if op in CODED else rng.choice(DTYPES),
        rng.choice(REDOPS),
        rng.randrange(ranks),
        rng.choice(CODECS),
        skew=rng.randrange(5),
    )
    what = rng.choice(ways_to_differ(op))
    if what == "order":
        second = Arguments("all_gather" if op != "all_gather" else "all_reduce", 100)
        ours: tuple[Arguments, ...] = (mine, second)
        theirs: tuple[Arguments, ...] = (second, mine)
    else:
        ours, theirs = (mine,), _vary(rng, what, mine, ranks)
    chosen = way or rng.choice(list(WAYS))
    return Case(number, chosen, ranks, rng.randrange(ranks), what, ours, theirs)


class Arena:
    """Memory whose buffers lie between guards."""

    def __init__(self) -> None:
        self._whole: list[tuple[Any, int]] = []

    def buffer(self, numel: int, dtype: str) -> Any:
        size = numel * np.dtype(dtype).itemsize
        whole = np.full(size + 2 * GUARD, 0xA5, np.uint8)
        self._whole.append((whole, size))
        inside = whole[GUARD : GUARD + size].view(dtype)
        inside[:] = 1
        return inside

    def intact(self) -> bool:
        return all(
            (whole[:GUARD] == 0xA5).all() and (whole[GUARD + size :] == 0xA5).all()
            for whole, size in self._whole
        )


def perform(c: Communicator, a: Arguments, arena: Arena) -> None:
    """Make a call, which is valid if all ranks make it."""
    n, ranks = a.numel, c.size
    sizes = [n + r * a.skew for r in range(ranks)]
    dtype = "float32" if a.op in CODED else a.dtype

    def new(numel: int = n) -> Any:
        return arena.buffer(numel, dtype)

    def parts(numels: list[int]) -> list[Any]:
        return [new(numel) for numel in numels]

    def exchange() -> None:
        sent = c.send(new(), (c.rank + 1) % ranks)
        c.recv(new(), (c.rank - 1) % ranks).wait()
        sent.wait()

    def with_counts() -> None:
        sends = [n + (c.rank + r) * a.skew for r in range(ranks)]
        whole = sum(sends)
        c.all_to_all(new(whole), new(whole), send_counts=sends, recv_counts=sends)

    coded = {"seed": a.seed, "step": 1}
    redop = "sum" if a.redop == "avg" and np.dtype(a.dtype).kind in "iu" else a.redop
    every: dict[str, Callable[[], Any]] = {
        **calls(c, n, a.root, dtype, redop, arena.buffer),
        "reduce_scatter_list": lambda: c.reduce_scatter(parts(sizes), new(sizes[c.rank]), redop),
        "all_gather_list": lambda: c.all_gather(new(sizes[c.rank]), parts(sizes)),
        "all_to_all_counts": with_counts,
        "all_reduce_coded": lambda: c.all_reduce_coded(new(), _C.Codec(a.codec), **coded),
        "reduce_scatter_coded": lambda: c.reduce_scatter_coded(
            new(n * ranks), new(), _C.Codec(a.codec), **coded
        ),
        "send_recv": exchange,
    }
    every[a.op]()


def play(case: Case) -> list[str]:
    """Run a case; return its breaches. Without a difference no rank may get an error."""
    arenas = [Arena() for _ in range(case.ranks)]

    def job(c: Communicator) -> None:
        c.all_reduce(np.ones(10, np.float32))
        for a in case.theirs if c.rank == case.odd else case.ours:
            perform(c, a, arenas[c.rank])
        for _ in range(2):  # a rank that only sends gets the error later
            c.barrier()
            c.all_reduce(np.ones(3))

    options = {**WAYS[case.way], "timeout": TIMEOUT}
    outcomes = attempt(case.ranks, job, limit=60.0, **options)
    wrong = []
    for rank, (outcome, arena) in enumerate(zip(outcomes, arenas, strict=True)):
        equal = case.ours == case.theirs
        told = isinstance(outcome, Error) and "rank" in str(outcome)
        if outcome is not None if equal else not told:
            wrong.append(f"rank {rank} got {outcome!r}")
        if not arena.intact():
            wrong.append(f"on rank {rank} bytes outside of the buffers were written")
    return wrong
