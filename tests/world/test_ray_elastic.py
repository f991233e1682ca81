"""Ray Train with a range of workers: a worker is killed, a node is lost, another one comes.

Real: Ray, its nodes as it starts them (each with its own raylet and agent), Ray Train's elastic
scaling, its checkpoints and its metrics. Stand-ins: the nodes are processes of one machine, with
one processor each, and the storage is a folder of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.torch.interpreter import ROOT, with_entry_point

LIMIT = 240  # seconds until something is expected at the latest
BEGIN = re.compile(r"begin at step (\d+) on (\d) workers, residuals ([0-9.e+-]+), process (\d+)")
SAVED = re.compile(r"saved step (\d+) on (\d) workers")


def start_nodes() -> Any:
    """Start a head and another node, of one processor each."""
    utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed: make world")
    return utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})


@contextmanager
def example(address: str, folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with_entry_point(folder)
    command = [sys.executable, str(ROOT / "examples/trainers/train_ray_elastic.py"), *words]
    with (folder / "output").open("w") as output:
        started = subprocess.Popen(
            [*command, "--storage", str(folder / "runs")],
            env=os.environ | environment(folder) | {"RAY_ADDRESS": address},
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait(30)


def environment(folder: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",  # Ray gives workers the lowest, and tests run beside others
    }


class Run:
    """What the report of a run says so far."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder, self._process = folder, process

    def lines(self) -> list[str]:
        report = self._folder / "runs" / "report"
        return report.read_text().splitlines() if report.exists() else []

    def wait(self, what: str, found: Callable[[list[str]], Any]) -> Any:
        """Return what a function of the lines finds, as soon as it finds something."""
        until = time.monotonic() + LIMIT
        while not (result := found(self.lines())):
            said = f"{what}: {self.lines()}\n{(self._folder / 'output').read_text()[-6000:]}"
            assert self._process.poll() in (None, 0), f"the run has ended without {what}: {said}"
            assert time.monotonic() < until, f"no {said}"
            time.sleep(0.2)
        return result

    def begins(self, number: int) -> re.Match[str]:
        """Return the line with which a group of workers begins, counted from 0."""

        def found(lines: list[str]) -> re.Match[str] | None:
            begins = [match for match in map(BEGIN.match, lines) if match]
            return begins[number] if len(begins) > number else None

        return self.wait(f"group {number}", found)

    def saves(self, number: int) -> int:
        """Return a step that group `number` has saved, and Ray has taken over.

        It takes over a checkpoint some time after the workers have reported it, so of two or more
        this is the last but one.
        """

        def found(lines: list[str]) -> int:
            starts = [i for i, line in enumerate(lines) if BEGIN.match(line)]
            own = [m for m in map(SAVED.match, lines[starts[number] :]) if m]
            return int(own[-2][1]) if len(own) > 1 else 0

        return self.wait(f"a checkpoint of group {number}", found)


def metrics_of(node: Any) -> str:
    with suppress(OSError):
        url = f"http://{node.node_ip_address}:{node.metrics_export_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read().decode()
    return ""


@pytest.mark.timeout(900)
def test_a_run_goes_on_with_the_workers_that_there_are(tmp_path, monkeypatch):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    nodes = start_nodes()
    try:
        second = nodes.add_node(num_cpus=1)
        every = 5
        words = ("--steps", "400", "--every", str(every), "--pause", "0.2", "--look-every", "5")
        with example(nodes.address, tmp_path, "--workers", "1", "2", *words) as process:
            run = Run(tmp_path, process)
            first = run.begins(0)
            assert first.groups()[:3] == ("0", "2", "0")

            # The monitor's numbers are among Ray's.
            def shown(_: list[str]) -> str:
                text = metrics_of(nodes.head_node)
                return text if "ray_pycomm_step{" in text else ""

            text = run.wait("ray_pycomm_step", shown)
            assert re.search(r"^ray_pycomm_ratio\{.*\} [5-8]\.", text, re.MULTILINE)

            saved = run.saves(0)
            os.kill(int(first[4]), signal.SIGKILL)  # a worker fails, its node does not
            again = run.begins(1)
            assert again[2] == "2"
            assert int(again[1]) >= saved
            assert int(again[1]) % every == 0
            assert float(again[3]) > 0  # the residuals are those of the checkpoint

            saved = run.saves(1)
            nodes.remove_node(second, allow_graceful=False)
            alone = run.begins(2)
            assert alone[2] == "1"
            assert int(alone[1]) >= saved
            assert float(alone[3]) > 0

            saved = run.saves(2)
            nodes.add_node(num_cpus=1)
            grown = run.begins(3)
            assert grown[2] == "2"
            assert int(grown[1]) >= saved
            assert float(grown[3]) == 0  # a single worker codes nothing, and has paid what was owed

            run.wait("the end", lambda lines: any(line.startswith("end at") for line in lines))
            assert process.wait(60) == 0
        steps = [int(match[1]) for match in map(SAVED.match, run.lines()) if match]
        assert steps[-1] == 400
    finally:
        nodes.shutdown()
