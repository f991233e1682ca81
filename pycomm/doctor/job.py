"""The doctor under torchrun: examines every host, compares the ranks, and tries their group.

The ranks exchange reports through torch's store. The first rank of each host examines everything;
the others report what can differ between ranks of a host.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

from pycomm.doctor import probe, self_test, variables
from pycomm.doctor.finding import STATUS, Finding, Topic, worst
from pycomm.env import SECRETS, env, given, proofs_of_secrets

TOPIC = Topic("between ranks")
SECONDS = 90.0
"""Time limit for a rank's report."""
GROUP_SECONDS = 180.0
"""Time limit for a rank's trial of the group, for which it may have to compile _c10d."""
KEY = "pycomm-doctor"

# Findings where ranks differ: the level, and the advice.
DIFFERENCES = {
    "pycomm": ("problem", "install the same version everywhere"),
    "torch": ("problem", "install the same version everywhere"),
    "machine": ("warning", "keep to one architecture; it is not tested otherwise"),
    "MTU": ("warning", "set the same on all hosts and switches between: larger packets get lost"),
    "Python": ("note", "nothing, as long as scripts run on both"),
    "SIMD level": ("note", "nothing: results are equal; the slowest sets the pace"),
    "kernel": ("note", "nothing, as long as no host is slower"),
    "congestion control": ("note", "sysctl net.ipv4.tcp_congestion_control, alike on all hosts"),
    "cores": ("note", "give all ranks as many: the slowest sets the pace"),
}
DIFFERENT_VARIABLE = ("problem", "set it alike on all hosts; torchrun does not hand variables on")

Look = Callable[[], tuple[list[Finding], dict[str, str]]]


@dataclass(frozen=True)
class RankReport:
    """Report of one rank."""

    host: str
    facts: dict[str, str]
    findings: list[Finding] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankReport:
        made = json.loads(text)
        return cls(made["host"], made["facts"], [Finding(**f) for f in made["findings"]])


def examine(look: Look, rank: int, ranks: int, self_test_wanted: bool) -> tuple[list[Finding], int]:
    """Examine this rank; all ranks call it.

    Args:
        look: function that examines this host.
        rank: this rank.
        ranks: number of ranks of the job.
        self_test_wanted: whether to try the group.

    Returns:
        On rank 0 the findings of all ranks; and the exit status, the same everywhere.
    """
    try:
        from torch.distributed.rendezvous import rendezvous
    except ImportError:
        findings, _ = look()
        text = "ranks cannot be compared without torch: each tells of itself"
        findings.append(TOPIC.problem("ranks", text, "install torch on every host"))
        return findings, STATUS[worst(findings)]
    limit = timedelta(seconds=SECONDS)
    try:
        store = next(rendezvous("env://", rank, ranks, timeout=limit))[0]
    except (RuntimeError, ValueError) as error:
        findings, _ = look()
        advice = "start all ranks with torchrun; is MASTER_ADDR the first host, its port open?"
        text = f"rank {rank} does not reach the job's store: {str(error).splitlines()[0]}"
        findings.append(TOPIC.problem("store", text, advice))
        return findings, STATUS[worst(findings)]
    # The first rank that comes decides the salt.
    salt = store.compare_set(f"{KEY}/salt", "", secrets.token_hex(16))
    report = _report(look)
    report.facts.update(proofs_of_secrets(bytes.fromhex(salt.decode())))
    store.set(f"{KEY}/{rank}", report.to_json())
    if rank > 0:
        if _wait(store, "go", SECONDS + 30) == b"yes":
            _try_group(store, rank, ranks)
        status = int(_wait(store, "status", SECONDS + 2 * GROUP_SECONDS) or b"1")
        store.set(f"{KEY}/left/{rank}", "1")
        return [], status
    reports, absent = _collect(store, range(ranks), "", SECONDS)
    findings = merged({r: RankReport.from_json(text) for r, text in reports.items()})
    findings += differences({r: RankReport.from_json(text) for r, text in reports.items()})
    findings += [_absent(absent, SECONDS)] if absent else []
    if self_test_wanted and worst(findings) != "problem":
        store.set(f"{KEY}/go", "yes")
        findings += _try_group(store, rank, ranks)
    else:
        store.set(f"{KEY}/go", "no")
        if self_test_wanted:
            text = "is left out: no group can work before the problems above are mended"
            findings.append(self_test.TOPIC.note("group", text))
    status = STATUS[worst(findings)]
    store.set(f"{KEY}/status", str(status))
    _collect(store, range(1, ranks), "left/", 5.0)  # this process may serve the store
    return findings, status


def _report(look: Look) -> RankReport:
    host = socket.gethostname()
    if env().local_rank:
        import torch

        return RankReport(
            host, probe.platform_facts() | {"torch": torch.__version__} | variables.shared(given())
        )
    findings, facts = look()
    return RankReport(host, facts, findings)


# ------------------------------------------------------------------------------- the store


def _wait(store: Any, key: str, seconds: float) -> bytes | None:
    """Return the value that another rank has published, or None after a timeout."""
    try:
        store.wait([f"{KEY}/{key}"], timedelta(seconds=max(0.01, seconds)))
    except RuntimeError:
        return None
    found: bytes = store.get(f"{KEY}/{key}")
    return found


def _collect(
    store: Any, ranks: Iterable[int], prefix: str, seconds: float
) -> tuple[dict[int, bytes], list[int]]:
    """Return the values that ranks have published, and the ranks that have not in time."""
    deadline = time.monotonic() + seconds
    said = {rank: _wait(store, f"{prefix}{rank}", deadline - time.monotonic()) for rank in ranks}
    return {r: text for r, text in said.items() if text is not None}, [
        rank for rank, text in said.items() if text is None
    ]


def _absent(ranks: Sequence[int], seconds: float) -> Finding:
    text = f"{named(ranks)} did not report within {seconds:.0f} s"
    advice = "is it started, on a machine that is up, and does it run this version of pycomm?"
    return TOPIC.problem("ranks", text, advice)


# ------------------------------------------------------------------------------- the group


def _try_group(store: Any, rank: int, ranks: int) -> list[Finding]:
    """Sum over all ranks through the backend, as training does; return findings on rank 0."""
    try:
        said = json.dumps(asdict(_group_result(store, rank, ranks)))
    except Exception as error:  # any failure must reach rank 0
        said = json.dumps({"error": f"rank {rank}: {str(error).splitlines()[0]}"})
    store.set(f"{KEY}/result/{rank}", said)
    if rank > 0:
        return []
    texts, absent = _collect(store, range(ranks), "result/", GROUP_SECONDS)
    if absent:
        return [_absent(absent, GROUP_SECONDS)]
    lines = [json.loads(text) for text in texts.values()]
    errors = [line["error"] for line in lines if "error" in line]
    if errors:
        advice = "look at interfaces and firewalls between the hosts: all TCP ports must be open"
        return [self_test.TOPIC.problem("group", errors[0], advice)]
    return list(self_test.judge_results([self_test.Result(**line) for line in lines]))


def _group_result(store: Any, rank: int, ranks: int) -> self_test.Result:
    import torch
    import torch.distributed as dist

    from pycomm import backend
    from pycomm._build import load_c10d

    dist.init_process_group(
        "pycomm",
        store=dist.PrefixStore(f"{KEY}/group", store),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    group = backend.find()
    if group is None:
        raise RuntimeError('init_process_group("pycomm") made another backend')

    def tensor(values: array[float]) -> torch.Tensor:
        return torch.frombuffer(values, dtype=torch.float32)

    def coded(values: array[float]) -> None:
        layout = load_c10d().Layout(owner_residuals=False)
        layout.add(0, len(values), self_test.CODEC, 0)
        group.compressed_all_reduce(tensor(values), layout, [(0, 0)], 0, 0, False).wait()

    try:
        return self_test.check(
            "group", group.describe(), rank, ranks, lambda x: dist.all_reduce(tensor(x)), coded
        )
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------- judging


def merged(reports: dict[int, RankReport]) -> list[Finding]:
    """Return the findings of all hosts: an ok once, from rank 0; others with their ranks."""
    first = reports[min(reports)].findings
    having: dict[Finding, list[int]] = {}
    for rank, report in reports.items():
        for finding in report.findings:
            having.setdefault(finding, []).append(rank)
    tellers = [rank for rank, report in reports.items() if report.findings]
    kept = [f for f in having if f in first or f.level in ("warning", "problem")]
    return [
        f if len(having[f]) == len(tellers) or STATUS[f.level] == 0 else replace(f, where=places)
        for f in kept
        for places in [_places(having[f], reports)]
    ]


def differences(reports: dict[int, RankReport]) -> Iterator[Finding]:
    """Yield findings on facts that differ between ranks but should be equal."""
    names = dict.fromkeys(name for report in reports.values() for name in report.facts)
    same = True
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, report in reports.items():
            is_variable = name.startswith("PYCOMM_")
            if name in report.facts or is_variable:
                by_value.setdefault(report.facts.get(name, "not set"), []).append(rank)
        if len(by_value) > 1:
            same = False
            level, advice = DIFFERENCES.get(name, DIFFERENT_VARIABLE)
            secret = name in SECRETS
            text = "; ".join(
                f"{'one' if secret else value or 'empty'} on {_places(ranks, reports)}"
                for value, ranks in by_value.items()
            )
            yield TOPIC.finding(level, name, text, advice)
    if same:
        hosts = len({report.host for report in reports.values()})
        text = f"{len(reports)} ranks on {hosts} host{'s' * (hosts > 1)} have the same of all this"
        yield TOPIC.ok("differences", text)


def _places(ranks: Sequence[int], reports: dict[int, RankReport]) -> str:
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
