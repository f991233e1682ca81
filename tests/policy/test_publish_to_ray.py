"""The monitor's metrics as Ray's; Ray is a stand-in, and `make world` runs the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client.core import GaugeMetricFamily

from pycomm import monitor


@pytest.fixture
def shown(monkeypatch):
    """Return what Ray would show, by name and labels."""
    values: dict[tuple[str, str], float] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.tag_keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.tag_keys)
            values[self.name, ",".join(tags.values())] = value

    metrics = ModuleType("ray.util.metrics")
    metrics.Gauge = Gauge
    for name, module in (("ray", ModuleType("ray")), ("ray.util", ModuleType("ray.util"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    monkeypatch.setattr(monitor, "_ray_gauges", {})
    monkeypatch.setattr(monitor, "_in_ray", set())
    return values


def collected(monkeypatch, *ranks: str) -> None:
    slow = GaugeMetricFamily("pycomm_rank_is_slow", "It is slow", labels=["rank"])
    for rank in ranks:
        slow.add_metric([rank], 1.0)
    made = SimpleNamespace(collect=lambda: [slow])
    monkeypatch.setattr(monitor, "Collector", lambda: made)


def test_a_series_that_is_absent_now_becomes_zero(monkeypatch, shown):
    collected(monkeypatch, "1", "2")
    assert monitor.publish_to_ray() == 2
    assert shown == {("pycomm_rank_is_slow", "1"): 1, ("pycomm_rank_is_slow", "2"): 1}
    collected(monkeypatch, "2")
    assert monitor.publish_to_ray() == 1
    assert shown == {("pycomm_rank_is_slow", "1"): 0, ("pycomm_rank_is_slow", "2"): 1}
