"""`make conformance`: PyTorch's suite against pycomm and Gloo, and the page docs/conformance.md.

    python -m tests.conformance --world-size 2,3,4              all, both backends; writes the page
    python -m tests.conformance --backend pycomm -k barrier     a few; writes nothing

Ends 1 if Gloo passes a test that pycomm does not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.conformance.judged import NOT_JUDGED, Row, read, worse, write
from tests.conformance.page import write_page
from tests.conformance.runner import Runner
from tests.conformance.suite import Config


def judge(config: Config, log: Path, wanted: list[str], only: set[str] | None) -> list[Row]:
    """Run the suite in one configuration, and print every test that does not pass."""
    rows = []
    with Runner(config, log) as runner:
        for test in runner.names:
            if (wanted and not any(w in test for w in wanted)) or (only and test not in only):
                continue
            if test in NOT_JUDGED:
                status, seconds, reason = "n/a", 0.0, NOT_JUDGED[test]
            else:
                outcome = runner.run(test)
                status, seconds, reason = outcome.status, outcome.seconds, outcome.reason
                if status in ("fail", "timeout"):
                    print(f"  {status} {test}: {reason}", flush=True)
            reason = " ".join(reason.split())
            rows.append(
                Row(config.like, config.world_size, config.backend, test, status, seconds, reason)
            )
    counts = {s: sum(row.status == s for row in rows) for s in ("pass", "fail", "timeout", "skip")}
    seconds = sum(row.seconds for row in rows)
    print(f"{config}: {counts}, {seconds:.0f} s", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--world-size", default="2,3,4")
    parser.add_argument("--backend", default="pycomm,gloo")
    parser.add_argument("--like", default="gloo,nccl", help="known backends whose place they take")
    parser.add_argument("-k", action="append", default=[], help="part of a test's name; repeatable")
    parser.add_argument("--log", type=Path, help="what the ranks print; kept if given")
    parser.add_argument(
        "--results", type=Path, help="file to write, as results.csv.xz; default: the committed one"
    )
    given = parser.parse_args(arguments)
    log = given.log or Path(tempfile.mkstemp(suffix=".log")[1])
    print(f"what the ranks print: {log}")

    rows: list[Row] = []
    for world_size in map(int, given.world_size.split(",")):
        # Reserved for NCCL: what torch skips in Gloo's place and has for NCCL's.
        reserved = set()
        for like in given.like.split(","):
            for backend in given.backend.split(","):
                config = Config(backend, world_size, like)
                only = reserved if like == "nccl" and reserved else None
                rows += judge(config, log, given.k, only)
            if like == "gloo":
                reserved = {row.test for row in rows if row.status == "skip"}
    everything = parser.parse_args([])
    if given.results:
        write(rows, given.results)
    elif all(vars(given)[k] == vars(everything)[k] for k in ("world_size", "backend", "like", "k")):
        write(rows)
        write_page(read())
    bugs = worse(rows)
    for row in bugs:
        print(f"Gloo passes and pycomm does not: {row}")
    return 1 if bugs else 0


if __name__ == "__main__":
    sys.exit(main())
