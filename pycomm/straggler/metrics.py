"""Prometheus metrics of the operations of this process's groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pycomm.straggler.show import groups

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Kind, name, what it is, and its labels after the group's; `docs/monitor.md` has the list.
_METRICS = (
    ("Summary", "operation_seconds", "Time in operations; quantiles of the recent ones", "op"),
    ("Counter", "operation_bytes", "Tensors of operations, as their callers count them", "op"),
    (
        "Counter",
        "operation_waited_seconds",
        "Time in operations in which there was only to wait for others",
        "op",
    ),
    (
        "Counter",
        "operation_codec_seconds",
        "Time in operations that went to encoding and decoding",
        "op",
    ),
    ("Counter", "link_bytes", "Bytes that a rank has acknowledged, by TCP", "peer"),
    (
        "Counter",
        "link_busy_seconds",
        "Time with something to carry that the rank would take",
        "peer",
    ),
    (
        "Gauge",
        "arrival_skew_seconds",
        "From the first rank's arrival at an operation to the last's",
        "quantile",
    ),
    ("Gauge", "rank_last_ratio", "Operations to which a rank comes last", "rank host"),
    ("Gauge", "rank_time_ratio", "Where the time of a rank goes", "rank host to"),
    ("Gauge", "rank_link_bytes_per_second", "What the link of a rank carries", "rank host"),
    ("Gauge", "rank_is_slow", "1 for a rank that holds the others up", "rank host cause"),
)


def collect() -> Iterator[Metric]:
    """Return all metrics of all groups, named ``pycomm_...``."""
    from prometheus_client import core

    found: dict[str, Any] = {
        name: getattr(core, f"{kind}MetricFamily")(
            f"pycomm_{name}", about, labels=["group", *labels.split()]
        )
        for kind, name, about, labels in _METRICS
    }
    for report in groups():

        def add(name: str, value: float | None, *labels: object, group: str = report.group) -> None:
            if value is not None:
                found[name].add_metric([group, *map(str, labels)], value)

        for t in report.operations:
            seconds = found["operation_seconds"]
            seconds.add_metric([report.group, t.op], count_value=t.count, sum_value=t.seconds)
            for q, value in (("0.5", t.median), ("0.99", t.p99)):
                if value is not None:
                    labels = {"group": report.group, "op": t.op, "quantile": q}
                    seconds.add_sample(seconds.name, labels, value)
            add("operation_bytes", t.bytes, t.op)
            add("operation_waited_seconds", t.waited, t.op)
            add("operation_codec_seconds", t.codec, t.op)
        for peer, link in report.links.items():
            add("link_bytes", link.bytes, peer)
            add("link_busy_seconds", link.seconds, peer)
        if report.health is None:
            continue
        add("arrival_skew_seconds", report.health.skew_median, "0.5")
        add("arrival_skew_seconds", report.health.skew_p99, "0.99")
        for r in report.health.ranks:
            add("rank_last_ratio", r.last, r.rank, r.host)
            for to, share in r.shares._asdict().items():
                add("rank_time_ratio", share, r.rank, r.host, to)
            add("rank_link_bytes_per_second", r.link, r.rank, r.host)
        if slow := report.health.finding:
            add("rank_is_slow", 1, slow.rank, slow.host, slow.cause)
    yield from found.values()
