"""Tests that the demo reports what its runs measured."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("rich", reason="the demo's display: pip install pycomm[bench]")
pytest.importorskip("matplotlib", reason="the demo's picture: pip install pycomm[bench]")

from pycomm.bench import demo
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.netlab import Paced


class Bar:
    """Takes the place of rich's progress bar."""

    def update(self, bar: object, **what: object) -> None:
        self.last = what


def run(label: str, codec: str | None, step: float, loss: float) -> demo.DemoRun:
    made = demo.DemoRun(label, "gloo", codec)
    lines = [
        {"step": 1, "seconds": step, "loss": 5.0, "held_out": 5.0},
        {"step": 2, "seconds": 2 * step, "loss": loss},
        {"step": 3, "seconds": 3 * step, "loss": loss, "held_out": loss},
        {"step_seconds": step, "wire_bytes": 1.5e6, "held_out": loss},
    ]
    demo.read(made, [json.dumps(line) for line in lines], Bar(), None)
    return made


def three_runs() -> list[demo.DemoRun]:
    return [
        run("Gloo, float32", None, 0.3, 2.0),
        run("pycomm, float32", None, 0.3, 2.0),
        run("pycomm, int4", "int4", 0.1, 2.01),
    ]


def test_log_becomes_a_curve_and_a_result():
    made = run("x", None, 0.25, 2.5)
    assert made.seconds == [0.25, 0.75]
    assert made.held_out == [5.0, 2.5]
    assert (made.step_seconds, made.loss) == (0.25, 2.5)


def test_speed_up_is_against_the_first_row():
    text = demo.rows(three_runs())
    assert text[0] == demo.HEAD
    assert text[3] == ("pycomm, int4", "100 ms", "1.50 MB", "2.0100", "3.00 x")


def test_verdict_tells_equal_exact_runs_from_others():
    done = three_runs()
    assert "3.0 times faster" in demo.verdict(done)[0]
    assert "+0.50 %" in demo.verdict(done)[0]
    assert "equal losses" in demo.verdict(done)[1]
    done[1].held_out[-1] += 1e-7
    assert "should be equal" in demo.verdict(done)[1]


def test_pictures_show_the_table_and_need_no_network(tmp_path):
    done, table = three_runs(), tmp_path / "demo.csv"
    made = demo.records(done, Paced(2, "200mbit"), demo.Config(), Origin.here("demo"))
    tables.append(table, made)
    row = tables.read(table)[2]
    assert (row["run"], row["rate"], row["curve"]) == (
        "pycomm, int4", "200mbit", "0.1000:5.000000 0.3000:2.010000",
    )  # fmt: skip
    assert row["command"] == "demo"
    _, png, page = demo.draw(done, table, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "pycomm, int4" in text
    assert "3.00 x" in text
    assert 'src="http' not in text
