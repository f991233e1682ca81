"""Python processes that begin with torch imported.

Importing torch takes each process one to two seconds of processor time, and hundreds of tests need
processes of their own. So one process imports torch, without pycomm, and forks itself for each
process of a test; the workers of pytest share it. A forked process runs its command as `python`
runs it. At its end it waits for threads that are no daemons and runs exit functions, and its exit
status is Python's. With `finalized=True` it ends wholly as an interpreter ends: modules are
destroyed, and so is what C++ has in static variables. That takes a third of a second where torch is
imported.

What differs from `python COMMAND`: variables that torch or Python read while they start are those
of the first process, and `torch.backends` are not loaded unless `autoload=True`, which loads them
when `import torch` would have returned. Tests of exactly these start an interpreter of their own.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
NOTHING: Mapping[str, str] = {}
EXECUTABLE = "TESTS_PYTHON"  # the path that `sys.executable` is in a process, where it is set
PRELOADED = "torch.distributed.fsdp, torch._dynamo, torch.distributed.checkpoint"
# One thread, since a fork copies none: the libraries that torch loads start theirs at import.
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SERVER = f"""
import gc, sys
sys.path[0] = {str(ROOT)!r}
gc.disable()
import torch, {PRELOADED}
from tests.torch.forked import serve
# A collection goes over half a million objects of torch, and writes to each one's page.
gc.freeze()
gc.enable()
command = serve(int(sys.argv[1]))
del sys.path[0], gc, sys, torch, serve
command.prepare()
if command.finalized:
    exec(command.code(), globals())
else:
    command.run(globals())
"""


class Interpreter:
    """A process that runs `python COMMAND`; its output is in files until it has ended."""

    def __init__(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        variables: Mapping[str, str] = NOTHING,
        cwd: Path | str | None = None,
        merged: bool = False,
        fds: Sequence[int] = (),
        autoload: bool = False,
        finalized: bool = False,
    ) -> None:
        """Start the process.

        Args:
            command: what follows `python`: `-c CODE`, `-m MODULE` or a script, and its arguments.
            env: its environment; None: the caller's, where pycomm is found without an installation.
            variables: to add to it.
            cwd: its working directory; None: the caller's.
            merged: write stderr to stdout.
            fds: descriptors to pass on; the process finds their numbers in PASSED_FDS.
            autoload: load torch's entry points first, as `import torch` does.
            finalized: end as an interpreter ends, whose modules are destroyed.
        """
        self.args = ["python", *command]
        self.returncode: int | None = None
        self._out = tempfile.TemporaryFile()  # noqa: SIM115, the process writes to it
        self._err = self._out if merged else tempfile.TemporaryFile()  # noqa: SIM115
        wish = {
            "command": command,
            "env": _environment(env, variables),
            "cwd": str(cwd or os.getcwd()),
            "autoload": autoload,
            "finalized": finalized,
        }
        self._link, there = socket.socketpair()
        text = json.dumps(wish).encode()
        passed = [there.fileno(), self._out.fileno(), self._err.fileno(), *fds]
        with tempfile.TemporaryFile() as letter:  # a datagram would limit the environment's size
            letter.write(text)
            letter.flush()
            socket.send_fds(_server(), [b"x"], [letter.fileno(), *passed])
        there.close()
        # The first one waits until the server has imported torch: long, on a busy machine.
        self.pid = int(self._answer(110.0))

    def _answer(self, seconds: float | None) -> bytes:
        ready, _, _ = select.select([self._link], [], [], seconds)
        if not ready:
            raise subprocess.TimeoutExpired(self.args, seconds or 0.0, self.output())
        answer = self._link.recv(16, socket.MSG_WAITALL)
        if not answer:
            raise RuntimeError(f"the process that forks {' '.join(self.args)} has ended")
        return answer

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the process has not ended.
        """
        if self.returncode is None:
            self.returncode = int(self._answer(timeout))
            self._link.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until the process ends, kill it if it does not, and return stdout and stderr."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.output(), self.errors()

    def output(self) -> str:
        """Return what it has written to stdout until now."""
        return _read(self._out)

    def errors(self) -> str:
        """Return what it has written to stderr until now; what is merged is in the output."""
        return "" if self._err is self._out else _read(self._err)

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, and nobody has asked for its status
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _environment(
    env: Mapping[str, str] | None, variables: Mapping[str, str] = NOTHING
) -> dict[str, str]:
    return {**({**os.environ, "PYTHONPATH": str(ROOT)} if env is None else env), **variables}


def run(
    *command: str, timeout: float = 60.0, fresh: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python COMMAND` to its end; arguments are those of `Interpreter`.

    With `fresh` an interpreter is started, which imports torch itself.
    """
    if fresh:
        options["env"] = _environment(options.get("env"), options.pop("variables", NOTHING))
        options |= {"capture_output": True, "text": True, "timeout": timeout}
        return subprocess.run([sys.executable, *command], check=False, **options)
    process = Interpreter(*command, **options)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


def run_ranks(
    *command: str, words: Sequence[str] = (), timeout: float = 120.0, **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python COMMAND RANK WORDS` on two ranks at once to their ends."""
    ranks = [Interpreter(*command, str(rank), *words, **options) for rank in range(2)]
    said = [rank.communicate(timeout) for rank in ranks]
    return [
        subprocess.CompletedProcess(rank.args, rank.wait(), *texts)
        for rank, texts in zip(ranks, said, strict=True)
    ]


def launch(*command: str, folder: Path, ranks: int = 2, **environment: str) -> str:
    """Run a command on ranks with torchrun's variables; return their output of both streams.

    The ranks are finalized as users' scripts are, which may leave their groups as they are.
    """
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
    common = {key: str(value) for key, value in sizes.items()}
    common |= {"MASTER_ADDR": "127.0.0.1", **environment}
    started = [
        Interpreter(
            *command,
            variables={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            merged=True,
            finalized=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + 100
    try:
        for rank in started:
            rank.wait(max(0.0, end - time.monotonic()))
    finally:
        for rank in started:
            rank.kill()
    texts = "".join(rank.output() for rank in started)
    assert not any(rank.returncode for rank in started), texts
    return texts


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _read(file: Any) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


AS_PYTHON = Path(__file__).with_name("as_python.py")
SHARED = "TESTS_FORK_SERVER"  # the address of the server that the workers of pytest share


def start_server() -> str:
    """Start a process that imports torch and forks itself; return its address.

    It ends with this process.
    """
    owner, folder = os.getpid(), tempfile.mkdtemp(prefix="pycomm-server-")
    address = f"{folder}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(listener.fileno())],
            env={**os.environ, **SINGLE, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
        )

    def end() -> None:
        if os.getpid() == owner:  # and no fork of it
            with suppress(subprocess.TimeoutExpired):
                server.communicate(timeout=30)  # closes its stdin
            shutil.rmtree(folder, ignore_errors=True)  # the server has, unless it was interrupted

    atexit.register(end)
    return address


def as_python(folder: Path) -> dict[str, str]:
    """Return variables of programs that start Python processes, which import no torch: that of
    the server is theirs; see as_python.py.

    Args:
        folder: for the program that is `sys.executable` in them, and whose path EXECUTABLE has.
    """
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {AS_PYTHON} "$@"\n')
    program.chmod(0o755)
    _server()
    return {EXECUTABLE: str(program), SHARED: os.environ.get(SHARED) or _own[os.getpid()]}


def start_with(monkeypatch: Any, variables: Mapping[str, str]) -> None:
    """Let what this process starts by `sys.executable` have the variables of `as_python`."""
    monkeypatch.setattr(sys, "executable", variables[EXECUTABLE])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


_own: dict[int, str] = {}
_connections: dict[int, socket.socket] = {}


def _server() -> socket.socket:
    """Return this process's connection to the server, which is started if no other has."""
    process = os.getpid()
    if process not in _connections:
        address = os.environ.get(SHARED) or _own.get(process)
        if address is None:
            address = _own[process] = start_server()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        _connections[process] = connection
    return _connections[process]
