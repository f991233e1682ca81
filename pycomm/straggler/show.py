"""Reports on the operations of this process's groups, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pycomm import _C
from pycomm.straggler.compare import Health, percent, rate_text, time_text
from pycomm.straggler.monitor import found
from pycomm.straggler.stats import LinkStats, TimeShares, Totals, links, totals


@dataclass(frozen=True)
class GroupReport:
    """Statistics of one group of this process."""

    group: str
    """The group's name, the same on all its ranks."""
    rank: int
    """This process's rank among all processes."""
    ranks: tuple[int, ...]
    operations: tuple[Totals, ...]
    """Completed operations of this rank, by kind."""
    links: dict[int, LinkStats]
    """Data that this rank has sent to others over the network."""
    health: Health | None
    """The last comparison of all ranks; on rank 0, None before the first one."""


def groups() -> list[GroupReport]:
    """Return a report for each group of more than one rank."""
    compared = found()
    reports = []
    for trace in _C.traces():
        ranks = tuple(trace["global_ranks"])
        if len(ranks) < 2:
            continue
        reports.append(
            GroupReport(
                group=trace["group"],
                rank=ranks[trace["rank"]],
                ranks=ranks,
                operations=tuple(totals(trace)),
                links=links(trace),
                health=compared.get((trace["group"], ranks)),
            )
        )
    return reports


def plain(value: Any) -> Any:
    """Return a report as dicts and lists, for JSON."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, TimeShares | LinkStats):
        return value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def lines() -> Iterator[str]:
    """Return the reports as lines of text."""
    for report in groups():
        yield f"group {report.group}: rank {report.rank} of {len(report.ranks)}"
        for t in report.operations:
            recent = ""
            if t.median is not None and t.p99 is not None:
                recent = f", {time_text(t.median)} at the median, {time_text(t.p99)} at p99"
            waited, codec = (percent(part / (t.seconds or 1.0)) for part in (t.waited, t.codec))
            yield (
                f"  {t.op}: {t.count} operations, {size_text(t.bytes)}{recent}; of that {waited} "
                f"waiting for others, {codec} in codecs"
            )
        if report.health is not None:
            yield from _health_lines(report.health)


def _health_lines(health: Health) -> Iterator[str]:
    yield (
        f"  all ranks, {health.operations} operations of {time_text(health.seconds)}: they arrive "
        f"within {time_text(health.skew_median)} at the median, {time_text(health.skew_p99)} at p99"
    )
    wide = max(4, *(len(r.host) for r in health.ranks))
    yield f"    rank  {'host':{wide}}  compute   codec  moving  waiting  elsewhere   last  link"
    for r in health.ranks:
        s = r.shares
        link = "-" if r.link is None else rate_text(r.link)
        yield (
            f"    {r.rank:4}  {r.host:{wide}}  {percent(s.compute):>7}  {percent(s.codec):>6}  "
            f"{percent(s.moving):>6}  {percent(s.waited):>7}  {percent(s.elsewhere):>9}  "
            f"{percent(r.last):>5}  {link}"
        )
    yield f"  {health.finding.text}" if health.finding else "  nothing is off"


def size_text(count: int) -> str:
    """Return a number of bytes as text."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
