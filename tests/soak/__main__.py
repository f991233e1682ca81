"""A long run: training through kills, shrinks, restarts, cuts and errors, in flat memory.

It plays cases as `tests.faults.injection` does, in processes that live on, and train. A case is
drawn from (seed, number) alone, so every one can be played again:

python -m tests.soak --minutes 60 --seed 7
python -m tests.soak --seed 7 --case 12
python -m tests.soak --minutes 30 --joins

`rank` is what a process does, `held` says whether what the eldest holds is flat.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.injection import play as faults
from tests.faults.injection.case import Call, Case
from tests.faults.injection.player import Broken, Player
from tests.soak.held import (
    COUNTS,
    MEMORY,
    SETTLED,
    Sample,
    breaches,
    growths,
    use_one_arena,
)
from tests.soak.rank import Trainer

RANKS = 3
ELDER = 0
"""The process that lives from the first case to the last."""
CODECS = ("none", "int8", "int4", "topk:0.05")
FAULTS = ("kill", "kill", "abort", "socket", "slow")
DEADLINE = 150.0
"""Seconds in which every rank has answered, on a machine that others use."""
LEARNED = 0.8
"""The last loss of two cases is below this share of the first. It falls to 0.4 as a rule."""


def draw(seed: int, number: int, *, joins: bool = False) -> Case:
    """Return case `number` of a seed; with `joins` a member quits or is killed, and one joins."""
    rng = random.Random(f"{'joins ' * joins}{seed}/{number}")
    fault = rng.choice(("kill", "quit") if joins else FAULTS)
    return Case(
        seed=rng.randrange(1 << 30),
        number=number,
        transport="tcp" if fault == "socket" else rng.choice(("shm", "tcp")),
        ranks=RANKS,
        victim=rng.randrange(fault in ("kill", "quit"), RANKS),  # the eldest stays
        fault=fault,
        phase="train",
        calls=tuple(Call("train", rng.randint(30, 50), rng.choice(CODECS)) for _ in range(2)),
        async_op=False,
        delay=rng.uniform(0.02, 0.3),
        how=rng.random(),
    )


class Director:
    """The processes, and what has come of the run so far."""

    def __init__(self, folder: str, joins: bool = False) -> None:
        self._folder, self._joins = folder, joins
        self._player = Player(
            lambda process, say: Trainer(process, folder, say), Path(folder), DEADLINE
        )
        self._tell = self._player.tell
        self.stop = self._player.stop
        self._forms = 0
        self._saved: tuple[str, int] | None = None
        """the folder of a checkpoint, and how many ranks have saved it"""
        self._first = self._last = 0.0
        self.started = self.steps = 0
        self.losses: list[float] = []
        self.samples: list[Sample] = []
        self.seen: dict[str, int] = {}
        """cases by fault"""

    def play(self, case: Case) -> None:
        """Play a case from its start to its end, where no group is left.

        Raises:
            Broken: a promise was not kept.
        """
        self._start_missing()
        self._tell("begin", case)
        (self._elastic if self._joins else self._restarted)(case)
        self._tell("leave")
        self.seen[case.fault] = self.seen.get(case.fault, 0) + 1
        self.samples.append(Sample(len(self.samples) + 1, self._tell("rest")[ELDER]))

    def _restarted(self, case: Case) -> None:
        """All make a group, lose one or all of it, and go on; every second case from a checkpoint
        of those that are left."""
        self._tell("meet")
        self._tell("regroup")
        if self._saved is None:
            self._make()
        else:
            self._tell("load", *self._saved)
        self._train(case.calls[0])
        left = self._fault(case)
        self._tell("regain")
        self._train(case.calls[1])
        if self._saved is None:
            folder = tempfile.mkdtemp(dir=self._folder)
            self._tell("save", folder)
            self._saved = folder, len(left)
        else:
            self._saved = None
            self._check_learned()

    def _elastic(self, case: Case) -> None:
        """All form an elastic group, which a member leaves, and a new one joins."""
        handles = self._tell("found")
        self._form(handles)
        self._make()
        self._train(case.calls[0])
        if case.fault == "quit":
            self._tell("leave", to=[case.victim])
            left = [process for process in handles if process != case.victim]
        else:
            left = self._fault(case)
        rest = {process: handles[process] for process in left}
        self._form(rest)
        # A member that leaves needs nothing else.
        self._train(case.calls[1], left, wraps=case.fault == "kill")
        self._start_missing()
        self._tell("begin", case, to=[case.victim])
        self._form(rest | self._tell("found", to=[case.victim]))
        if len(set(self._tell("hand_over").values())) != 1:
            raise Broken("a hand-over has left members with different states")
        self._train(case.calls[1], joins=True)
        self._check_learned()

    def _start_missing(self) -> None:
        for process in set(range(RANKS)).difference(self._player.numbers):
            self._player.start(process)
            self.started += 1

    def _make(self) -> None:
        self._first = 0.0
        self._tell("make")

    def _form(self, handles: dict[int, str]) -> None:
        self._forms += 1
        self._tell("form", self._forms, [handles[one] for one in sorted(handles)], to=handles)

    def _train(
        self, call: Call, to: Any = None, *, wraps: bool = True, joins: bool = False
    ) -> None:
        """Train; all have the same parameters, to the bit."""
        if wraps:
            self._tell("wrap", call.codec, joins, to=to)
        losses, digests = zip(*self._tell("train", call.numel, to=to).values(), strict=True)
        if len(set(digests)) != 1:
            raise Broken(f"parameters differ between processes: {digests}")
        self.steps += call.numel * len(losses)
        self._last = sum(losses) / len(losses)
        self._first = self._first or self._last

    def _fault(self, case: Case) -> list[int]:
        """Let the fault happen while all train; return the processes that are left."""
        player = self._player
        left = [process for process in player.numbers if process not in case.leavers]
        if case.fault == "kill":
            player.schedule(case.delay, partial(player.kill, case.victim, signal.SIGKILL))
        self._tell("operate", dies=case.leavers)
        for process in case.leavers:
            player.bury(process)
        if wrong := faults.breaches(faults.Played(case, player.said)):
            raise Broken("\n".join(wrong))
        return left

    def _check_learned(self) -> None:
        if not self._last < LEARNED * self._first:  # NaN too
            raise Broken(f"the loss was {self._first:.3f} at first and {self._last:.3f} at last")
        self.losses.append(self._last / self._first)


# ------------------------------------------------------------------ the command


TELLS = 300.0
"""Seconds after which a line says that it goes on."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=60, help="when no new case begins (60)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--case", type=int, help="play this one alone")
    parser.add_argument(
        "--joins",
        action="store_true",
        help="an elastic group: a member leaves or is killed, and another one joins",
    )
    return parser.parse_args(argv)


def show(director: Director, minutes: float) -> None:
    """Print what has happened, and what the eldest process held after each case."""
    seen = ", ".join(f"{count} {what}" for what, count in sorted(director.seen.items()))
    print(f"{minutes:.1f} minutes, {len(director.samples)} cases: {seen}")
    print(f"{director.steps} steps of {director.started} processes", end="")
    if director.losses:
        middle, most = statistics.median(director.losses), max(director.losses)
        print(f"; the loss fell to {middle:.2f} of the first (median), {most:.2f} at most", end="")
    print()
    if not director.samples:
        return
    print(
        f"the process that was never restarted:\n{'':<12}{'first':>10}{'a quarter':>11}{'last':>10}"
        f"{'most':>10}{'per 100 cases':>17}"
    )
    growth = growths(director.samples)
    for name in (*MEMORY, *COUNTS):
        values = [s.held[name] for s in director.samples]
        slope = f"{growth[name]:>17.1f}" if name in growth else ""
        quarter = values[int(SETTLED * len(values))]
        print(f"{name:<12}{values[0]:>10}{quarter:>11}{values[-1]:>10}{max(values):>10}{slope}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    use_one_arena()
    start = told = time.monotonic()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pycomm-soak-") as folder:
        director = Director(folder, args.joins)
        number = args.case or 0
        try:
            while True:
                case = draw(args.seed, number, joins=args.joins)
                director.play(case)
                number += 1
                if time.monotonic() > told + TELLS:
                    told = time.monotonic()
                    print(f"{(told - start) / 60:.0f} minutes: {number} cases", flush=True)
                if args.case is not None or time.monotonic() - start > 60 * args.minutes:
                    break
        except Broken as broken:
            where = f"{'--joins ' * args.joins}--seed {args.seed} --case {number}"
            wrong.append(f"broken in {where}, {case}:\n{broken}")
        except KeyboardInterrupt:
            wrong.append(f"stopped in --seed {args.seed} --case {number}")
        finally:
            director.stop()
    show(director, (time.monotonic() - start) / 60)
    wrong += breaches(director.samples)
    print("\n".join(wrong) or "as promised")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
