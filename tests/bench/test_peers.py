"""The peers' table: times to the loss, and what broke."""

from __future__ import annotations

import pytest

from pycomm.bench import peers as table
from pycomm.bench.common import tables
from pycomm.bench.lab.base import Lab, LabUnavailable
from pycomm.bench.lab.jobs import Failed
from pycomm.bench.lab.rates import UNLIMITED
from pycomm.bench.peers import PEERS
from pycomm.bench.training.train import Config

REFERENCE, OURS = table.REFERENCE, "pycomm, int4"
BY_NAME = {peer.method.label: peer for peer in PEERS}


def row(kind, system, **more):
    return {**BY_NAME[system].row(kind), "time": "2026-01-01", **more}


ROWS = [
    row("loss", REFERENCE, curve="100:4.0 200:3.0 250:2.9"),
    row("loss", OURS, curve="100:3.5 200:2.5 250:2.4"),
    row("loss", "torchft DiLoCo", curve="100:4.0 200:3.9 250:3.8"),
    row("loss", "detonation DeMo", broke="ModuleNotFoundError: No module named 'x'"),
    row("step", REFERENCE, rate="1gbit", delay_ms="0", ms="100.00", bytes="4000000"),
    row("step", OURS, rate="1gbit", delay_ms="0", ms="50.00", bytes="500000"),
    row("step", "torchft DiLoCo", rate="1gbit", delay_ms="0", ms="10.00", bytes="100000"),
]


def test_the_table_has_seconds_and_marks_the_first_of_each_column():
    lines = table.markdown(ROWS).splitlines()
    assert "| 1gbit, 0 ms |" in lines[0]
    by_name = {line.split(" | ")[0].strip("| "): line for line in lines[2:]}
    assert "| **7.5** | 0.500 |" in by_name[OURS]  # its curve passes 3.0 at step 150
    assert "| 20.0 | 4.000 |" in by_name[REFERENCE]  # 200 steps of 0.1 s
    assert "| - | 0.100 |" in by_name["torchft DiLoCo"]  # it never comes so far
    assert "No module named 'x'" in by_name["detonation DeMo"]
    assert all(line.count("|") == lines[0].count("|") for line in lines)


def test_a_broken_system_takes_no_steps(tmp_path, monkeypatch, capsys):
    measured = []

    def ranks(lab, peer, config):
        measured.append(peer.method.label)
        if peer.method.label != REFERENCE:
            raise Failed("the cause")
        return [{"step": 100, "held_out": 3.0}, {"step": 200, "held_out": 2.0}]

    def steps(peer, rate, delay):
        place = {"rate": rate, "delay_ms": f"{delay:g}", "ms": "5.00", "bytes": "7"}
        return peer.row("step") | place

    monkeypatch.setattr(table, "measured", ranks)
    monkeypatch.setattr(table, "steps", steps)
    monkeypatch.setattr(table, "lab_of", lambda ranks, rate: Lab(ranks, UNLIMITED))
    words = ["--peers", "fp32|exact", "--rates", "1gbit", "--delays", "0"]
    words += ["--csv", str(tmp_path / "peers.csv")]
    assert table.main(words) == 0
    assert measured == [REFERENCE, "pycomm, exact"]
    rows = [(row["kind"], row["system"]) for row in tables.read(tmp_path / "peers.csv")]
    assert rows == [("loss", REFERENCE), ("loss", "pycomm, exact"), ("step", REFERENCE)]
    assert f"| {REFERENCE} | 0 | **1.0** |" in capsys.readouterr().out


def test_no_system_trains_where_there_is_no_lab(monkeypatch):
    def lab_of(ranks, rate):
        raise LabUnavailable("no tc")

    monkeypatch.setattr(table, "lab_of", lab_of)
    monkeypatch.setattr(table, "losses", lambda peer: pytest.fail(f"{peer} has trained"))
    with pytest.raises(LabUnavailable):
        table.main([])


def test_a_failed_rank_is_a_row_with_its_error(monkeypatch):
    said = "a rank failed:\nbegin\nValueError: the cause\nsomething after it\n"
    assert table.last_line(Failed(said)) == "ValueError: the cause"
    assert table.last_line(Failed("a rank failed:\nno error here\n\n")) == "no error here"
    assert table.last_line(Failed("a rank has not ended after 9 s:\n")).endswith("after 9 s:")

    def fails(*_):
        raise Failed(said)

    monkeypatch.setattr(table, "measured", fails)
    found = table.losses(PEERS[0])
    assert (found["curve"], found["broke"]) == ("", "ValueError: the cause")


def test_a_system_trains_and_takes_steps(monkeypatch):
    """Both kinds of measurement, with ranks that share a machine and a small model."""
    monkeypatch.setattr(table, "CONFIG", Config(steps=20, layers=1, width=32))
    monkeypatch.setattr(table, "lab_of", lambda ranks, rate: Lab(ranks, UNLIMITED))
    peer = BY_NAME["pycomm, LocalSGD int4"]
    trained = table.losses(peer)
    curve = tables.parse_curve(trained["curve"])
    assert [*curve] == [1, 10, 20]
    assert curve[20] < curve[10] < 6
    step = table.steps(peer, "1gbit", 0)
    assert float(step["ms"]) > 0
