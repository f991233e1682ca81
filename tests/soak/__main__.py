"""A long run: training through kills, shrinks, restarts, cuts and errors, in flat memory.

A cycle is drawn from (seed, number) alone, so every one can be played again:

python -m tests.soak --minutes 60 --seed 7
python -m tests.soak --seed 7 --cycle 12
python -m tests.soak --minutes 30 --joins

`schedule` draws cycles, `rank` is what a process does, `director` leads the processes through the
cycles, `held` looks at what they hold, and says whether that is flat.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time

from tests.soak.director import Broken, Director
from tests.soak.held import COUNTS, MEMORY, SETTLED, breaches, growths
from tests.soak.schedule import ELDER

TELLS = 300.0
"""Seconds after which a line says that it goes on."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=60, help="when no new cycle begins (60)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--cycle", type=int, help="play this one alone")
    parser.add_argument(
        "--joins",
        action="store_true",
        help="cycles of an elastic group: a member leaves or is killed, and another one joins",
    )
    parser.add_argument("--every", type=float, default=10, help="seconds between samples (10)")
    return parser.parse_args(argv)


def show(director: Director, minutes: float) -> None:
    """Print what has happened, and what the eldest process held at the same point of cycles."""
    seen = ", ".join(f"{count} {what}" for what, count in sorted(director.seen.items()))
    print(f"{minutes:.1f} minutes, {len(director.losses)} cycles, {director.events} events: {seen}")
    print(f"{director.steps} steps; {director.restarts} processes started for lost ones", end="")
    if director.losses:
        middle, most = statistics.median(director.losses), max(director.losses)
        print(f"; the loss fell to {middle:.2f} of the first (median), {most:.2f} at most", end="")
    print()
    samples = [s for s in director.samples if s.process == ELDER]
    rest = [s for s in samples if s.at_rest]
    if not rest:
        return
    print(
        f"the process that was never restarted:\n{'':<12}{'first':>10}{'a quarter':>11}{'last':>10}"
        f"{'most':>10}{'per 100 events':>17}"
    )
    growth = growths(rest)
    for name in (*MEMORY, *COUNTS):
        values = [s.held[name] for s in rest]
        most = max(s.held[name] for s in samples if name in s.held)
        slope = f"{growth[name]:>17.1f}" if name in growth else ""
        quarter = values[int(SETTLED * len(values))]
        print(f"{name:<12}{values[0]:>10}{quarter:>11}{values[-1]:>10}{most:>10}{slope}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    start = told = time.monotonic()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="pycomm-soak-") as folder:
        director = Director(folder, args.every, args.joins)
        number = args.cycle or 0
        try:
            while True:
                director.play(args.seed, number)
                number += 1
                if time.monotonic() > told + TELLS:
                    told = time.monotonic()
                    print(f"{(told - start) / 60:.0f} minutes: {number} cycles", flush=True)
                if args.cycle is not None or time.monotonic() - start > 60 * args.minutes:
                    break
        except Broken as broken:
            where = f"{'--joins ' * args.joins}--seed {args.seed} --cycle {number}"
            wrong.append(f"broken in {where}, {director.doing}:\n{broken}")
        except KeyboardInterrupt:
            wrong.append(f"stopped in --seed {args.seed} --cycle {number}")
        finally:
            director.stop()
    show(director, (time.monotonic() - start) / 60)
    wrong += breaches([s for s in director.samples if s.process == ELDER and s.at_rest])
    print("\n".join(wrong) or "as promised")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
