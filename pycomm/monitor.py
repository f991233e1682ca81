"""Metrics of this process while it trains, as text and numbers.

They cover each model whose gradients are compressed (size and error of the compression) and each
group (its operations, and the rank that holds the others up); see ``docs/monitor.md``.

Example:
    >>> from pycomm import monitor
    >>> print(monitor.text())  # doctest: +SKIP
    model 0: step 4200, 0.212 s a step, 13.4 MB of 100.0 MB (7.5 times less), 0 overflows
      checks of 42 parameters, every 16 steps: error up to 0.09, cosine at least 0.996
      int4 (default): 40 parameters, 25000000 values
    >>> wandb.log(monitor.snapshot()[0].numbers())  # doctest: +SKIP
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

from pycomm import _C
from pycomm.straggler import Health, completed, found, percent, quantile
from pycomm.trace import SPENT
from pycomm.units import format_bytes, format_time


@dataclass(frozen=True)
class Group:
    """Parameters that share a codec and the reason for it."""

    codec: str
    reason: str
    parameters: int
    values: int
    payload_bytes: int


@dataclass(frozen=True, kw_only=True)
class MonitorReport:
    """Metrics of one model. None: not measured yet, or not at all."""

    step: int
    step_seconds: float | None
    """Median of the last steps, from one reduction to the next."""
    payload_bytes: int
    """Payload of all gradients of one step, encoded once."""
    plain_bytes: int
    """The same gradients as they are: for float32 4 bytes a value, bfloat16 2, float64 8."""
    overflows: int
    """Steps whose result was not finite."""
    checked: int
    """Parameters with at least one sample; the next four fields are of their last samples."""
    error: float | None
    """The largest |result - exact| / |exact|, L2, of averaged gradients."""
    cosine: float | None
    """The smallest cosine between result and exact."""
    coding: float | None
    """The largest |result - due| / |due|, where due includes the residuals."""
    residual: float | None
    """The largest |residuals| / |exact|."""
    check_every: int | None
    """Steps from one check to the next."""
    groups: tuple[Group, ...]
    events: tuple[str, ...]
    """Changes, each with its reason."""

    @property
    def ratio(self) -> float:
        """Plain bytes for each byte of payload."""
        return self.plain_bytes / self.payload_bytes if self.payload_bytes else 1.0

    def numbers(self, prefix: str = "pycomm/") -> dict[str, float]:
        """Return what was measured so far, by name, as `wandb.log` and TensorBoard take it.

        Args:
            prefix: what the names begin with; another one for each model, if there are several.

        Example:
            >>> wandb.log(pycomm.monitor.snapshot()[0].numbers(), step=step)  # doctest: +SKIP
            >>> for name, number in report.numbers().items():  # doctest: +SKIP
            ...     writer.add_scalar(name, number, step)
        """
        found = {name: getattr(self, name) for name in _NUMBERS}
        return {prefix + name: float(value) for name, value in found.items() if value is not None}


_NUMBERS = (
    *("step", "step_seconds", "payload_bytes", "ratio", "overflows"),
    *("error", "cosine", "coding", "residual"),
)


class Watched(Protocol):
    """An object that can be watched: a `pycomm.policy.Plan`."""

    def report(self) -> MonitorReport:
        """Return the present metrics. May be called from any thread."""


_lock = threading.Lock()
_watched: WeakValueDictionary[int, Watched] = WeakValueDictionary()
_numbers = itertools.count()


def watch(watched: Watched) -> None:
    """Include an object in all reports from now on, for as long as it lives."""
    with _lock:
        _watched[next(_numbers)] = watched


def snapshot() -> dict[int, MonitorReport]:
    """Return the report of each model whose gradients this process compresses, by number.

    Numbers count from 0 in the order in which the models were given to `pycomm.compress`. A model
    keeps its number when its policy is set anew.
    """
    with _lock:
        living = sorted(_watched.items())
    return {number: watched.report() for number, watched in living}


def text() -> str:
    """Return all metrics as text."""
    lines = []
    for number, r in snapshot().items():
        seconds = "" if r.step_seconds is None else f" {r.step_seconds:.3g} s a step,"
        lines.append(
            f"model {number}: step {r.step},{seconds} {r.payload_bytes / 1e6:.1f} MB of "
            f"{r.plain_bytes / 1e6:.1f} MB ({r.ratio:.1f} times less), {r.overflows} overflows"
        )
        if r.checked:
            lines.append(
                f"  checks of {r.checked} parameters, every {r.check_every} steps: error up to "
                f"{r.error:.3g}, cosine at least {r.cosine:.4g}, of the codec alone up to "
                f"{r.coding:.3g}, residuals up to {r.residual:.3g} of a gradient"
            )
        for g in r.groups:
            lines.append(f"  {g.codec} ({g.reason}): {g.parameters} parameters, {g.values} values")
        lines += [f"  {event}" for event in r.events]
    lines += _groups()
    return "\n".join(lines) or "this process compresses no model's gradients and has no group"


def _groups() -> Iterator[str]:
    """Return a report for each group of more than one rank, as lines of text."""
    compared = found()
    for trace in _C.traces():
        ranks = tuple(trace["global_ranks"])
        if len(ranks) < 2:
            continue
        yield f"group {trace['group']}: rank {ranks[trace['rank']]} of {len(ranks)}"
        kinds: dict[str, list[Mapping[str, Any]]] = {}
        for record in completed(trace):
            kinds.setdefault(record["op"], []).append(record)
        for op, records in kinds.items():
            times = [record["ended_ns"] - record["started_ns"] for record in records]
            middle, most = (format_time(quantile(times, q) / 1e9) for q in (0.5, 0.99))
            spent = (sum(record[part] for record in records) for part in SPENT)
            waited, codec = (percent(part / (sum(times) or 1)) for part in spent)
            yield (
                f"  {op}: {len(records)} operations, "
                f"{format_bytes(sum(record['bytes'] for record in records))}, {middle} at the "
                f"median, {most} at p99; of that {waited} waiting for others, {codec} in codecs"
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
