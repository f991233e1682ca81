"""All stages of `make gpu`, and what else runs on GPUs, on the stand-in device.

Processes find it among their packages, as torch finds any device. Kernels are the CUDA sources,
compiled by g++; of tools that only a GPU has, compute-sanitizer alone is a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pycomm.bench.common import tables
from pycomm.bench.gpu import __main__ as gpu
from pycomm.bench.gpu import tasks
from tests.torch.device import fake_device
from tests.torch.interpreter import ROOT

pytestmark = pytest.mark.timeout(600)  # all stages take 15 seconds of a free core
SANITIZER = """#!/bin/sh
echo "$@" >>$(dirname $0)/calls
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
KIND = "nvrtc"
SPECS = {"int4": "quant:bits=4,block=128,rounding=nearest", "sign": "sign:block=1024"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stand-in")


@pytest.fixture(scope="module")
def python(folder):
    """Run a module of Python in a process that has the device; return it."""
    env = os.environ | {"PYTHONPATH": fake_device.installed(folder)}
    tool = folder / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    env |= {"PATH": f"{folder}{os.pathsep}{env['PATH']}", "CUDA_HOME": str(folder)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)

    return run


@pytest.fixture(scope="module")
def done(python, folder):
    """Run all stages once."""
    words = ("--results", str(folder / "results"), "--kinds", KIND)
    return python("tests.bench.gpu.small", *words, "--numel", "4096", "--codec", ",".join(SPECS))


@pytest.fixture(scope="module")
def rows(done, folder):
    return tables.read(folder / "results" / "gpu-stand-in.csv")


def table(folder: Path, name: str) -> list[tables.Row]:
    return tables.read(folder / "results" / f"{name}-stand-in.csv")


def test_every_stage_ends_well(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"ran: {', '.join(gpu.STAGES)}; rows are in")


def test_smoke_tells_the_path(rows):
    (row,) = (row for row in rows if row["codec"] == "smoke")
    assert " values: kernels (" in row["contract"]


def test_each_kernel_is_timed(rows):
    timed = {(r["codec"], r["op"]): r for r in rows if r["kind"] == KIND}
    calls = {(SPECS[spec], op) for spec in SPECS for op in tasks.OPS}
    assert calls <= timed.keys()
    assert len(timed) == len(calls)
    assert all(float(row["microseconds"]) > 0 for row in timed.values())
    assert {row["method"] for row in timed.values()} == {"graph"}


def test_rows_tell_their_origin(rows):
    assert {row["device"] for row in rows} == {"stand-in"}
    assert all(row["torch"] == torch.__version__ and row["sources"] for row in rows)


def test_steps_have_bounds(done, folder):
    alone, exact, sign = table(folder, "step")
    assert [one["method"] for one in (alone, exact, sign)] == [
        *("alone", "pycomm, exact", "pycomm, sign")
    ]
    assert 0 < float(sign["wire_bytes"]) < float(exact["wire_bytes"]) / 4
    assert all(float(one["ratio"]) > 0 and int(one["memory"]) > 0 for one in (exact, sign))
    assert exact["connection"].endswith("2 ranks share 1 GPU without MPS")


def test_the_optimizers_are_timed(done, folder):
    rows = table(folder, "optimizer")
    assert [row["optimizer"] for row in rows] == ["AdamW", "SGD"]
    for row in rows:
        assert all(float(row[f"{name}_seconds"]) > 0 for name in ("fused", "hook", "step"))


def test_the_contract_is_tested(rows):
    said = {row["codec"]: row["contract"] for row in rows if row["kind"] == "check"}
    assert said[f"contract {KIND} sign"] == "6 passed"


def test_kernels_run_under_the_sanitizer(rows, folder):
    (row,) = (row for row in rows if row["codec"] == "memcheck sign")
    assert row["contract"] == "3 passed"
    (run,) = (folder / "calls").read_text().splitlines()
    assert run.startswith("--tool=memcheck --error-exitcode=86 --print-limit=20 ")
    assert "test_alignment_does_not_matter and nvrtc-fakegpu and sign" in run


def test_the_trace_is_a_profile_of_a_step(done, folder):
    events = json.loads((folder / "results" / "trace-stand-in.json").read_text())["traceEvents"]
    assert "Optimizer.step#AdamW.step" in {event["name"] for event in events}


def test_collectives_of_its_tensors_are_right(done, folder):
    assert "# pycomm-host: torch" in done.stdout
    assert "2 ranks share 1 GPU without MPS" in done.stdout
    timed = table(folder, "collectives")
    names = [(row["backend"], row["codec"]) for row in timed]
    codecs = ("none", "int8", "int4")
    assert names == [(b, c) for b in ("pycomm-torch", "pycomm-host") for c in codecs]
    assert all(row["wrong"] == "0" and row["device"].startswith("stand-in") for row in timed)
    assert len({row["time_device"] for row in timed}) == 6  # each has calls of its own


def test_the_stand_in_has_nothing_that_cuda_has_not():
    ours = {name for name in vars(fake_device.module()) if not name.startswith("__")}
    # Which torch asks of devices that it does not know itself.
    asked = {"_is_in_bad_fork", "manual_seed_all", "get_amp_supported_dtype"}
    assert ours - asked <= vars(torch.cuda).keys()
