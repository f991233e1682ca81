"""Reports on the operations of this process's groups, as text."""

from __future__ import annotations

from collections.abc import Iterator

from pycomm import _C
from pycomm.straggler.compare import Health, percent
from pycomm.straggler.monitor import found
from pycomm.straggler.stats import totals
from pycomm.units import format_bytes, format_time


def lines() -> Iterator[str]:
    """Return a report for each group of more than one rank, as lines of text."""
    compared = found()
    for trace in _C.traces():
        ranks = tuple(trace["global_ranks"])
        if len(ranks) < 2:
            continue
        yield f"group {trace['group']}: rank {ranks[trace['rank']]} of {len(ranks)}"
        for t in totals(trace):
            recent = ""
            if t.median is not None and t.p99 is not None:
                recent = f", {format_time(t.median)} at the median, {format_time(t.p99)} at p99"
            waited, codec = (percent(part / (t.seconds or 1.0)) for part in (t.waited, t.codec))
            yield (
                f"  {t.op}: {t.count} operations, {format_bytes(t.bytes)}{recent}; of that "
                f"{waited} waiting for others, {codec} in codecs"
            )
        if health := compared.get((trace["group"], ranks)):
            yield from _health_lines(health)


def _health_lines(health: Health) -> Iterator[str]:
    yield (
        f"  all ranks, {health.operations} operations of {format_time(health.seconds)}: they "
        f"arrive within {format_time(health.skew_median)} at the median, "
        f"{format_time(health.skew_p99)} at p99"
    )
    wide = max(4, *(len(r.host) for r in health.ranks))
    yield f"    rank  {'host':{wide}}  compute   codec  moving  waiting  elsewhere   last  link"
    for r in health.ranks:
        s = r.shares
        link = "-" if r.link is None else f"{format_bytes(r.link)}/s"
        yield (
            f"    {r.rank:4}  {r.host:{wide}}  {percent(s.compute):>7}  {percent(s.codec):>6}  "
            f"{percent(s.moving):>6}  {percent(s.waited):>7}  {percent(s.elsewhere):>9}  "
            f"{percent(r.last):>5}  {link}"
        )
    yield f"  {health.finding.text}" if health.finding else "  nothing is off"
