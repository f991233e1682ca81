"""Replicas of the example under torchft's lighthouse, in processes of this machine."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from torchft.coordination import LighthouseServer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/trainers/train_torchft.py"
LIMIT = 240  # seconds; a process takes a minute to start on a busy machine


class Replica(ABC):
    """A replica's process, and what it has printed about its steps."""

    def __init__(self, process: int, printed: IO[str]) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._printed = printed
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._printed:
            for line in self._printed:
                if line.startswith("{"):
                    self.lines.append(json.loads(line))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in list(self.lines) if line.get("committed")]

    @property
    def digests(self) -> dict[int, str]:
        return {line["step"]: line["digest"] for line in self.steps}

    def together(self, count: int) -> bool:
        """Whether its last step was taken by so many."""
        return bool(self.steps) and self.steps[-1]["participants"] == count

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process, number)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        self._wait()
        self._reader.join(10)

    @abstractmethod
    def _wait(self) -> None:
        """Wait until the process has ended."""


class Started(Replica):
    """One that runs as users run it."""

    def __init__(self, number: int, lighthouse: str, log: Path, *options: str) -> None:
        with log.open("ab") as errors:
            self._child = subprocess.Popen(
                [sys.executable, str(EXAMPLE), "--replica", str(number), *options],
                env={**os.environ, **_environment(lighthouse), "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self._child.stdout is not None
        super().__init__(self._child.pid, self._child.stdout)

    def _wait(self) -> None:
        self._child.wait(10)


class Forked(Replica):
    """One that is forked from a process that has imported torch, so it starts at once."""

    def __init__(self, number: int, lighthouse: str, log: Path, *options: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.trainers.preloaded"])
        reads, writes = context.Pipe(duplex=False)
        arguments = (number, lighthouse, str(log), options, writes)
        self._child = context.Process(target=_run, args=arguments, daemon=True)
        self._child.start()
        writes.close()
        assert self._child.pid is not None
        super().__init__(self._child.pid, os.fdopen(os.dup(reads.fileno())))
        reads.close()

    def _wait(self) -> None:
        self._child.join(10)


def _environment(lighthouse: str) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }


def preload() -> None:
    """Import in the server what each replica needs; the first optimizer imports torch._dynamo."""
    importlib.import_module("torch._dynamo")
    example()


@cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_torchft", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(number: int, lighthouse: str, log: str, options: tuple[str, ...], writes: Any) -> None:
    os.environ.update(_environment(lighthouse))
    os.dup2(writes.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = [str(EXAMPLE), "--replica", str(number), *options]
    example().main()


class Lab:
    """A lighthouse and replicas, all of which end with it."""

    def __init__(self, folder: Path) -> None:
        self.server = LighthouseServer(
            bind="[::]:0",
            min_replicas=2,
            join_timeout_ms=1000,
            quorum_tick_ms=20,
            heartbeat_timeout_ms=500,
        )
        self.log = folder / "log"
        self.log.touch()
        self.replicas: list[Replica] = []

    def start(self, number: int, *options: str, kind: type[Replica] = Started) -> Replica:
        replica = kind(number, self.server.address(), self.log, *options)
        self.replicas.append(replica)
        return replica

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.log.read_text()[-4000:]}"
            time.sleep(0.01)

    def end(self) -> None:
        for replica in self.replicas:
            replica.end()
        self.server.shutdown()
