"""Faults at random moments: survivors' errors, their latency, and leftover resources.

A case is drawn from (seed, number) alone, so that it can be repeated:

python -m tests.faults.injection --seed 7 --cases 1000
python -m tests.faults.injection --seed 7 --case 412
"""

from __future__ import annotations

import argparse
import atexit
import json
import statistics
import sys
import time
from collections import defaultdict

from tests.faults.injection.case import ELASTIC, FAULTS, FAULTS_OF_ELASTIC, NETWORK, PHASES, draw
from tests.faults.injection.play import DEATH, DEATHS, breaches, is_late, latest, play
from tests.processes.labs import FaultyNetlab


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.injection", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--case", type=int, help="play this one alone, and show all of it")
    parser.add_argument(
        "--transport", default="shm,tcp,auto", help="auto: two hosts, declared (shm,tcp,auto)"
    )
    parser.add_argument(
        "--faults",
        default=",".join(FAULTS),
        help=f"also {','.join(NETWORK)}, which need namespaces of Linux",
    )
    parser.add_argument(
        "--phases", default=",".join(PHASES), help=f"also {','.join(ELASTIC)}, which need torch"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    numbers = range(args.cases) if args.case is None else [args.case]
    phases = args.phases.split(",")
    faults = args.faults.split(",")
    if set(phases) <= set(ELASTIC):
        faults = [name for name in faults if name in FAULTS_OF_ELASTIC]
    choice = {
        "transports": args.transport.split(","),
        "faults": faults,
        "phases": phases,
    }
    start = time.monotonic()
    took: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    bad = late = deaths = 0
    lab = None
    for number in numbers:
        case = draw(args.seed, number, **choice)
        if case.is_apart and lab is None:
            lab = FaultyNetlab(4, "unlimited")
            atexit.register(lab.close)
        played = play(case, lab if case.is_apart else None)
        wrong, seconds = breaches(played), latest(played)
        key = (case.fault, case.transport, case.phase)
        counts[key] += 1
        if seconds is not None:
            took[key].append(seconds)
        bad += bool(wrong)
        deaths += case.fault in DEATHS
        late += is_late(played)
        if wrong:
            print(f"{case}\n  " + "\n  ".join(wrong), flush=True)
        if args.case is not None:
            print(json.dumps({"what": str(case), "said": played.said}, indent=1))
    print(f"{'fault':<13}{'transport':<10}{'phase':<10}{'cases':>6}{'p50 ms':>9}{'max ms':>9}")
    for key in sorted(counts):
        times = took[key]
        p50, most = (statistics.median(times), max(times)) if times else (0.0, 0.0)
        fault, transport, phase = key
        shown = f"{p50 * 1e3:>9.1f}{most * 1e3:>9.1f}" if times else f"{'-':>9}{'-':>9}"
        print(f"{fault:<13}{transport:<10}{phase:<10}{counts[key]:>6}{shown}")
    print(
        f"{len(numbers)} cases of seed {args.seed} in {time.monotonic() - start:.0f} s: "
        f"{len(numbers) - bad} as promised, {bad} not; "
        f"{deaths} deaths, {late} told later than {DEATH} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
