"""The shared parts of the benchmarks: sizes, statistics, and the one schema of results."""

from __future__ import annotations

import csv
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pycomm.bench import demo
from pycomm.bench.__main__ import main
from pycomm.bench.common import harness, tables
from pycomm.bench.common.harness import COLUMNS, Origin, Row
from pycomm.bench.common.report import Column, Report
from pycomm.bench.common.timing import in_turns
from pycomm.straggler import quantile

RESULTS = Path(harness.__file__).parents[1] / "results"
ROW = Row("time", "all_reduce", "pycomm", ranks=2, size=8, count=2, type="float32", time_p50=2.0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("64K", 65536), ("64k", 65536), ("1.5M", 1572864), ("2G", 2**31), ("4MB", 2**22)],
)
def test_sizes_are_powers_of_1024(text, size):
    assert harness.parse_size(text) == size
    assert harness.parse_size(harness.format_size(size)) == size


def test_sizes_grow_by_the_factor():
    assert list(harness.sizes(8, 1024, 4)) == [8, 32, 128, 512]
    assert list(harness.sizes(1, 4, 1.1)) == [1, 2, 3, 4]
    assert list(harness.sizes(0, 8, 2)) == [0]


def test_peers_take_turns_and_only_timed_calls_count():
    said: list[str] = []
    clock = iter(range(100))
    found = in_turns(
        {name: lambda name=name: said.append(name) for name in "ab"},
        2,
        clock=lambda: next(clock),
        before=lambda name: said.append(f"<{name}"),
        after=lambda name: said.append(f"{name}>"),
    )
    assert " ".join(said) == "<a a a a> <b b b b> <a a a a> <b b b b>"
    assert found == {"a": [1, 1], "b": [1, 1]}


def test_csv_is_appended_to_under_one_header(tmp_path):
    path, origin = tmp_path / "results" / "x.csv", Origin.here("command")
    tables.append(path, [harness.record(ROW, origin)])
    tables.append(path, [harness.record(replace(ROW, size=16), origin)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["size"] for row in rows] == ["8", "16"]
    assert list(rows[0]) == COLUMNS
    assert rows[0]["command"] == "command"
    assert rows[0]["device"] == origin.device != ""


def test_csv_of_another_schema_is_left_alone(tmp_path, capsys):
    """Which is told in one line, before anything is measured."""
    path = tmp_path / "old.csv"
    path.write_text("a,b\n1,2\n")
    for words in (["codecs"], ["links"], ["plan"], ["training", "--only", "optimizer"]):
        assert main([*words, "--csv", str(path)]) == 2
        told = f"python -m pycomm.bench: {path} has other columns (a, b): use another file\n"
        assert capsys.readouterr() == ("", told)
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(tables.OtherTable, match="other columns"):
        demo.main(["--csv", str(path)])
    assert main(["codecs", "--csv", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(f"{tmp_path} is a folder: name a file\n")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(tables.OtherTable, match="holds no table"):
        tables.append(path, [harness.record(ROW, Origin.here(""))])


def test_a_device_and_a_link_stay_what_they_are(tmp_path):
    null, link, file = (tmp_path / name for name in ("null", "link", "file"))
    null.symlink_to("/dev/null")
    link.symlink_to(file)
    file.write_text("op,size\nall_reduce,8\n")
    for path in (null, link):
        tables.append(path, [harness.record(ROW, Origin.here("command"))])
    assert null.is_char_device()
    assert link.is_symlink()
    assert len(tables.read(file)) == 2


def test_a_commit_is_that_of_pycomm_and_of_no_other_checkout(tmp_path, monkeypatch):
    folder, there = tmp_path / "venv", tmp_path / "bench" / "common" / "harness.py"
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "c"]):
        subprocess.run([*git, *words], check=True)
    for made in (folder, there.parent):
        made.mkdir(parents=True)
    monkeypatch.setattr(harness, "__file__", str(folder / "harness.py"))
    commit = harness._commit.__wrapped__
    assert commit() == ""
    there.touch()
    assert commit() != ""


def test_csv_of_an_earlier_version_gets_the_new_columns(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text('op,size,curve\nall_reduce,8,"1:2 3:4"\n')
    tables.append(path, [harness.record(ROW, Origin.here("command"))])
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == COLUMNS
    assert (first["op"], first["size"], first["curve"]) == ("all_reduce", "8", "1:2 3:4")
    assert (first["command"], second["command"]) == ("", "command")
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.csv"]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_committed_results_say_where_they_come_from(path):
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("time", "command", "commit", "device", "pycomm", "python"):
        assert all(row[name] for row in rows), name


def test_table_lines_up_and_marks_what_has_no_meaning(capsys):
    times = Column("time_p50", 8, ".2f", "p50(us)")
    report = Report((Column("size", 6), times, Column("err", 8, ".1e")))
    report.header("a comment")
    report.add(ROW)
    comment, header, line = capsys.readouterr().out.splitlines()
    assert comment == "# a comment"
    assert header == "  size  p50(us)      err"
    assert line == "     8     2.00        -"


def test_the_command_of_a_row_names_variables_but_no_secret_and_no_checkout(monkeypatch):
    monkeypatch.setenv("PYCOMM_SECRET", "told to nobody")
    monkeypatch.setenv("PYCOMM_SOCKETS", "3")
    command = "python -m pycomm.bench links --csv {}bench/results/x --out={}bench/results/y"
    told = Origin.here(command.format("/a/b/", "/c/")).command
    assert told == f"PYCOMM_SOCKETS=3 {command.format('', '')}"


@pytest.mark.parametrize("text", ["", "K", "-8", "1.3", "8T", "8 K"])
def test_nonsense_is_no_size(text):
    with pytest.raises(ValueError, match="cannot read the size"):
        harness.parse_size(text)


def test_quantiles_are_samples():
    samples = [4.0, 1.0, 3.0, 2.0]
    assert [quantile(samples, q) for q in (0.0, 0.5, 0.99)] == [1.0, 2.0, 4.0]
