"""The parts of `make gpu` that need no GPU: what it counts, reads, writes and answers."""

from __future__ import annotations

import _thread
import json
import re
import sys
import threading
import time

import pytest
import torch

import pycomm
from pycomm.bench.common import accelerator, tables
from pycomm.bench.gpu import __main__ as gpu
from pycomm.bench.gpu import checks as gpu_checks
from pycomm.bench.gpu import tasks as gpu_tasks
from pycomm.bench.gpu.tasks import GpuRow, bytes_moved
from pycomm.codecs import CODECS
from tests.codecs.test_contract import CUDA
from tests.torch import interpreter

PASSED = {"passed": 767}
MACHINE = {"device": "device", "commit": "commit"}


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


def test_every_kind_that_is_timed_is_in_the_contract_test():
    assert {(kind, accelerator.kind() or "cuda") for kind in gpu.KINDS} == set(CUDA)


def test_counts_are_those_of_pytest(tmp_path, monkeypatch, capfd):
    """A skip by design is none; a tool that objects is a failure though all tests pass."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes half a second
    test = tmp_path / "test_four.py"
    test.write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "def test_c(): pytest.skip('no')\n"
        "def test_d(): pytest.skip('by design: it has no parts')\n"
    )

    def run(name: str, *tool: str):
        return gpu_checks.run(gpu_checks.Suite(name, [f"{test}{name}"], tool), 60)

    assert run("") == {"passed": 1, "failed": 1, "skipped": 1}
    assert run("::test_a") == {"passed": 1}
    assert run("::test_d") == {}
    objects = ["sh", "-c", '"$@"; echo found one; exit 86', "tool"]
    assert run("::test_a", *objects) == {"passed": 1, "failed": 1}
    assert "found one" in capfd.readouterr().out
    assert run("::test_a", "sh", "-c", "exit 1") == {"failed": 1}


def row(kind: str, numel: int, spec: str, op: str) -> GpuRow:
    return GpuRow(kind, "", spec, op, numel, 8, 2.0, 4.0, 8.0, 0.5, "graph")


@pytest.fixture
def pretend_gpu(monkeypatch):
    """A GPU whose kernels take no time, for the way through main()."""
    monkeypatch.setattr(accelerator, "kind", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "this_machine", lambda command: MACHINE)
    monkeypatch.setattr(gpu_checks, "run", lambda suite, end: PASSED)
    monkeypatch.setattr(gpu_checks, "sanitizer", lambda: "")
    monkeypatch.setattr(gpu_tasks, "time_kernel", row)

    def in_this_process(command, seconds):
        """Make a kind's timings; another stage's command does nothing."""
        return gpu_tasks.main(**json.loads(command[-1])) if gpu.TASKS in command else 0

    monkeypatch.setattr(gpu_checks, "status_of", in_this_process)
    return monkeypatch


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("sys.exit(0)", []),
        ("os._exit(9)", ["native: its process ended with status 9, see above"]),
        ("time.sleep(60)", ["native: out of time, its later rows are missing"]),
    ],
)
def test_a_process_that_fails_or_hangs_is_told(monkeypatch, tmp_path, does, says):
    (tmp_path / "doing.py").write_text(f"import os, sys, time\n{does}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "TASKS", "doing")
    run = gpu.GpuRun(gpu.parse(["--results", str(tmp_path)]), MACHINE)
    assert run.begin(1 / 60)  # a stage's own
    run.time("native", [4])
    assert run.problems == says


def test_a_run_goes_on_where_one_of_equal_sources_stopped(pretend_gpu, tmp_path):
    started: list[str] = []

    def run(suite, end):
        started.append(suite.name)
        return {"passed": 1, "failed": 1} if "eden" in suite.name else PASSED

    pretend_gpu.setattr(gpu_checks, "run", run)
    words = ["--results", str(tmp_path), "--kinds", "native", "--stages", "contract"]
    assert gpu.main(words) == 1
    every = [f"contract native {part}" for part in gpu_checks.PARTS]
    assert started[-len(every) :] == every
    started.clear()
    assert gpu.main(words) == 1
    assert started == ["contract native eden"]  # which has failed
    pretend_gpu.setattr(gpu, "sources", lambda: "others")
    started.clear()
    assert gpu.main(words) == 1
    assert started[-len(every) :] == every


@pytest.mark.parametrize(("minutes", "ran"), [("0", "nothing"), ("9", "contract")])
def test_what_has_no_time_is_left(pretend_gpu, tmp_path, capsys, minutes, ran):
    """The run's own time is over, or that of the stage's suites."""
    pretend_gpu.setattr(gpu, "STAGES", gpu.STAGES | {"contract": (0, gpu.contract)})
    words = ["--results", str(tmp_path), "--kinds", "native", "--stages", "contract"]
    assert gpu.main([*words, "--minutes", minutes]) == 1
    told = capsys.readouterr().out
    assert f"ran: {ran};" in told
    assert "left: make gpu STAGES=contract" in told


def test_each_test_of_the_contract_is_in_one_part():
    def chosen(part: str, name: str) -> bool:
        words = gpu_checks.of_part(part).removeprefix(" and ").split(" and ")
        return all((w.removeprefix("not ") in name) != w.startswith("not ") for w in words)

    for name in ("topk:0.01,values=int8", "eden2", "int8", "fp16", "bf16", "nvfp4", "mxfp4"):
        assert sum(chosen(part, name) for part in gpu_checks.PARTS) == 1


@pytest.mark.parametrize("breaks", [True, False])
def test_a_failing_kernel_does_not_lose_the_others(pretend_gpu, tmp_path, capsys, breaks):
    """Unless it breaks the GPU's context: then no later call is made."""

    def fails(kind, numel, spec, op):
        if (spec, op) == ("int8", "decode"):
            pretend_gpu.setattr(gpu_tasks, "is_broken", lambda: breaks)
            raise RuntimeError("no such kernel")
        return row(kind, numel, spec, op)

    pretend_gpu.setattr(gpu_tasks, "time_kernel", fails)
    words = ["--results", str(tmp_path), "--kinds", "native", "--numel", "64"]
    words += ["--codec", "int8,int4", "--stages", "kernels"]
    assert gpu.main(words) == 1
    said = capsys.readouterr().err
    assert "native int8 decode of 64: no such kernel" in said
    assert ("this call broke the GPU's context" in said) == breaks
    timed = [r for r in tables.read(tmp_path / "gpu-device.csv") if r["kind"] == "native"]
    assert len(timed) == (2 if breaks else 2 * len(gpu_tasks.OPS) - 1)


def test_sanitizers_run_where_they_are_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu_checks.sanitizer() == ""
    tool = tmp_path / "compute-sanitizer"
    tool.touch(mode=0o755)
    assert gpu_checks.sanitizer() == str(tool)
    suites = gpu_checks.sanitizers(str(tool), "sign", "native")
    assert [suite.name for suite in suites] == ["memcheck sign", "racecheck sign"]


@pytest.mark.parametrize("ending", ["time", "interrupt"])
def test_a_command_is_ended_with_its_processes(tmp_path, ending):
    alive = tmp_path / "alive"
    child = f"import time; time.sleep(3); open({str(alive)!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    if ending == "time":
        assert gpu_checks.status_of(command, 2) is None
    else:
        threading.Timer(2, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            gpu_checks.status_of(command, 60)
    time.sleep(2)
    assert not alive.exists()


def test_sanitizers_get_every_codec():
    """The expression must select tests: one that selected none passed as long as nobody ran it."""
    chosen = f"{gpu_checks.SANITIZED} and native-cpu"
    command = ["-m", "pytest", "-q", "--collect-only", "-o", "addopts="]
    done = interpreter.run(*command, gpu_checks.CONTRACT, "-k", chosen)
    assert done.returncode == 0, done.stdout
    listed = done.stdout
    specs = re.findall(r"\[(\S+)-native-cpu\]", listed)
    assert {pycomm.codec(spec).name for spec in specs} == set(CODECS)
