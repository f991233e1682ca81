"""The doctor under torchrun: examines every host, tries the group of all ranks, and compares them.

The first rank of each host examines everything; the others report what can differ between ranks of
a host. They exchange reports through their group; without one each host tells of itself.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta

from pycomm.doctor import probe, self_test, variables
from pycomm.doctor.finding import STATUS, Finding, Topic, worst
from pycomm.env import env, given

TOPIC = Topic("between ranks")
SECONDS = 180.0
"""Time limit for the group and its operations, for which a host may have to compile _c10d."""

# Findings where ranks differ: the level, and the advice.
DIFFERENCES = {
    "pycomm": ("problem", "install the same version everywhere"),
    "torch": ("problem", "install the same version everywhere"),
    "machine": ("warning", "keep to one architecture; it is not tested otherwise"),
    "MTU": ("warning", "set the same on all hosts and switches between: larger packets get lost"),
    "Python": ("note", "nothing, as long as scripts run on both"),
    "SIMD level": ("note", "nothing: results are equal; the slowest sets the pace"),
}
DIFFERENT_VARIABLE = ("problem", "set it alike on all hosts; torchrun does not hand variables on")

Look = Callable[[], tuple[list[Finding], dict[str, str]]]


@dataclass(frozen=True)
class RankReport:
    """Report of one rank."""

    host: str
    facts: dict[str, str]
    findings: list[Finding] = field(default_factory=list)


def examine(look: Look, rank: int, ranks: int, self_test_wanted: bool) -> tuple[list[Finding], int]:
    """Examine this rank; all ranks call it.

    Args:
        look: function that examines this host.
        rank: this rank.
        ranks: number of ranks of the job.
        self_test_wanted: whether the group is to sum known values.

    Returns:
        On rank 0 the findings of all ranks, or on the first rank of each host its own if there is
        no group; and the exit status.
    """
    report = _report(look)
    try:
        reports, results = _compare(report, rank, ranks, self_test_wanted)
    except Exception as error:  # whatever keeps the group from working
        text = f"rank {rank}: {(str(error) or repr(error)).splitlines()[0]}"
        advice = (
            "mend the problems above, on all hosts; start all ranks with torchrun; and look at "
            "interfaces and firewalls between the hosts: all TCP ports must be open"
        )
        bad = self_test.TOPIC.problem("group", text, advice)
        return [*report.findings, bad] if not env().local_rank else [], STATUS["problem"]
    findings = [*merged(reports), *differences(reports)]
    if results:
        findings += self_test.judge_results(results)
    return findings if rank == 0 else [], STATUS[worst(findings)]


def _report(look: Look) -> RankReport:
    host = socket.gethostname()
    if not env().local_rank:
        findings, facts = look()
        return RankReport(host, facts, findings)
    shared = variables.shared(given())
    return RankReport(host, probe.platform_facts() | shared)


def _compare(
    mine: RankReport, rank: int, ranks: int, self_test_wanted: bool
) -> tuple[list[RankReport], list[self_test.Result]]:
    """Return the reports of all ranks and, if wanted, their sums through the backend, as training
    makes them."""
    import torch
    import torch.distributed as dist

    from pycomm import backend
    from pycomm._build import load_c10d
    from pycomm.policy.exchange import gather_json

    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("pycomm", rank=rank, world_size=ranks, timeout=limit)
    group, world = backend.find(), dist.group.WORLD
    if group is None or world is None:
        raise RuntimeError('init_process_group("pycomm") made another backend')

    def tensor(values: array[float]) -> torch.Tensor:
        return torch.frombuffer(values, dtype=torch.float32)

    def coded(values: array[float]) -> None:
        layout = load_c10d().Layout(owner_residuals=False)
        layout.add(len(values), self_test.CODEC, 0)
        group.compressed_all_reduce(tensor(values), layout, [(0, 0)], 0, 0, False).wait()

    try:
        reports = [
            RankReport(host, facts, [Finding(**one) for one in findings])
            for host, facts, findings in gather_json(
                (mine.host, mine.facts, [asdict(f) for f in mine.findings]), world
            )
        ]
        if not self_test_wanted:
            return reports, []
        result = self_test.check(
            "group", group.describe(), rank, ranks, lambda x: dist.all_reduce(tensor(x)), coded
        )
        return reports, [self_test.Result(**one) for one in gather_json(asdict(result), world)]
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------- judging


def merged(reports: Sequence[RankReport]) -> list[Finding]:
    """Return the findings of all hosts: an ok once, from rank 0; others with their ranks."""
    having: dict[Finding, list[int]] = {}
    for rank, report in enumerate(reports):
        for finding in report.findings:
            having.setdefault(finding, []).append(rank)
    tellers = sum(bool(report.findings) for report in reports)
    found = []
    for finding, ranks in having.items():
        if finding.level != "ok":
            where = "" if len(ranks) == tellers else _places(ranks, reports)
            found.append(replace(finding, where=where))
        elif finding in reports[0].findings:
            found.append(finding)
    return found


def differences(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield findings on facts that differ between ranks but should be equal."""
    names = dict.fromkeys(name for report in reports for name in report.facts)
    same = True
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, report in enumerate(reports):
            if name in report.facts or name.startswith("PYCOMM_"):
                by_value.setdefault(report.facts.get(name, "not set"), []).append(rank)
        if len(by_value) > 1:
            same = False
            level, advice = DIFFERENCES.get(name, DIFFERENT_VARIABLE)
            text = "; ".join(
                f"{value or 'empty'} on {_places(ranks, reports)}"
                for value, ranks in by_value.items()
            )
            yield TOPIC.finding(level, name, text, advice)
    if same:
        hosts = len({report.host for report in reports})
        text = f"{len(reports)} ranks on {hosts} host{'s' * (hosts > 1)} have the same of all this"
        yield TOPIC.ok("differences", text)


def _places(ranks: Sequence[int], reports: Sequence[RankReport]) -> str:
    hosts = dict.fromkeys(reports[rank].host for rank in ranks)
    return f"{named(ranks)} ({', '.join(hosts)})"


def named(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
