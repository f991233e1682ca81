"""`make bench` replaces what its commands have measured before, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pycomm.bench.__main__ import SUBCOMMANDS
from pycomm.bench.common import tables
from pycomm.bench.common.report import JUDGED
from pycomm.bench.figures import docs, report
from pycomm.bench.figures.report import CLAIMS, commands
from pycomm.bench.ops.operations import OPERATIONS
from pycomm.bench.plot import FIGURES


def write(path: Path, *rows: dict[str, object]) -> Path:
    tables.append(path, list(rows))
    return path


def test_rows_of_the_same_command_are_replaced(tmp_path):
    old = [{"command": "a", "x": 1}, {"command": "cited", "x": 2}, {"command": "a", "x": 3}]
    table = write(tmp_path / "x.csv", *old)
    fresh = write(tmp_path / "new.csv", {"command": "a", "x": 4, "more": 5})
    assert report.merge(table, fresh) == 1
    assert tables.read(table) == [
        {"command": "cited", "x": "2", "more": ""},
        {"command": "a", "x": "4", "more": "5"},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "x.csv"]


def test_commands_write_the_names_that_are_in_their_rows(tmp_path, capsys):
    log = tmp_path / "log"
    words = "all_reduce -b 8 -e 8 -p 1 -n 1"
    assert report.run("x.csv", words, tmp_path, log), log.read_text()
    told = {row["command"] for row in tables.read(tmp_path / "x.csv")}
    assert told == {f"python -m pycomm.bench {words} --csv bench/results/x.csv"}
    assert "rows" in capsys.readouterr().out


def test_failed_command_leaves_its_table_alone(tmp_path, capsys):
    table = write(tmp_path / "x.csv", {"command": "a", "x": 1})
    log = tmp_path / "log"
    assert not report.run("x.csv", "links --no-such-option", tmp_path, log)
    assert tables.read(table) == [{"command": "a", "x": "1"}]
    assert "no rows, status 2" in capsys.readouterr().out
    assert "--no-such-option" in log.read_text()


@pytest.mark.parametrize(("status", "left"), [(1, ["1"]), (JUDGED, ["2"])])
def test_rows_of_a_broken_promise_count_and_those_of_a_failure_do_not(
    tmp_path, monkeypatch, status, left
):
    """A rank that fails has left some rows, and the exit status of any failure."""

    def stopped(command, cwd, **_):
        write(cwd / command[-1], {"command": "a", "x": 2})
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(
        report.subprocess, "run", lambda command, cwd, **_: stopped(command, Path(cwd))
    )
    table = write(tmp_path / "x.csv", {"command": "a", "x": 1})
    assert report.run("x.csv", "plan", tmp_path, tmp_path / "log") == (status == JUDGED)
    assert [row["x"] for row in tables.read(table)] == left


def test_of_repeated_rows_of_codecs_the_newest_count(tmp_path):
    row = {"kind": "codec", "backend": "native", "codec": "int8", "op": "encode", "size": 4}
    rows = [row | {"time": f"2026-01-0{n}", "algbw": n, "ratio": 4, "err": 0.5} for n in (1, 2)]
    assert "| 2.0 |" in docs.codecs(write(tmp_path / "codecs.csv", *rows))


def test_every_claim_has_a_table_and_a_command():
    known = {*OPERATIONS, *SUBCOMMANDS}
    for _, words in commands():
        assert words.split()[0] in {".demo", *known}
    for claim in CLAIMS:
        assert (tables.RESULTS / claim["table"]).exists()
        _, ours, words = claim["command"].partition("python -m pycomm.bench ")
        assert not ours or words.split()[0] in known
    made = {claim["table"] for claim in CLAIMS}
    assert {path.name for path in tables.RESULTS.glob("*.csv")} == made | {"mutants.csv"}
    assert {figure.table for figure in FIGURES} <= made


def test_only_tables_that_are_asked_for_are_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "run", lambda table, *_: table != "links-cpu.csv")
    log = ["--measure", "--log", str(tmp_path / "log"), "--only"]
    assert report.main([*log, "demo"]) == 0
    assert report.main([*log, "links,"]) == 1
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert names == ["demo-cpu.csv:", *["links-cpu.csv:"] * 2]
    with pytest.raises(SystemExit):
        report.main([*log, "nothing"])
