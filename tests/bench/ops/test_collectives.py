"""`python -m pycomm.bench <op>`: right rows, and an exit status that tells of wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm import _C
from pycomm.bench import __main__ as cli
from pycomm.bench.common import accelerator, harness, tables
from pycomm.bench.common.harness import Row, read_rows
from pycomm.bench.ops import codecs, coded, collectives, measure
from pycomm.bench.ops.backends import Core, coded_run
from pycomm.bench.ops.operations import DTYPES, OPERATIONS, REDUCTIONS, make_case
from pycomm.communicator import Communicator
from pycomm.env import env
from tests.ranks import run_processes
from tests.torch.interpreter import free_port, launch

CLEAN = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pycomm.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=CLEAN)


def read(path: Path) -> list[dict]:
    return [asdict(row) for row in harness.read_rows(path, harness.Row)]


# Benchmarks by a name, in sets that run one after another in the same ranks: to start ranks takes
# much longer than a benchmark of ten iterations.
CODECS = ("none", "quant:bits=8", "topk:density=0.01,values=int8")
OTHERS = sorted(set(OPERATIONS) - {"all_reduce"})
THREE = ["pycomm", "pycomm-shared", "pycomm-torch"]
SETS: dict[str, tuple[int, dict[str, str], dict[str, str]]] = {
    "two ranks": (
        2,
        {},
        {
            **{
                f"codecs of {dtype}": f"all_reduce -b 64K -e 64K -d {dtype} "
                "--codec none,quant:bits=4"
                for dtype in ("half", "bfloat16")
            },
            **{
                f"codecs of {op}": f"{op} -b 64K -e 64K -c 2 --codec {','.join(CODECS)}"
                for op in coded.CORE
            },
            "explained": "all_reduce -b 4K -e 4K --codec none,int8 --explain",
            "encrypted": "all_reduce -b 4K -e 4K --backend pycomm,pycomm-tls",
            "gloo": "all_reduce -b 1K -e 1K --backend pycomm,gloo",
            "torch": "reduce_scatter -b 4K -e 4K --backend pycomm-torch,gloo "
            "--codec none,quant:bits=4",
        },
    ),
    "three ranks": (
        3,
        {},
        {
            "all_reduce": "all_reduce -b 8 -e 5000 -f 16",
            "all types": "all_reduce -b 64 -e 64 -d all -o all -w 1",
            **{op: f"{op} -b 3000 -e 3000 -d int --backend {','.join(THREE)}" for op in OTHERS},
        },
    ),
    "four ranks": (
        4,
        {"PYCOMM_TRANSPORT": "tcp"},
        {
            **{op: f"{op} -b 64K -e 64K --codec none,quant:bits=8" for op in coded.CORE},
            "unchecked": "all_reduce -b 64K -e 64K -c 0 -w 1",
        },
    ),
}
# Rank 0 writes the rows of each benchmark to a file of its name, or what went wrong.
RANK = """
import contextlib, io, json, os, sys
from pathlib import Path
from pycomm.bench.__main__ import main

for name, words in json.loads(sys.argv[1]).items():
    said = io.StringIO()
    given = [*words.split(), "-n", "10", "--csv", f"{name}.csv"]
    with contextlib.redirect_stderr(said):
        status = main(given)
    if os.environ["RANK"] == "0" and status != 0:
        Path(f"{name}.error").write_text(f"{name} ended with {status}: {said.getvalue()}")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Run a set once; return its folder, and what its ranks have printed."""

    @cache
    def of(name: str) -> tuple[Path, str]:
        ranks, variables, benchmarks = SETS[name]
        folder = tmp_path_factory.mktemp("set")
        words = "-c", RANK, json.dumps(benchmarks)
        return folder, launch(*words, folder=folder, ranks=ranks, **variables)

    return of


@pytest.fixture(scope="module")
def rows_of(printed):
    """Return the rows of a benchmark in a set."""

    def read_rows_of(name: str, benchmark: str) -> list[dict]:
        folder, text = printed(name)
        error = folder / f"{benchmark}.error"
        assert not error.exists(), f"{error.read_text()}\n{text}"
        return read(folder / f"{benchmark}.csv")

    return read_rows_of


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (3, 4 / 3)])
def test_all_reduce_rows(tmp_path, rows_of, ranks, factor):
    if ranks == 2:  # whose ranks the program starts itself
        words = f"all_reduce -b 8 -e 5000 -f 16 -p 2 -n 10 --csv {tmp_path}/out.csv"
        outcome = bench(*words.split())
        assert outcome.returncode == 0, outcome.stderr
        rows = read(tmp_path / "out.csv")
        cores = {line["cores"] for line in tables.read(tmp_path / "out.csv")}
        assert cores == {str(len(os.sched_getaffinity(0)))}  # of the machine: a rank has one
    else:
        rows = rows_of("three ranks", "all_reduce")
    assert [row["size"] for row in rows] == [8, 128, 2048]  # as nccl-tests: no size is larger
    for row in rows:
        assert (row["kind"], row["op"], row["backend"]) == ("time", "all_reduce", "pycomm")
        assert (row["ranks"], row["wrong"], row["iterations"]) == (ranks, 0, 10)
        assert row["count"] == row["size"] / 4
        assert row["time_p99"] >= row["time_p50"] > 0
        assert row["algbw"] == row["effbw"] == row["size"] / row["time_p50"] / 1e3
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)
        assert 0 < row["cpu_seconds"] < 1
        assert row["wire_bytes"] > 0


@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_codecs_take_16_bit_floats(rows_of, dtype):
    none, int4 = rows_of("two ranks", f"codecs of {dtype}")
    assert (none["wrong"], int4["wrong"]) == (0, 0)
    assert int4["ratio"] == pytest.approx(2 / (1 / 2 + 4 / 128))
    assert 0.05 < int4["err"] < 0.3


def test_wire_bytes_are_those_of_the_derivation(rows_of):
    for op, shares in (("all_reduce", 6), ("reduce_scatter", 3)):
        for row in rows_of("four ranks", op):
            share = row["size"] / row["ratio"] / 4  # of one rank; codes of a part are as long
            headers = row["wire_bytes"] - shares * share
            assert 0 < headers <= 2 * shares * 128 + 64  # scales of blocks that a part cuts
    checked, *_ = rows_of("four ranks", "all_reduce")
    (row,) = rows_of("four ranks", "unchecked")  # a group's first call also exchanges what it knows
    assert row["wire_bytes"] == checked["wire_bytes"]


@pytest.mark.parametrize("op", OTHERS)
def test_every_operation_is_right(rows_of, op):
    rows = rows_of("three ranks", op)
    assert [row["backend"] for row in rows] == THREE
    assert {(row["op"], row["wrong"], row["size"]) for row in rows} == {(op, 0, 3000)}
    factor = 1.0 if op in ("broadcast", "reduce", "sendrecv") else 2 / 3  # of docs/bench.md
    assert all(row["busbw"] == pytest.approx(factor * row["algbw"]) for row in rows)


@pytest.mark.parametrize("op", coded.CORE)
def test_codecs_are_rows_of_their_own(rows_of, op):
    none, int8, topk = rows_of("two ranks", f"codecs of {op}")
    assert (none["codec"], none["ratio"], none["err"]) == ("none", 1.0, None)
    assert (int8["codec"], int8["redop"], int8["wrong"]) == (CODECS[1], "avg", 0)
    assert int8["ratio"] == pytest.approx(4 / (1 + 4 / 256))
    assert 0.001 < int8["err"] < 0.02
    assert int8["effbw"] == pytest.approx(int8["algbw"] * int8["ratio"])
    assert none["wire_bytes"] > 3 * int8["wire_bytes"] > 9 * topk["wire_bytes"] > 0
    assert (topk["codec"], topk["wrong"]) == (CODECS[2], 0)


def test_the_backend_of_torch_has_codecs_too(rows_of):
    rows = rows_of("two ranks", "torch")
    assert [(r["backend"], r["codec"]) for r in rows] == [
        ("pycomm-torch", "none"),
        ("pycomm-torch", "quant:bits=4"),
        ("gloo", "none"),
    ]
    assert all(row["wrong"] == 0 for row in rows)


def test_all_types_and_reductions(rows_of):
    rows = rows_of("three ranks", "all types")
    cases = {(row["type"], row["redop"]) for row in rows}
    assert cases == {(dtype, redop) for dtype in DTYPES for redop in REDUCTIONS}
    assert all(row["wrong"] == 0 for row in rows)


class Fake(Core):
    """Does what a test says."""

    def __init__(self, run) -> None:
        self.name, self.run = "pycomm", run

    def prepare(self, case, x, y, codec="none"):
        return lambda: self.run(case, x, y)


def alone() -> measure.Rank:
    member = measure.Rank.__new__(measure.Rank)
    member.rank, member.ranks = 0, 1
    member.control = Communicator(None, 0, 1)
    return member


def case_of(op: str, size: int = 4096):
    return make_case(OPERATIONS[op], size, dtype="float32", redop="sum", rank=0, ranks=1)


def test_explain_names_the_algorithm_and_why(printed):
    _, said = printed("two ranks")
    assert "4K float32 pycomm: window: all ranks share memory" in said
    assert "4K float32 pycomm int8: two_shot: ranks are near each other" in said


def test_a_backend_encrypts(printed, rows_of):
    rows = rows_of("two ranks", "encrypted")
    assert {row["backend"] for row in rows} == {"pycomm", "pycomm-tls"}
    assert " pycomm-tls " in printed("two ranks")[1]


def test_ranks_of_a_machine_get_cores_of_their_own():
    cores = len(os.sched_getaffinity(0))
    ranks = min(2, cores)

    def job(c):
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # as in namespaces
        member = measure.Rank.__new__(measure.Rank)
        member.rank, member.ranks, member.control = c.rank, c.size, c
        member._pin()
        return os.sched_getaffinity(0)

    found = run_processes(ranks, job)
    assert all(len(own) == 1 for own in found)
    assert len(set.union(*found)) == ranks
    assert all(len(own) == cores for own in run_processes(cores + 1, job))


def test_wrong_results_are_counted():
    def broken(case, x, y) -> None:
        y[:] = case.expected()
        y[3:5] += 1

    case = case_of("all_reduce")
    variant = measure.Variant(Fake(broken), "none", case, run=lambda: None)
    alone().verify(variant)
    assert variant.wrong == 2


@pytest.mark.parametrize(("loss", "wrong"), [(0.005, 0), (0.5, 1024)])
def test_a_codec_may_lose_what_it_loses_and_no_more(loss, wrong):
    def lossy(case, x, y) -> None:
        y *= 1 + loss

    case = case_of("all_reduce")
    variant = measure.Variant(Fake(lossy), "int8", case, run=lambda: None)
    alone().verify(variant)
    assert variant.wrong == wrong
    assert variant.err == pytest.approx(loss, rel=1e-3)  # y is float32


def test_a_wrong_row_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(measure.Rank, "run", lambda self, report: False)
    monkeypatch.setattr(collectives, "env", lambda: replace(env(), rank=0, world_size=1))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert collectives.main(["all_reduce"]) == 1
    assert "WRONG" in capsys.readouterr().err


def test_a_rank_that_fails_ends_all(tmp_path):
    outcome = bench("all_reduce", "-b", "8", "-e", "8", "--csv", "/proc/no/such/folder.csv")
    assert outcome.returncode == 1
    assert "rank 0 ended with 2" in outcome.stderr  # a file that cannot be written is bad input


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["all_redcue"], "did you mean all_reduce? Use one of all_reduce, reduce_scatter,"),
        (["all_reduce", "-b", "8K", "-e", "8"], "smaller than"),
        (["all_reduce", "-f", "1"], "larger than 1"),
        (["all_reduce", "-f", "nan"], "larger than 1"),
        (["all_reduce", "-p", "0"], "want a whole number above 0"),
        (["all_reduce", "--backend", "nccl"], "--backend nccl is not for --device cpu"),
        (["all_reduce", "--backend", "glo"], "did you mean gloo? Use one of pycomm, pycomm-shared"),
        (["all_reduce", "--backend", "gloo,gloo"], "names something twice"),
        (["all_reduce", "--codec", "INT4"], '"INT4": the codecs are bf16, cast,'),
        (["all_reduce", "--explain", "--backend", "gloo"], "--explain is for pycomm"),
        (["broadcast", "--codec", "int8"], "--codec is for all_reduce, reduce_scatter"),
        (["all_reduce", "--codec", "int8", "-d", "int"], "--codec is for float32, float16"),
        (["all_reduce", "--codec", "int8", "--backend", "gloo"], "is for backends of pycomm"),
        (["training", "--models", "dmeo"], "did you mean demo?"),
        (["step", "--rate", "fast"], "cannot read the rate 'fast'"),
        (["step", "--trainings", "nothing"], "'nothing' fits none of these: Gloo, fp32;"),
        (["step", "--methods", "fp16", "--backend", "pycomm"], "none of --methods fp16 is for"),
        (["peers", "--peers", "nothing"], "'nothing' fits none of these: DDP on Gloo"),
        (["plan", "--ranks", "2,1"], "'1': want 2 to 250"),
        (["plan", "--size", "1M,2"], "--size 2: want at least 4 bytes"),
        (["plan", "--rate", "1gbit@3ms@0@1"], "cannot read '1gbit@3ms@0@1'"),
        (["step", "--nodes", "300"], "'300': want 2 to 250"),
        (["step", "--stand-in", "--trainings", "int4"], "--stand-in has no --trainings"),
        (["step", "--stand-in", "--methods", "exact,int4"], "--stand-in models int4, int8, sign"),
        (["step", "--trainings", "int4", "--methods", "int4"], "--trainings has no --methods"),
        (["training", "--suite", "--ranks", "4"], "--suite has no --ranks"),
        (["training", "--tasks", "rows"], "--only losses has no --tasks"),
        (["training", "--only", "optimizer", "--seeds", "0"], "--only optimizer has no --seeds"),
        (["report", "--tables", "--only", "demo"], "--tables has no --only"),
        (["peers", "--delays", "0,-5"], "the round trip '-5ms'"),
        (["step", "--stand-in", "--rate", "1gbit,unlimited"], "not unlimited"),
        (["training", "--methods", "pycomm int4"], "did you mean 'pycomm, int4'? Gloo, fp32;"),
        (["links", "--loss", "0,200%"], "cannot read the share '200%'"),
        (["links", "--round-trip", "2ms,3"], "cannot read the round trip '3'"),
        (["links", "--rate", "1gbit,2mbps"], "rate '2mbps'"),  # of tc, which means bytes
        (["links", "--rate", "0mbit"], "the rate '0mbit' is not above 0"),
        (["links", "--bytes", "8192,4"], "--bytes 4: want at least 8"),
        (["links", "--paths", "1gbit,1gbit", "--loss", "0"], "--paths has no --loss"),
        (
            ["links", "--operation", "all_reduce_int8", "--backend", "gloo"],
            "gloo has no all_reduce",
        ),
        (["links", "--paths", "1gbit; rm x"], "cannot read the rate '1gbit; rm x'"),
        (["all_gather", "--device", "cuda", "--backend", "nccl"], "built for CUDA"),
        (["gpu"], "torch sees no GPU here: this needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_be_gets_one_line(capsys, monkeypatch, words, hint):
    monkeypatch.setattr(accelerator, "kind", lambda: "")
    try:
        status = cli.main(words)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert (status, said.out) == (2, "")
    assert hint in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_a_package_that_is_missing_is_named(tmp_path, module):
    hidden = f"raise ModuleNotFoundError('No module named {module}', name='{module}')\n"
    (tmp_path / f"{module}.py").write_text(hidden)
    command = [sys.executable, "-m", "pycomm.bench", "codecs", "--help"]
    environment = CLEAN | {"PYTHONPATH": str(tmp_path)}
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert f"this needs {module}, which is not installed" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


# ------------------------------------------------------------------------------------------- codecs
# `python -m pycomm.bench codecs`: a row per codec and call, beside memcpy's rate.


@pytest.fixture(autouse=True)
def _blocks_are_short(monkeypatch):
    monkeypatch.setattr(codecs, "SECONDS", 0.002)


def test_rows(tmp_path):
    out = tmp_path / "out.csv"
    options = ["-b", "4K", "-e", "4K", "--codec", "int8,int4:block=64", "--csv", str(out)]
    assert codecs.main(options) == 0
    rows = read_rows(out, Row)
    specs = ["quant:bits=8,block=256,rounding=nearest", "quant:bits=4,block=64,rounding=nearest"]
    ops = ["encode", "encode+residual", "decode", "decode_add"]
    assert [(row.codec, row.op) for row in rows] == [(s, o) for s in specs for o in ops]
    for row in rows:
        assert row.algbw == 4096 / row.time_p50 / 1e3
        assert row.of_copy == row.algbw / row.copybw
    assert rows[0].ratio == 4096 / (1024 + 4 * 4)


def test_every_codec_is_measured_by_default():
    chosen = codecs.specs([])
    assert len(set(chosen)) == len(chosen)
    assert {spec.partition(":")[0] for spec in chosen} == set(_C.codec_names())


def test_who_calls_it_is_not_left_on_one_core():
    cores = os.sched_getaffinity(0)
    assert codecs.main(["-b", "4K", "-e", "4K", "--codec", "topk:0.01"]) == 0
    assert os.sched_getaffinity(0) == cores


# ------------------------------------------------------------------------------------------ devices
# `python -m pycomm.bench OP --device cuda`: what of it needs no GPU.


@pytest.fixture
def torch_alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_payloads_of_another_backend_are_coded_alike(torch_alone):
    of = {"dtype": "float32", "redop": "avg", "rank": 0, "ranks": 1}
    case = make_case(OPERATIONS["reduce_scatter"], 4096, **of)
    x, y = torch.linspace(-1, 1, case.count), torch.zeros(case.count)
    coded_run(torch_alone, case, x, y, "int8")()
    codec = pycomm.codec("int8")
    assert torch.equal(y, codec.decode(codec.encode(x), case.count))
