"""The parts of `make gpu` that need no GPU: what it counts, reads, writes and answers."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

import pycomm
from pycomm.bench import gpu, gpu_checks, gpu_collectives, gpu_results
from pycomm.bench.gpu_timing import bytes_moved, sets_needed
from pycomm.codecs.implementations import Unavailable
from tests.codecs.test_contract import CUDA

PASSED = gpu_checks.Counts(passed=767)
MACHINE = gpu_results.Machine(*(field.name for field in dataclasses.fields(gpu_results.Machine)))


@pytest.mark.parametrize(
    ("spec", "op", "want"),
    [
        ("int8", "encode", 4 * 1024 + 1024 + 4 * 4),
        ("int8", "encode_feedback", 3 * 4 * 1024 + 1024 + 4 * 4),
        ("int4", "decode", 4 * 1024 + 512 + 4 * 8),
        ("int4", "decode_add", 2 * 4 * 1024 + 512 + 4 * 8),
        ("fp16", "decode_add", 2 * 4 * 1024 + 2 * 1024),
    ],
)
def test_bytes_are_each_input_and_output_once(spec, op, want):
    assert bytes_moved(pycomm.codec(spec), op, 1024) == want


@pytest.mark.parametrize("set_bytes", [1000, 50_000_000, 10_000_000_000])
def test_sets_are_more_than_the_cache_holds(set_bytes):
    l2 = 60_000_000
    sets = sets_needed(set_bytes, l2)
    assert sets >= 2
    # All the others, which run between two turns of one set, overwrite the cache.
    assert (sets - 1) * set_bytes >= 3 * l2 or sets == 2
    assert (sets - 1) * set_bytes >= l2


def test_every_kind_that_is_timed_is_in_the_contract_test():
    assert {(kind, "cuda") for kind in gpu.KINDS} == set(CUDA)


def test_unknown_kind_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["--kinds", "native,cudnn"])
    assert "'cudnn': use native, nvrtc, triton, reference" in capsys.readouterr().err


def test_counts_are_those_of_pytest(tmp_path):
    test = tmp_path / "test_three.py"
    test.write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): pass\n"
        "def test_c(): assert False\n"
        "def test_d(): pytest.skip('no')\n"
        "def test_e(): pytest.skip('by design: it has no parts')\n"
    )
    junit = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--junitxml={junit}"]
    subprocess.run([*command, str(test)], capture_output=True, check=False)
    counts = gpu_checks.counts_of(junit)
    assert counts == gpu_checks.Counts(passed=2, failed=1, skipped=1)
    assert str(counts) == "2 passed, 1 failed, 1 skipped"
    assert not counts.good


def test_no_report_and_no_tests_are_not_good(tmp_path):
    assert not gpu_checks.counts_of(tmp_path / "none.xml").good
    assert not gpu_checks.Counts().good
    assert not gpu_checks.Counts(passed=700, skipped=1).good
    assert gpu_checks.Counts(passed=767).good


def row(kind: str, spec: str, op: str, numel: int, copy: float, contract: str) -> gpu.Row:
    return gpu.Row(kind, contract, spec, op, numel, 8 * numel, 2.0, 4.0, copy, 0.5, "graph")


def conversion(kind: str, source, target, numel: int, copy: float, contract: str) -> gpu.Row:
    return row(kind, f"{source} to {target}", "convert", numel, copy, contract)


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A GPU whose kernels take no time, for the way through main()."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "this_machine", lambda command: MACHINE)
    monkeypatch.setattr(gpu_checks, "run", lambda suites: {s.name: PASSED for s in suites})
    monkeypatch.setattr(gpu, "implementation", lambda *names: None)
    monkeypatch.setattr(gpu, "time_copy", lambda numel: 8.0)
    monkeypatch.setattr(gpu, "time_kernel", row)
    monkeypatch.setattr(gpu, "time_conversion", conversion)
    monkeypatch.setattr(gpu, "time_topk", lambda numel: row("torch", "", "topk", numel, 8.0, ""))
    monkeypatch.setattr(gpu, "time_collectives", lambda problems: [])
    return monkeypatch


def test_ranks_of_the_processor_take_the_way_of_those_of_a_gpu(capsys):
    assert gpu_collectives.main(["--device=cpu", "--ranks", "2", "--numel", "1000"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ways = [(line["codec"], line["algo"]) for line in lines if line["dtype"] == "float32"]
    assert ways == [("", "one_shot"), ("", "two_shot"), ("int8", ""), ("int4", "")]
    assert len(lines) == 2 * len(ways)
    assert all(line["gbps"] > 0 for line in lines)


def test_traffic_is_what_ranks_read_and_write():
    b = 4 * 1024
    assert gpu_collectives.traffic(4, 1024, "", "one_shot") == 4 * (b + b + 4 * b + b)
    assert gpu_collectives.traffic(4, 1024, "", "two_shot") == 4 * (2 * b + b + b // 4 + 2 * b)
    k = pycomm.codec("int8").encoded_bytes(1024)
    assert gpu_collectives.traffic(4, 1024, "int8", "") == 4 * (b + k + k + k // 4 + k + b)
    small = gpu_collectives.traffic(4, 1024, "int8", "", torch.bfloat16)
    assert small == 4 * (b // 2 + k + k + k // 4 + k + b // 2)


def test_what_ranks_say_becomes_rows(monkeypatch, capsys):
    line = gpu_collectives.Line(4, "int8", "", "float32", 1024, 4096, 2.0, 6.0)
    said = json.dumps(dataclasses.asdict(line))
    done = subprocess.CompletedProcess([], 1, said + "\n", "4 ranks, int4: late")
    monkeypatch.setattr(gpu.subprocess, "run", lambda *a, **k: done)
    monkeypatch.setattr(gpu, "time_copy", lambda numel: 8.0)
    problems = []
    (row,) = gpu.time_collectives(problems)
    assert (row.kind, row.codec, row.op, row.share) == (
        "ranks",
        "int8",
        "all_reduce of 4 coded float32",
        0.75,
    )
    assert problems == ["collectives: 4 ranks, int4: late"]


def test_every_kernel_gets_a_row_with_machine_and_contract(pretend_gpu, tmp_path):
    assert gpu.main(["--results", str(tmp_path)]) == 0
    with (tmp_path / "gpu-device.csv").open() as file:
        rows = list(csv.DictReader(file))
    kinds = Counter(row["kind"] for row in rows)
    kernels = len(gpu.SPECS) * len(gpu.OPS) + len(gpu.CONVERSIONS)
    for kind in ("native", "nvrtc", "triton"):
        assert kinds[kind] == len(gpu.NUMELS) * kernels
    assert kinds["reference"] == kernels
    assert kinds["torch"] == len(gpu.NUMELS)
    assert kinds["check"] >= len(gpu.KINDS)
    assert {row["commit"] for row in rows} == {"commit"}
    assert {row["contract"] for row in rows if row["kind"] in gpu.KINDS} == {"767 passed"}
    assert list(rows[0])[:3] == ["kind", "contract", "codec"]


def test_a_failing_contract_fails_the_run(pretend_gpu, tmp_path, capsys):
    failing = {"contract triton": gpu_checks.Counts(700, 67)}
    pretend_gpu.setattr(gpu_checks, "run", lambda suites: failing)
    assert gpu.main(["--results", str(tmp_path), "--kinds", "triton"]) == 1
    assert "contract triton: 700 passed, 67 failed" in capsys.readouterr().err


def test_a_failing_kernel_does_not_lose_the_others(pretend_gpu, tmp_path, capsys):
    def fails(kind, spec, op, *rest):
        if (spec, op) == ("int8", "decode"):
            raise RuntimeError("illegal address")
        return row(kind, spec, op, *rest)

    pretend_gpu.setattr(gpu, "time_kernel", fails)
    assert gpu.main(["--results", str(tmp_path), "--kinds", "native", "--numel", "64"]) == 1
    assert "native int8 decode: illegal address" in capsys.readouterr().err
    with (tmp_path / "gpu-device.csv").open() as file:
        timed = [row for row in csv.DictReader(file) if row["kind"] == "native"]
    assert len(timed) == len(gpu.SPECS) * len(gpu.OPS) + len(gpu.CONVERSIONS) - 1


def test_a_kind_that_lacks_a_codec_is_told_once_and_times_the_others(pretend_gpu, tmp_path, capsys):
    def lacks(name, kind, device):
        if name == "sign":
            raise Unavailable("no kernels")

    pretend_gpu.setattr(gpu, "implementation", lacks)
    assert gpu.main(["--results", str(tmp_path), "--kinds", "native"]) == 1
    assert capsys.readouterr().err.count("native has no sign: no kernels") == 1
    with (tmp_path / "gpu-device.csv").open() as file:
        native = [row for row in csv.DictReader(file) if row["kind"] == "native"]
    codecs = {row["codec"] for row in native if row["op"] in gpu.OPS}
    assert codecs == set(gpu.SPECS) - {"sign"}


def test_a_tool_that_objects_fails_tests_that_pass(tmp_path, capfd):
    test = tmp_path / "test_one.py"
    test.write_text("def test_a(): pass\n")
    objects = ["sh", "-c", '"$@"; echo found one; exit 86', "tool"]
    suites = [gpu_checks.Suite("plain", [str(test)]), gpu_checks.Suite("mem", [str(test)], objects)]
    found = gpu_checks.run(suites)
    assert found["plain"] == gpu_checks.Counts(passed=1)
    assert found["mem"] == gpu_checks.Counts(passed=1, failed=1)
    assert "found one" in capfd.readouterr().out


def test_sanitizers_run_where_they_are_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_checks.sanitizers() == []
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert [suite.name for suite in gpu_checks.sanitizers()] == ["memcheck", "racecheck"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_file_is_named_after_the_device():
    assert gpu_results.slug("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
