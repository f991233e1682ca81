"""Self-test: ranks of this machine all-reduce, exactly and coded; results are compared by `==`.

    python -m pycomm.doctor.self_test RANK RANKS FOLDER

is one rank, a process; `run` starts all ranks and derives findings from what they print.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pycomm.doctor import children
from pycomm.doctor.finding import Finding, Topic
from pycomm.env import variables_of_rank

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

TOPIC = Topic("self-test")
CODEC = "quant:bits=8,block=256,rounding=nearest"
BLOCK = 256
LARGE = 1 << 17
"""Values of a tensor that ranks take from each other's memory, if they may read it."""
ADVICE = {
    "shm": "allow memfd_create and mmap in the container (its seccomp profile, its memory limit); "
    "without them ranks of this machine talk by TCP",
    "tcp": "look at what stands above about the interface",
}
"""What to do if ranks do not meet by a transport."""
LIMIT = 30.0
"""Seconds after which the self-test is abandoned."""


@dataclass(frozen=True)
class Result:
    """Result of one rank with one transport."""

    way: str
    connection: str
    exact: bool
    coded: bool


# ------------------------------------------------------------------------------- one rank


def pattern(numel: int) -> array[float]:
    """Return float32 integers, -127 to 127. Each block of int8's has 127, so coding is exact."""
    block = [127.0, *(float(i * 7 % 255 - 127) for i in range(1, BLOCK))]
    return array("f", (block * (-(-numel // BLOCK)))[:numel])


def share(rank: int) -> float:
    """Return the multiple of the pattern that a rank contributes."""
    return float(rank % 4 + 1)


def scaled(values: array[float], factor: float) -> array[float]:
    return array("f", [value * factor for value in values])


def check(
    way: str,
    connection: str,
    rank: int,
    ranks: int,
    reduce: Callable[[array[float]], Any],
    reduce_coded: Callable[[array[float]], Any],
) -> Result:
    """Reduce known values, few and many. All ranks call this together.

    Each rank contributes a small multiple of the pattern. The sum over all ranks is another
    multiple, so int8 represents both without loss.

    Args:
        way: name of the transport.
        connection: the transport's description of itself.
        rank: this rank.
        ranks: number of ranks in the group.
        reduce: sums an array over all ranks, in place.
        reduce_coded: the same through CODEC.
    """
    right = {reduce: True, reduce_coded: True}
    for numel in (1, 1000, 1 << 18):
        base = pattern(numel)
        want = scaled(base, sum(share(r) for r in range(ranks)))
        for call in right:
            mine = scaled(base, share(rank))
            call(mine)
            right[call] = right[call] and mine == want
    return Result(way, connection, right[reduce], right[reduce_coded])


def rank_main(rank: int, ranks: int, folder: str) -> None:
    """Print a JSON line for each transport, and one for reads between processes."""
    from pycomm.communicator import Communicator, Store

    store = Store.file(folder)
    for way in ("shm", "tcp"):
        options: dict[str, Any] = {"group": f"doctor-{way}", "transport": way, "timeout": 15.0}
        try:
            with Communicator(store, rank, ranks, **options) as group:
                if way == "shm":
                    print(json.dumps({"reads": _reads(group)}), flush=True)
                coded = partial(group.all_reduce_coded, codec=CODEC, average=False)
                result = check(way, group.describe(), rank, ranks, group.all_reduce, coded)
            print(json.dumps(asdict(result)), flush=True)
        except RuntimeError as error:
            print(json.dumps({"way": way, "error": str(error).splitlines()[0]}), flush=True)


def _reads(group: Communicator) -> bool:
    """Return whether ranks read each other's memory: then a large tensor is not staged."""
    source, target = (array("f", bytes(4 * LARGE * group.size)) for _ in range(2))
    group.barrier()  # after it ranks know whom they may read
    before = group.sent_bytes()
    # Of any number of ranks: sums and broadcasts of some are staged, since that is faster.
    group.all_to_all(source, target)
    return group.sent_bytes() - before < 4 * LARGE


# ------------------------------------------------------------------------------- all ranks


def outcomes_of_ranks(
    module: str, ranks: int, words: Sequence[str], seconds: float
) -> list[tuple[list[Any], str]]:
    """Run `python -m MODULE RANK WORDS` once per rank on this machine.

    Args:
        module: of the ranks.
        ranks: how many there are.
        words: arguments after the rank.
        seconds: after which those that still run are ended.

    Returns:
        Of each rank the values of the lines of JSON that it has printed, and why it has failed;
        "" if it has not.
    """
    started = []
    for rank in range(ranks):
        # Of ranks that share a GPU NCCL wants to know them as hosts.
        env = variables_of_rank(rank, ranks) | {"NCCL_HOSTID": f"rank{rank}"}
        started.append(children.start("-m", module, str(rank), *words, env=env))
    begin = time.monotonic()
    return [children.outcome(process, seconds, begin) for process in started]


def run(ranks: int) -> list[Finding]:
    """Start ranks on this machine and return findings from what they print."""
    with tempfile.TemporaryDirectory(prefix="pycomm-doctor-") as folder:
        found = outcomes_of_ranks(__name__, ranks, [str(ranks), folder], LIMIT)
    for rank, (said, why) in enumerate(found):
        if why or not said:
            text = f"rank {rank}: {why or 'ended without a word'}"
            return [TOPIC.problem("ranks", text, "fix the problems above, then try again")]
    return list(judge([said for said, _ in found]))


def judge(said: Sequence[Sequence[dict[str, Any]]]) -> Iterator[Finding]:
    """Yield findings from every rank's lines."""
    reads = {line["reads"] for lines in said for line in lines if "reads" in line}
    if reads == {True}:
        text = "ranks may read each other's memory: large tensors are copied once"
        yield TOPIC.ok("reads", text)
    else:
        yield TOPIC.note(
            "reads",
            "ranks may not read each other's memory: large tensors outside of shared memory are "
            "copied twice",
            "sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE",
        )
    for way in ("shm", "tcp"):
        lines = [line for rank in said for line in rank if line.get("way") == way]
        errors = [line["error"] for line in lines if "error" in line]
        if errors or len(lines) < len(said):
            yield TOPIC.problem(way, (errors or ["a rank said nothing"])[0], ADVICE[way])
            continue
        yield from judge_results([Result(**line) for line in lines])


def judge_results(results: Sequence[Result]) -> Iterator[Finding]:
    """Yield findings from every rank's result with one transport."""
    first = results[0]
    wrong = [name for name in ("exact", "coded") if not all(getattr(r, name) for r in results)]
    if wrong:
        yield TOPIC.problem(
            first.way,
            f"{' and '.join(wrong)} sums are WRONG ({first.connection})",
            "do not train on this machine; test its memory, and tell us with this report",
        )
    else:
        yield TOPIC.ok(first.way, f"exact and int8 all-reduces are right ({first.connection})")


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
