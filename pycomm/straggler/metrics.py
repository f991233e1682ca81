"""Prometheus metrics of the operations of this process's groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pycomm.straggler.show import GroupReport, groups

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def collect() -> Iterator[Metric]:
    """Return all metrics of all groups, named ``pycomm_...``; ``docs/monitor.md`` has the list."""
    reports = groups()
    yield from _operations(reports)
    yield from _links(reports)
    yield from _compared(reports)


def _operations(reports: list[GroupReport]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, SummaryMetricFamily

    labels = ["group", "op"]
    seconds = SummaryMetricFamily(
        "pycomm_operation_seconds",
        "Time in operations; quantiles of the recent ones",
        labels=labels,
    )
    counters = {
        what: CounterMetricFamily(f"pycomm_operation_{what}", text, labels=labels)
        for what, text in (
            ("bytes", "Tensors of operations, as their callers count them"),
            ("waited_seconds", "Time in operations in which there was only to wait for others"),
            ("codec_seconds", "Time in operations that went to encoding and decoding"),
        )
    }
    for report in reports:
        for t in report.operations:
            values = [report.group, t.op]
            seconds.add_metric(values, count_value=t.count, sum_value=t.seconds)
            for q, value in (("0.5", t.median), ("0.99", t.p99)):
                if value is not None:
                    named = dict(zip(labels, values, strict=True)) | {"quantile": q}
                    seconds.add_sample(seconds.name, named, value)
            counters["bytes"].add_metric(values, t.bytes)
            counters["waited_seconds"].add_metric(values, t.waited)
            counters["codec_seconds"].add_metric(values, t.codec)
    yield seconds
    yield from counters.values()


def _links(reports: list[GroupReport]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    labels = ["group", "peer"]
    size = CounterMetricFamily(
        "pycomm_link_bytes", "Bytes that a rank has acknowledged, by TCP", labels=labels
    )
    busy = CounterMetricFamily(
        "pycomm_link_busy_seconds",
        "Time with something to carry that the rank would take",
        labels=labels,
    )
    for report in reports:
        for peer, link in report.links.items():
            size.add_metric([report.group, str(peer)], link.bytes)
            busy.add_metric([report.group, str(peer)], link.seconds)
    yield from (size, busy)


def _compared(reports: list[GroupReport]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    of_rank = ["group", "rank", "host"]
    skew = GaugeMetricFamily(
        "pycomm_arrival_skew_seconds",
        "From the first rank's arrival at an operation to the last's",
        labels=["group", "quantile"],
    )
    last = GaugeMetricFamily(
        "pycomm_rank_last_ratio", "Operations to which a rank comes last", labels=of_rank
    )
    time = GaugeMetricFamily(
        "pycomm_rank_time_ratio", "Where the time of a rank goes", labels=[*of_rank, "to"]
    )
    rate = GaugeMetricFamily(
        "pycomm_rank_link_bytes_per_second", "What the link of a rank carries", labels=of_rank
    )
    off = GaugeMetricFamily(
        "pycomm_rank_is_slow", "1 for a rank that holds the others up", labels=[*of_rank, "cause"]
    )
    for report in reports:
        if report.health is None:
            continue
        for quantile, value in (
            ("0.5", report.health.skew_median),
            ("0.99", report.health.skew_p99),
        ):
            skew.add_metric([report.group, quantile], value)
        for r in report.health.ranks:
            values = [report.group, str(r.rank), r.host]
            last.add_metric(values, r.last)
            for to, share in r.shares._asdict().items():
                time.add_metric([*values, to], share)
            if r.link is not None:
                rate.add_metric(values, r.link)
        found = report.health.finding
        if found is not None:
            off.add_metric([report.group, str(found.rank), found.host, found.cause], 1)
    yield from (skew, last, time, rate, off)
