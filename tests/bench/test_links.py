"""Rates of links mean what their page says; those beside Gloo: the rows of one small run."""

from __future__ import annotations

import csv
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from pycomm.bench import links, netlab
from pycomm.bench.__main__ import main
from pycomm.bench.lab.rates import Rate, parse
from tests.torch.interpreter import free_port

SMALL = (
    "--round-trip 2ms --loss 0 --operation all_reduce,all_reduce_int8,all_gather --bytes 4096"
    " --repeats 1"
)


def test_rows_of_both_backends(tmp_path, capsys):
    file = tmp_path / "rates.csv"
    status = main(["links", *SMALL.split(), "--iperf-time", "0", "--csv", str(file)])
    if status == 2 and "cannot be made here" in (error := capsys.readouterr().err):
        pytest.skip(error)
    assert status == 0
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [(row["operation"], row["backend"]) for row in rows] == [
        ("all_reduce", "pycomm"),
        ("all_reduce", "gloo"),
        ("all_reduce_int8", "pycomm"),
        ("all_gather", "pycomm"),
        ("all_gather", "gloo"),
    ]
    for row in rows:
        # What a rank of two sends: all of the tensor, its payload of 33 bytes for 32 values, or its
        # own half.
        sent = {"all_reduce": 4096, "all_reduce_int8": 1056, "all_gather": 2048}[row["operation"]]
        rate = 8 * sent / float(row["ms"]) / 1e3
        # Both numbers are rounded to a tenth.
        assert float(row["mbit_per_s"]) == pytest.approx(rate, rel=0.05, abs=0.06)
        assert (row["round_trip_ms"], row["loss"], row["bytes"]) == ("2", "0", "4096")


def test_labs_of_tests_leave_processors_idle():
    """Else each would keep all of them busy, beside the tests of other workers."""
    with netlab.Lab(1, "1gbit") as lab:
        assert netlab.wait(lab.start(["true"])) == 0
        assert lab._busy is None


def test_rows_name_the_congestion_control_that_the_nodes_have(monkeypatch):
    """The kernel keeps its own where it lacks the one that was asked for."""

    @contextmanager
    def lab_of(nodes, rate, congestion):
        yield SimpleNamespace(congestion="cubic" if congestion == "bbr" else congestion)

    monkeypatch.setattr(links, "lab_of", lab_of)
    monkeypatch.setattr(links, "measure", lambda lab, options: [{"ms": "1.0"}])
    words = ["--control", "bbr,reno", "--round-trip", "0", "--loss", "0"]
    rows = [*links.run(links.parse(words))]
    assert [row["control"] for row in rows] == ["cubic", "reno"]


def test_an_error_of_pycomm_is_no_missing_row(monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (place | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(name, value)

    def fails() -> None:
        raise RuntimeError("the cause")

    monkeypatch.setattr(links, "coded_run", lambda *_: fails)
    with pytest.raises(RuntimeError, match="the cause"):
        next(links.time_calls(["all_reduce_int8"], [4096], 1, ["pycomm"]))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("1gbit", [Rate("1gbit", "1gbit")]),
        ("unlimited", [Rate(None, None)]),
        ("1.5mbit/unlimited", [Rate("1.5mbit", None)]),
        ("1gbit,9kbit/2mbit", [Rate("1gbit", "1gbit"), Rate("9kbit", "2mbit")]),
    ],
)
def test_rates(text, links):
    assert parse(text) == links


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rate", "1gbit@-3ms"], "cannot read the round trip '-3ms': want a time with a unit"),
        (["--rate", "1gbit@61s"], "the round trip 61s is impossible: want 0 to 60s"),
        (["--rate", "1gbit,1gbit@1ms"], "with delay or loss a node has one link"),
        (["--ranks-per-node", "0"], "'0': want a whole number above 0"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(options, problem):
    command = [sys.executable, "-m", "pycomm.bench.netlab", *options, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "netlab: " in done.stderr
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
