"""The process that has imported torch, and forks itself for each process that a test starts.

Each process has a keeper, which waits for its end and tells its exit status, or kills it when the
test that started it is gone. The server itself waits for nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

LIMIT = 16  # descriptors with one request


@dataclass
class Command:
    """What follows `python`, with the surroundings in which it runs."""

    words: list[str]
    env: dict[str, str]
    cwd: str
    autoload: bool
    finalized: bool

    def prepare(self) -> None:
        """Make this process the one that `python` would have started."""
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.cwd)
        sys.executable = self.env.get("TESTS_PYTHON", sys.executable)
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
    wish = json.loads(os.pread(letter, os.fstat(letter).st_size, 0))
    os.close(letter)
    process = os.fork()
    if process == 0:
        os.close(link)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for each in {out, err} - {1, 2}:
            os.close(each)
        env = wish["env"] | {"PASSED_FDS": ",".join(map(str, passed))}
        return Command(wish["command"], env, wish["cwd"], wish["autoload"], wish["finalized"])
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
