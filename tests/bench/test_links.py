"""Rates beside Gloo: the rows of one small run, and words that make no sense."""

from __future__ import annotations

import csv

import pytest

from pycomm.bench.lab.wan import WanLab
from pycomm.bench.links import main
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
    status = main([*SMALL.split(), "--iperf-time", "0", "--csv", str(file)])
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


@pytest.mark.parametrize(
    ("words", "hint"), [("--loss 200%", "cannot read the share '200%'"), ("--round-trip 3", "3")]
)
def test_bad_words_get_one_line(words, hint, capsys):
    assert main([*words.split()]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1
