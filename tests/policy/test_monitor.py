"""Tests of the monitor in each of its output forms."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from urllib.request import urlopen

import pytest

from pycomm import monitor


class Model:
    """Something to watch."""

    def __init__(self, step: int = 7, **known: float) -> None:
        group = monitor.Group("int4", 'because of "x"', parameters=2, values=800, payload_bytes=400)
        missing = dict.fromkeys(("step_seconds", "error", "cosine", "coding", "residual"))
        self.shown = monitor.MonitorReport(
            step=step,
            payload_bytes=400,
            plain_bytes=3200,
            overflows=1,
            checked=len(known),
            check_every=16,
            sampled=2000,
            saturated=12,
            groups=(group,),
            events=("step 5: something has changed",),
            **{**missing, **known},
        )
        monitor.watch(self)

    def report(self) -> monitor.MonitorReport:
        return self.shown


@pytest.fixture
def model():
    return Model(step_seconds=0.25, error=0.1, cosine=0.99, coding=0.05, residual=0.2)


def number_of(model: Model) -> int:
    return next(n for n, report in monitor.snapshot().items() if report is model.shown)


def test_a_snapshot_has_every_model_that_lives(model):
    other = Model()
    assert number_of(other) > number_of(model)
    assert monitor.snapshot()[number_of(model)].ratio == 8.0
    gone = number_of(other)
    del other
    gc.collect()
    assert gone not in monitor.snapshot()


def test_text_is_for_people(model):
    text = monitor.text()
    assert f"model {number_of(model)}: step 7, 0.25 s a step" in text
    assert "(8.0 times less), 1 overflows" in text
    assert "error up to 0.1, cosine at least 0.99" in text
    assert "12 of 2000 values saturated" in text
    assert 'int4 (because of "x"): 2 parameters, 800 values' in text
    assert "step 5: something has changed" in text


def test_numbers_are_a_line_for_a_board(model):
    numbers = model.shown.numbers()
    assert numbers["pycomm/ratio"] == 8.0
    assert numbers["pycomm/error"] == 0.1
    assert all(type(number) is float for number in numbers.values())
    unmeasured = Model().shown.numbers("a/")
    assert "a/error" not in unmeasured  # not measured is not 0
    assert unmeasured["a/step"] == 7.0


def test_a_total_says_what_gradients_took():
    total = monitor.Total()
    assert total.text() == ""
    total.add(250_000, 1_000_000, 0.0)
    total.add(250_000, 1_000_000, 1.5)
    assert total.text() == (
        "2 steps in 1.5 s: gradients of 2.00 MB were coded in 0.50 MB, 1.50 MB less"
    )


def test_the_end_of_a_process_tells_totals_once():
    code = """
from pycomm import monitor
from pycomm.log import tell
for steps in (0, 2, 1):
    total = monitor.Total()
    for _ in range(steps):
        total.add(250_000, 1_000_000, 0.5)
    monitor.tell_at_exit(total, tell)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    line = "2 models, 3 steps in 1.0 s: gradients of 3.00 MB were coded in 0.75 MB, 2.25 MB less"
    assert done.stderr == f"pycomm: {line}\n"


def test_json_holds_it_all(model):
    found = next(m for m in json.loads(monitor.json())["models"] if m["model"] == number_of(model))
    assert found["ratio"] == 8.0
    assert found["groups"][0]["payload_bytes"] == 400
    assert found["error"] == 0.1
    assert (found["sampled"], found["saturated"]) == (2000, 12)


def test_prometheus_reads_it(model):
    pytest.importorskip("prometheus_client")
    unmeasured = Model(step=3)
    server = monitor.serve(0)
    try:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        page = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    finally:
        server.shutdown()
        server.server_close()
    here, there = number_of(model), number_of(unmeasured)
    lines = page.splitlines()
    assert f'pycomm_step{{model="{here}"}} 7.0' in lines
    assert f'pycomm_step{{model="{there}"}} 3.0' in lines
    assert f'pycomm_ratio{{model="{here}"}} 8.0' in lines
    assert f'pycomm_saturated{{model="{here}"}} 12.0' in lines
    assert f'pycomm_error{{model="{here}"}} 0.1' in lines
    assert f'pycomm_error{{model="{there}"' not in page  # not measured is not 0
    label = f'codec="int4",model="{here}",reason="because of \\"x\\""'
    assert f"pycomm_codec_values{{{label}}} 800.0" in lines
