"""Tests that the demo reports what its runs measured."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib", reason="the demo's picture: pip install pycomm[bench]")

from pycomm.bench import demo
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.demo import DemoRun
from pycomm.bench.figures import charts
from pycomm.bench.figures.drawing import save
from pycomm.bench.netlab import Lab
from pycomm.bench.training.results import demo_table

TURNS = 8


def three_runs(gains: tuple[float, ...] = (3.0,) * TURNS) -> list[DemoRun]:
    done = [
        DemoRun("Gloo, float32", "gloo"),
        DemoRun("pycomm, float32", "pycomm"),
        DemoRun("pycomm, int4", "pycomm", "int4"),
    ]
    for turn, (run, loss) in enumerate(zip(done, (2.0, 2.0, 2.01), strict=True)):
        step = 0.1 if run.codec else 0.3
        lines, seconds = [{"step": 1, "seconds": step, "loss": 5.0, "held_out": 5.0}], step
        for i, gain in enumerate((3.0, *gains)):
            seconds += 10 * (0.3 / gain if run.codec else 0.3 * (1 + i % 2 / 100))
            lines.append({"step": 10 * (i + 1), "seconds": seconds, "loss": loss, "held_out": loss})
        end = {"step_seconds": step, "wire_bytes": 1.5e6, "held_out": loss}
        for row in (*lines, end):
            demo.hear(done, 10 * TURNS, {"turn": turn, **row})
    return done


def recorded(done: list[DemoRun]) -> list[dict[str, object]]:
    return demo.records(done, Lab(2, "200mbit"), demo.Config(), Origin.here("demo"))


def test_speed_up_is_against_the_first_row():
    text = demo_table(recorded(three_runs()))
    assert text[1][-1] == "1.00 x"
    assert text[3] == ("pycomm, int4", "100 ms", "1.50 MB", "2.0100", "3.00 x")


@pytest.mark.parametrize(
    ("gains", "why"),
    [
        ((0.5, 3.0) * 4, "turns differ by more than it: half of them were 0.5"),
        ((3.0,) * 2, "too short"),
    ],
)
def test_a_speed_up_that_means_nothing_is_held_back(gains, why):
    done = three_runs(gains)
    assert demo.means_nothing(done[2], done)
    assert demo_table(recorded(done), {"pycomm, int4"})[3][-1] == "held back"
    said = demo.verdict(done)
    assert any("int4 is held back" in line and why in line for line in said)
    assert not any("times faster" in line for line in said)


def test_verdict_tells_equal_exact_runs_from_others():
    done = three_runs()
    text = " ".join(demo.verdict(done))
    assert "3.0 times faster" in text
    assert "+0.50 %" in text
    assert "pycomm, float32 is held back: turns differ" in text
    assert "equal losses" in text
    done[1].held_out[-1] += 1e-7
    assert "should be equal" in demo.verdict(done)[-1]


def test_the_picture_shows_the_table(tmp_path):
    done, table, png = three_runs(), tmp_path / "demo.csv", tmp_path / "loss.png"
    tables.append(table, recorded(done))
    rows = tables.read(table)
    assert (rows[2]["run"], rows[2]["rate"]) == ("pycomm, int4", "200mbit")
    assert rows[2]["curve"].startswith("0.1000:5.000000 1.1000:2.010000 ")
    assert rows[2]["command"] == "demo"
    chart = charts.loss(rows)
    named = [text.get_text().partition(": ")[0] for text in chart.legends[0].get_texts()]
    assert named == [run.label for run in done]
    save(chart, png)
    assert png.read_bytes().startswith(b"\x89PNG")
