"""`python -m pycomm.bench <op>`: right rows, and an exit status that tells of wrong ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from pycomm import _C
from pycomm.bench import collectives, measure
from pycomm.bench.operations import OPERATIONS, STORAGE, make_case

CLEAN = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pycomm.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=CLEAN)


def rows_of(tmp_path, *arguments: str) -> list[dict]:
    outcome = bench(*arguments, "-n", "10", "-J", str(tmp_path / "out.json"))
    assert outcome.returncode == 0, outcome.stderr
    return json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (3, 4 / 3)])
def test_all_reduce_rows(tmp_path, ranks, factor):
    rows = rows_of(tmp_path, "all_reduce", "-b", "8", "-e", "5000", "-f", "16", "-p", str(ranks))
    assert [row["size"] for row in rows] == [8, 128, 2048, 5000]
    for row in rows:
        assert (row["kind"], row["op"], row["backend"]) == ("time", "all_reduce", "pycomm")
        assert (row["ranks"], row["wrong"], row["iterations"]) == (ranks, 0, 10)
        assert row["count"] == row["size"] / 4
        assert row["time_p99"] >= row["time_p50"] > 0
        assert row["algbw"] == row["effbw"] == row["size"] / row["time_p50"] / 1e3
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)


@pytest.mark.parametrize("op", sorted(set(OPERATIONS) - {"all_reduce"}))
def test_every_operation_is_right(tmp_path, op):
    backends = ["pycomm", "pycomm-shared"]
    size = ("-b", "3000", "-e", "3000", "-p", "3", "-d", "int", "--backend", ",".join(backends))
    rows = [row for row in rows_of(tmp_path, op, *size) if row["kind"] == "time"]
    assert [row["backend"] for row in rows] == backends
    assert {(row["op"], row["wrong"], row["size"]) for row in rows} == {(op, 0, 3000)}


@pytest.mark.parametrize("dtype", sorted(STORAGE))
@pytest.mark.parametrize("redop", ["sum", "avg", "prod", "max"])
def test_expected_values_are_the_core_s(dtype, redop):
    # reduce() is held to torch elsewhere: here the benchmark's own idea of right is.
    case = make_case(
        OPERATIONS["all_reduce"], 4096, dtype=dtype, redop=redop, rank=0, ranks=3
    )  # fmt: skip
    inputs = [case.stored(case.inputs(rank)) for rank in range(3)]
    out = np.empty_like(inputs[0])
    addresses = [x.ctypes.data for x in inputs]
    _C.reduce(case.core_dtype, case.core_redop, addresses, out.ctypes.data, case.count)
    assert np.array_equal(out, case.expected())


def test_codecs_are_rows_of_their_own(tmp_path):
    none, int8 = rows_of(tmp_path, "all_reduce", "-b", "64K", "-e", "64K", "--codec", "none,int8")
    assert (none["codec"], none["ratio"], none["err"]) == ("none", 1.0, None)
    assert (int8["codec"], int8["redop"], int8["wrong"]) == ("int8", "avg", 0)
    assert int8["ratio"] == pytest.approx(4 / (1 + 4 / 256))
    assert 0.001 < int8["err"] < 0.02
    assert int8["effbw"] == pytest.approx(int8["algbw"] * int8["ratio"])


def test_backends_take_turns_and_are_compared(tmp_path):
    rows = rows_of(tmp_path, "all_reduce", "-b", "1K", "-e", "1K", "--backend", "pycomm,gloo")
    assert [(row["kind"], row["backend"]) for row in rows] == [
        ("time", "pycomm"),
        ("time", "gloo"),
        ("ratio", "pycomm"),
    ]
    assert all(row["wrong"] == 0 for row in rows)
    assert rows[2]["time_p50"] == pytest.approx(rows[1]["time_p50"] / rows[0]["time_p50"])


def test_wrong_results_are_counted(monkeypatch):
    class Broken(measure.Backend):
        name = "pycomm"

        def prepare(self, case, x, y, codec="none"):
            def run() -> None:
                y[:] = case.expected()
                y[3:5] += 1

            return run

        def sent_bytes(self):
            return None

        def describe(self):
            return "broken"

        def close(self): ...

    member = measure.Rank.__new__(measure.Rank)
    member.rank, member.ranks = 0, 1
    member.control = _C.Communicator(None, 0, 1, _C.CommunicatorOptions())
    case = make_case(
        OPERATIONS["all_reduce"], 400, dtype="float32", redop="sum", rank=0, ranks=1
    )  # fmt: skip
    variant = measure.Variant(Broken(), "none", "none", run=lambda: None)
    member.verify(case, variant)
    assert variant.wrong == 2


def test_a_wrong_row_ends_with_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measure.Rank, "run", lambda self, report: False)
    monkeypatch.setattr(collectives, "env", lambda: type("Env", (), {"rank": 0, "world_size": 1}))
    assert collectives.main(["all_reduce", "--store", str(tmp_path / "store")]) == 1
    assert "WRONG" in capsys.readouterr().err


def test_a_rank_that_fails_ends_all(tmp_path):
    outcome = bench("all_reduce", "-b", "8", "-e", "8", "--csv", "/proc/no/such/folder.csv")
    assert outcome.returncode == 1
    assert "rank 0 ended with 1" in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["all_scatter"], "invalid choice"),
        (["all_reduce", "-b", "x"], "cannot read the size"),
        (["all_reduce", "-b", "8K", "-e", "8"], "smaller than"),
        (["all_reduce", "-f", "1"], "larger than 1"),
        (
            ["all_reduce", "--backend", "nccl"],
            "one or more of pycomm, pycomm-shared, pycomm-torch,",
        ),
        (["broadcast", "--codec", "int8"], "--codec is for all_reduce of float32"),
        (["all_reduce", "--codec", "int8", "-d", "half"], "--codec is for all_reduce of float32"),
        (["all_reduce", "--codec", "int8", "--backend", "gloo"], "--codec is for the backend"),
    ],
)
def test_bad_arguments_are_explained(capsys, arguments, hint):
    with pytest.raises(SystemExit):
        collectives.parse(arguments)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("op", OPERATIONS)
def test_bus_factors(op):
    # Bytes over the busiest link of the best algorithm, over `size`: see docs/bench.md.
    factors = {"all_reduce": 1.5, "broadcast": 1.0, "reduce": 1.0, "sendrecv": 1.0}
    assert OPERATIONS[op].bus_factor(4) == factors.get(op, 0.75)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI library here")
@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_mpi_takes_turns_with_the_core(tmp_path, op):
    pytest.importorskip("mpi4py")
    rows = rows_of(tmp_path, op, "-b", "3000", "-e", "3000", "-p", "2", "--backend", "pycomm,mpi")
    timed = [row for row in rows if row["kind"] == "time"]
    assert [(row["backend"], row["wrong"]) for row in timed] == [("pycomm", 0), ("mpi", 0)]
