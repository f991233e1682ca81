"""Figures are what their tables say, and every picture of docs can be made again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="pictures: pip install pycomm[bench]")

from pycomm.bench import plot
from pycomm.bench.common import tables
from pycomm.bench.figures.drawing import chart, line, panel, save
from pycomm.bench.plot import Figure

ROOT = Path(__file__).parents[2]


def test_committed_figures_are_up_to_date():
    wrong = plot.faults(ROOT)
    assert not wrong, f"{wrong}: python -m pycomm.bench.plot --docs"


@chart
def lines(rows: list[tables.Row]):
    figure, axes = panel("A", "b")
    line(axes, "c", [(float(row["x"]), float(row["y"])) for row in rows])
    return figure


FIGURE = Figure("line", "line.csv", lines, ("name", "x"))


def row(x: int, y: int, **more: object) -> dict[str, object]:
    origin = {"time": f"2026-01-0{y}", "command": "a", "commit": "b", "load": y}
    return {"name": "c", "ranks": 2, "x": x, "y": y, **origin, "device": "d", "cores": 2, **more}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree whose one figure is drawn."""
    for folder in ("docs/img", "bench/results"):
        (tmp_path / folder).mkdir(parents=True)
    tables.append(tmp_path / "bench/results/line.csv", [row(1, 2), row(2, 3)])
    save(FIGURE.of(tmp_path / "bench/results"), tmp_path / "docs/img/line.png")
    assert plot.faults(tmp_path, [FIGURE]) == []
    return tmp_path


def test_newer_table_is_noticed(checkout):
    tables.append(checkout / "bench/results/line.csv", [row(3, 4)])
    assert plot.faults(checkout, [FIGURE]) == [
        "line.png shows something else than line.csv: draw it again"
    ]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"command": "c"}, "line: command is a and c in the rows"),
        ({"device": "GPU"}, "line: device is GPU and d in the rows"),
    ],
)
def test_rows_that_differ_in_more_than_is_shown_are_noticed(
    checkout, more, says, monkeypatch, capsys
):
    tables.append(checkout / "bench/results/line.csv", [row(3, 4, **more)])
    assert plot.faults(checkout, [FIGURE]) == [says]
    with pytest.raises(ValueError, match=says):
        FIGURE.of(checkout / "bench/results")
    monkeypatch.setattr(plot, "ROOT", checkout)
    monkeypatch.setattr(plot.faults, "__defaults__", ([FIGURE],))
    assert plot.main(["--check"]) == 1
    assert capsys.readouterr().out == f"{says}\n"
    with pytest.raises(SystemExit):
        plot.main(["--check", "--results", str(checkout)])  # it is of the checkout's own


def test_the_newest_of_equal_rows_is_shown(checkout):
    results = checkout / "bench/results"
    tables.append(results / "line.csv", [row(1, 9), row(1, 5, ranks=8)])
    figure = replace(FIGURE, where={"ranks": ["2"]})
    assert [one["y"] for one in figure.rows(results)] == ["9", "3"]


def test_a_table_without_rows_is_told(checkout):
    with pytest.raises(ValueError, match=r"line\.csv has no rows"):
        replace(FIGURE, where={"ranks": ["9"]}).of(checkout / "bench/results")


def test_figures_that_nothing_makes_or_nobody_drew_are_noticed(checkout):
    shutil.copy(checkout / "docs/img/line.png", checkout / "docs/img/other.png")
    (checkout / "docs/img/line.png").unlink()
    assert plot.faults(checkout, [FIGURE]) == [
        "line.png has not been drawn",
        "other.png lies in docs/img, and nothing makes it",
    ]


def test_equal_charts_make_equal_files(tmp_path, checkout):
    files = [tmp_path / f"{name}.png" for name in "ab"]
    for file in files:
        save(FIGURE.of(checkout / "bench/results"), file)
    assert files[0].read_bytes() == files[1].read_bytes()
