"""Rates beside Gloo: the rows of one small run, and words that make no sense."""

from __future__ import annotations

import csv

import pytest

from pycomm.bench.lab.wan import WanLab
from pycomm.bench.links.command import main
from tests.processes import labs

SMALL = (
    "--round-trip 2ms --loss 0 --operation all_reduce,all_reduce_int8,all_gather --bytes 4096"
    " --repeats 1"
)


@pytest.fixture(autouse=True)
def _ranks_have_imported_torch(monkeypatch):
    monkeypatch.setattr(WanLab, "_keep", labs.keep)


def test_rows_of_both_backends(tmp_path, capsys):
    file = tmp_path / "rates.csv"
    status = main(["rates", *SMALL.split(), "--iperf-time", "0", "--csv", str(file)])
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


def test_rows_of_a_rank_that_paces_itself_say_so(tmp_path, capsys):
    file = tmp_path / "rates.csv"
    # An int8 payload of this size is a fourth of it, of which the burst is too large a part.
    words = ["--operation", "all_reduce,all_gather", "--backend", "pycomm", "--link", "8mbit"]
    words += ["--bytes", "1048576", "--iperf-time", "0"]
    status = main(["rates", *SMALL.split(), *words, "--csv", str(file)])
    if status == 2 and "cannot be made here" in (error := capsys.readouterr().err):
        pytest.skip(error)
    assert status == 0
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert {row["backend"] for row in rows} == {"pycomm, link 8mbit"}
    # The pacer lets 64 KiB of a burst through; the link itself has 200 Mbit/s.
    assert all(float(row["mbit_per_s"]) < 10 for row in rows)


@pytest.mark.parametrize(
    ("words", "hint"), [("--loss 200%", "the loss 200% is impossible"), ("--round-trip 3", "3")]
)
def test_bad_words_get_one_line(words, hint, capsys):
    assert main(["rates", *words.split()]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (
            "--operation all_reduce:int8",
            "there is no operation 'all_reduce:int8', did you mean all_reduce_int8?",
        ),
        ("--backend pycomm,glo", "there is no backend 'glo', did you mean gloo?"),
    ],
)
def test_unknown_names_are_refused_before_a_lab_is_made(words, hint, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["rates", *words.split()])
    assert hint in capsys.readouterr().err
