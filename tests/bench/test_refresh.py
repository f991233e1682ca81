"""`make bench` replaces what its commands have measured before, and nothing else."""

from __future__ import annotations

from pathlib import Path

from pycomm.bench import refresh
from pycomm.bench.common import tables


def write(path: Path, *rows: dict[str, object]) -> Path:
    tables.append(path, list(rows))
    return path


def test_rows_of_the_same_command_are_replaced(tmp_path):
    old = [{"command": "a", "x": 1}, {"command": "cited", "x": 2}, {"command": "a", "x": 3}]
    table = write(tmp_path / "x.csv", *old)
    fresh = write(tmp_path / "new.csv", {"command": "a", "x": 4, "more": 5})
    assert refresh.merge(table, fresh) == 1
    assert tables.read(table) == [
        {"command": "cited", "x": "2", "more": ""},
        {"command": "a", "x": "4", "more": "5"},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.csv", "x.csv"]


def test_commands_write_the_names_that_are_in_their_rows(tmp_path, capsys):
    log = tmp_path / "log"
    assert refresh.run("predictions.csv", ".predictions", tmp_path, log), log.read_text()
    commands = {row["command"] for row in tables.read(tmp_path / "predictions.csv")}
    assert commands == {"python -m pycomm.bench.predictions --csv bench/results/predictions.csv"}
    assert "rows" in capsys.readouterr().out


def test_failed_command_leaves_its_table_alone(tmp_path, capsys):
    table = write(tmp_path / "x.csv", {"command": "a", "x": 1})
    log = tmp_path / "log"
    assert not refresh.run("x.csv", ".links --no-such-option", tmp_path, log)
    assert tables.read(table) == [{"command": "a", "x": "1"}]
    assert "no rows, status 2" in capsys.readouterr().out
    assert "--no-such-option" in log.read_text()


def test_only_tables_that_are_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refresh.main(["--list", "--only", "links,demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["links-cpu.csv:", "demo-cpu.csv:"]


def test_every_command_is_one_that_there_is():
    for _, words in refresh.commands():
        module = words.split()[0]
        if module.startswith("."):
            path = Path(refresh.__file__).parent.joinpath(*module[1:].split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
