"""Worker processes that time `make gpu`'s tasks; a crash of one does not end the others."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pycomm.bench.gpu.results import GpuRow
from pycomm.bench.gpu.tasks import Task

SILENCE = 90.0  # seconds without output after which a process counts as hung
TASKS = (sys.executable, "-m", "pycomm.bench.gpu.tasks")
COLLECTIVES = (sys.executable, "-m", "pycomm.bench.gpu.collectives")


class Died(Exception):
    """A worker hung, crashed or exceeded its deadline; the text says which."""


def end(process: subprocess.Popen[Any]) -> int:
    """End a process, which leads a session, and its descendants. Return its status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def messages(
    command: Sequence[str],
    text: str = "",
    env: dict[str, str] | None = None,
    deadline: float = float("inf"),
) -> Iterator[dict[str, Any]]:
    """Yield the lines of JSON that a process writes, as they arrive.

    Args:
        text: its standard input.
        env: variables added to this process's environment.
        deadline: when it must have ended, by ``time.monotonic()``.

    Raises:
        Died: it writes nothing for `SILENCE` seconds, misses the deadline, or fails.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as to:
            to.write(text)
        while (line := _next(lines, deadline)) is not None:
            if line.startswith("{"):  # libraries may print other lines
                yield json.loads(line)
        if status := process.wait(SILENCE):
            raise Died(f"its process ended with status {status}")
    finally:
        end(process)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _next(lines: queue.Queue[str | None], deadline: float) -> str | None:
    left = deadline - time.monotonic()
    try:
        return lines.get(timeout=max(min(SILENCE, left), 0.001))
    except queue.Empty:
        late = "the time for all is over" if left < SILENCE else f"no word for {SILENCE:.0f} s"
        raise Died(late) from None


def perform(tasks: list[Task], deadline: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Yield {"row": ...} and {"problem": ...} of all tasks.

    A task that crashes its process is a problem, and a new process continues after it.
    """
    while tasks:
        began = -1
        try:
            text = json.dumps([dataclasses.asdict(task) for task in tasks])
            for message in messages(TASKS, text, deadline=deadline):
                began = message.get("task", began)
                if "task" not in message:
                    yield message
            return
        except Died as why:
            if time.monotonic() >= deadline:
                yield {"problem": f"{len(tasks) - max(began, 0)} timings are left out: {why}"}
                return
            if began < 0:
                yield {"problem": f"nothing is timed: {why}"}
                return
            yield {"problem": f"{tasks[began]}: {why}"}
            tasks = tasks[began + 1 :]


def collectives(deadline: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Yield rows and problems of all-reduces between ranks on this GPU; see collectives.py."""
    # Ranks' kernels wait for each other: each stream needs its own queue, and eager loading.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    copy = 0.0
    try:
        for message in messages(COLLECTIVES, env=env, deadline=deadline):
            if "ranks" not in message:
                copy = message.get("copy_gbps", copy)
                yield from [message] * ("problem" in message)
                continue
            op = f"all_reduce of {message['ranks']} {message['algo'] or 'coded'} {message['dtype']}"
            gbps = message["gbps"]
            row = GpuRow(
                kind="ranks",
                contract="",
                codec=message["codec"] or "none",
                op=op,
                numel=message["numel"],
                bytes=message["bytes"],
                microseconds=message["microseconds"],
                gbps=round(gbps, 1),
                copy_gbps=round(copy, 1),
                share=round(gbps / copy, 3) if copy else 0.0,
                method="events",
            )
            yield {"row": vars(row)}
    except Died as why:
        yield {"problem": f"collectives: {why}"}
