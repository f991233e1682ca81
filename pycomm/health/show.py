"""The operations of this process's groups, for people and programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pycomm import _C
from pycomm.health.compare import Health, percent, rate_text, time_text
from pycomm.health.figures import Link, Spent, Totals, links, totals
from pycomm.health.station import found


@dataclass(frozen=True)
class GroupReport:
    """One group of this process."""

    group: str
    """Its name, the same on all its ranks."""
    rank: int
    """Ours, among all processes."""
    ranks: tuple[int, ...]
    operations: tuple[Totals, ...]
    """What this rank has done in it, by kind."""
    links: dict[int, Link]
    """What this rank has sent to others by the network."""
    health: Health | None
    """What the last comparison of all ranks has found; on the first rank, once there was one."""


def groups() -> list[GroupReport]:
    """Return what is known of each group of more than one rank."""
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
    """Return a report in dicts and lists, for JSON."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Spent | Link):
        return value._asdict()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def lines() -> Iterator[str]:
    """Return the same for people, line by line."""
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
    """Return a number of bytes for people."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
