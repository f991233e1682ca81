"""A long run: training through kills, shrinks, restarts, cuts and errors, in flat memory.

It plays cases as `tests.faults.injection` does, in processes that live on, and train. A case is
drawn from (seed, number) alone, so every one can be played again:

python -m tests.soak --minutes 60 --seed 7
python -m tests.soak --seed 7 --case 12
python -m tests.soak --minutes 30 --joins

`director` draws cases and leads the processes through them, `rank` is what a process does, `held`
says whether what the eldest holds is flat.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time

from tests.faults.injection.player import Broken
from tests.soak.director import Director, draw
from tests.soak.held import COUNTS, MEMORY, SETTLED, breaches, growths

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
