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
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
NOTHING: Mapping[str, str] = {}
PRELOADED = "torch.distributed.fsdp, torch._dynamo, torch.distributed.checkpoint"
# One thread, since a fork copies none: the libraries that torch loads start theirs at import.
SINGLE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SERVER = f"""
import gc, sys
sys.path[0] = {str(ROOT)!r}
gc.disable()
import torch, {PRELOADED}
from tests.torch.interpreter import serve
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
        given = _environment(env, variables), str(cwd or os.getcwd())
        wish = Command(list(command), *given, autoload, finalized)
        self._link = wish.forked(self._out.fileno(), self._err.fileno(), *fds)
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

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

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
    *command: str,
    words: Sequence[str] = (),
    of_rank: Sequence[Mapping[str, str]] = (NOTHING, NOTHING),
    timeout: float = 120.0,
    **options: Any,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python COMMAND RANK WORDS` on two ranks at once, to their ends; each has variables."""
    ranks = [
        Interpreter(*command, str(rank), *words, variables=own, **options)
        for rank, own in enumerate(of_rank)
    ]
    said = [rank.communicate(timeout) for rank in ranks]
    return [
        subprocess.CompletedProcess(rank.args, rank.wait(), *texts)
        for rank, texts in zip(ranks, said, strict=True)
    ]


def launch(
    *command: str, folder: Path, ranks: int = 2, script: str = "", **environment: str
) -> str:
    """Run a command on ranks with torchrun's variables; return their output of both streams.

    A script is in the folder as script.py.

    The ranks are finalized as users' scripts are, which may leave their groups as they are.
    """
    if script:
        (folder / "script.py").write_text(script)
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


def torchrun(*command: str, folder: Path, **environment: str) -> str:
    """Run a script, behind options, on two ranks of torchrun; return their output of both streams.

    Its ranks are interpreters of their own, as users' are.
    """
    done = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command),
        variables={"OMP_NUM_THREADS": "1", **environment},
        cwd=folder,
        merged=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def with_entry_point(folder: Path, point: str = "entry = pycomm._autoload:register") -> Path:
    """Return a folder, in which torch finds an entry point then, as after an installation."""
    info = folder / "entry-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{point}\n")
    return folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _read(file: Any) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


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


# --------------------------------------------------------------------------------------- the server
# The process that has imported torch, and forks itself for each process that a test starts. Each
# process has a keeper, which waits for its end and tells its exit status, or kills it when the test
# that started it is gone. The server itself waits for nothing.


LIMIT = 16  # descriptors with one request


@dataclass
class Command:
    """What follows `python`, with the surroundings in which it runs."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    autoload: bool
    finalized: bool

    def forked(self, *fds: int) -> socket.socket:
        """Let the server fork a process for it, with these as stdout, stderr and what is passed on.

        What comes by the socket is the process's id, and its status when it has ended. Closing the
        socket kills the process.
        """
        link, there = socket.socketpair()
        with there, tempfile.TemporaryFile() as letter:  # a datagram would limit the environment
            letter.write(json.dumps(vars(self)).encode())
            letter.flush()
            socket.send_fds(_server(), [b"x"], [letter.fileno(), there.fileno(), *fds])
        return link

    def prepare(self) -> None:
        """Make this process the one that `python` would have started."""
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.cwd)
        kind, *rest = self.words
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            first = ""
        elif kind == "-m":
            sys.argv = ["-m", *rest[1:]]
            first = os.getcwd()
        else:
            sys.argv = list(self.words)
            first = str(Path(kind).resolve().parent)
        path = [p for p in self.env.get("PYTHONPATH", "").split(os.pathsep) if p]
        sys.path[:0] = [first, *path]
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        if self.autoload:
            import torch

            torch._import_device_backends()

    def code(self) -> Any:
        """Return what `__main__` runs."""
        kind, *rest = self.words
        if kind == "-c":
            return compile(rest[0], "<string>", "exec")
        how = "run_module({!r}, run_name='__main__', alter_sys=True)"
        if kind != "-m":
            how = "run_path({!r}, run_name='__main__')"
        target = rest[0] if kind == "-m" else kind
        return compile(f"import runpy; runpy.{how.format(target)}", "<forked>", "exec")

    def run(self, names: dict[str, Any]) -> NoReturn:
        """Run the code, and end the process as `python` does but for what it destroys."""
        status: Any = 0
        try:
            exec(self.code(), names)
        except SystemExit as end:
            status = end.code
        except KeyboardInterrupt:
            raise  # Python ends by the signal
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit((status or 0) & 0xFF)


def serve(fd: int) -> Command:
    """Fork for each request; return in the forked process, with what it is to run.

    Requests come through connections to the listening socket `fd`, until stdin is closed.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    listener = socket.socket(fileno=fd)
    clients: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([0, listener, *clients], [], [])
        if 0 in ready:
            shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
            os._exit(0)
        if listener in ready:
            clients.append(listener.accept()[0])
        for client in [client for client in clients if client in ready]:
            byte, fds, _, _ = socket.recv_fds(client, 1, LIMIT)
            if not byte:
                clients.remove(client)
                client.close()
                continue
            if os.fork() == 0:
                for each in (listener, *clients):
                    each.close()
                nothing = os.open(os.devnull, os.O_RDONLY)  # in place of the owner's pipe
                os.dup2(nothing, 0)
                os.close(nothing)
                return _keep(*fds)
            for each in fds:
                os.close(each)


def _keep(letter: int, link: int, out: int, err: int, *passed: int) -> Command:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = Command(**json.loads(os.pread(letter, os.fstat(letter).st_size, 0)))
    os.close(letter)
    process = os.fork()
    if process == 0:
        os.close(link)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for each in {out, err} - {1, 2}:
            os.close(each)
        command.env["PASSED_FDS"] = ",".join(map(str, passed))
        return command
    for each in {out, err, *passed}:
        os.close(each)
    os.write(link, str(process).encode().ljust(16))
    lives = os.pidfd_open(process)
    ready, _, _ = select.select([lives, link], [], [])
    if lives not in ready:  # the test is gone
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(BrokenPipeError):
        os.write(link, str(os.waitstatus_to_exitcode(status)).encode().ljust(16))
    os._exit(0)
