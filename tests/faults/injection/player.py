"""Processes that are led by words, with a deadline for every answer.

A word is a method of the rank that a process has, called in all processes at once. What it returns,
or the text of what it raised, is the answer. A rank may say other words meanwhile.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

CORE = 4 << 20
"""Maximum bytes of a core dump."""
DUMPING = (signal.SIGSEGV, signal.SIGABRT, signal.SIGQUIT, signal.SIGBUS, signal.SIGFPE)
AFTER_A_FAILURE = 5.0
"""Seconds in which other processes have answered when one has failed."""


class Broken(AssertionError):
    """A process raised, died without being told to, or has not answered in time."""


class Player:
    """The processes, by their numbers.

    Args:
        make: makes a process's rank, within it, of its number and of what it says things with.
        folder: where the processes write what they print, and dump core.
        limit: seconds in which each word is answered.
    """

    def __init__(
        self, make: Callable[[int, Callable[[str, Any], None]], Any], folder: Path, limit: float
    ) -> None:
        self._make, self._folder, self._limit = make, folder, limit
        self._children: dict[int, tuple[int, Connection]] = {}
        self._scheduled: tuple[float, Callable[[], None]] | None = None
        self.said: dict[int, dict[str, Any]] = {}
        """what came with the last of each word, by process"""

    @property
    def numbers(self) -> list[int]:
        return list(self._children)

    def start(self, number: int) -> None:
        here, there = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            for link in (here, *(link for _, link in self._children.values())):
                link.close()  # so that a process ends when this one has
            self._serve(number, there)
        there.close()
        self._children[number], self.said[number] = (pid, here), {}

    def kill(self, number: int, signal: int) -> None:
        os.kill(self._children[number][0], signal)  # not reaped yet, so the pid is still ours

    def bury(self, number: int) -> None:
        """End a process, which may have ended."""
        self.kill(number, signal.SIGKILL)
        pid, link = self._children.pop(number)
        os.waitpid(pid, 0)
        link.close()

    def stop(self) -> None:
        """End all processes."""
        for number in self.numbers:
            self.bury(number)

    def schedule(self, delay: float, act: Callable[[], None]) -> None:
        """Do this in so many seconds, if answers are waited for then."""
        self._scheduled = (time.monotonic() + delay, act)

    def tell(
        self, word: str, *args: Any, to: Iterable[int] | None = None, dies: Collection[int] = ()
    ) -> dict[int, Any]:
        """Say a word to all processes, or some; return the answers of those that do not die."""
        to = self.numbers if to is None else list(to)
        self.send(word, *args, to=to)
        return self.gather(word, [number for number in to if number not in dies])

    def send(self, word: str, *args: Any, to: Iterable[int] | None = None) -> None:
        for number in self.numbers if to is None else to:
            self.said[number].pop(word, None)
            with suppress(OSError):  # it has died
                self._children[number][1].send((word, args))

    def gather(self, word: str, numbers: Collection[int]) -> dict[int, Any]:
        """Wait until these processes have said a word; return what came with it.

        Raises:
            Broken: one raised, died, or has not said it in time.
        """
        links = {link: number for number, (_, link) in self._children.items()}
        waited = {number for number in numbers if word not in self.said[number]}
        failed: list[str] = []
        end = time.monotonic() + self._limit
        while waited and (now := time.monotonic()) < end:
            until = end
            if self._scheduled is not None:
                at, act = self._scheduled
                if now >= at:
                    self._scheduled = None
                    act()
                    continue
                until = min(at, end)
            for link in wait(list(links), until - now):
                assert isinstance(link, Connection)
                number = links[link]
                try:
                    what, answer = link.recv()
                except (EOFError, OSError):
                    del links[link]
                    what, answer = "broken", "it died"
                self.said[number][what] = answer
                if what == "broken" and number in waited:
                    failed.append(f"process {number}: {answer}")
                    end = min(end, time.monotonic() + AFTER_A_FAILURE)
                if what in (word, "broken"):
                    waited.discard(number)
        if waited:
            failed.append(self._stacks(sorted(waited)))
        if failed:
            raise Broken("\n".join(failed))
        return {number: self.said[number][word] for number in numbers}

    def _log(self, number: int) -> Path:
        return self._folder / f"process{number}.log"

    def _stacks(self, numbers: Iterable[int]) -> str:
        text = ""
        for number in numbers:
            self.kill(number, signal.SIGUSR1)
            time.sleep(0.5)
            text += f"process {number} has not answered:\n{self._log(number).read_text()}\n"
        return text

    def _serve(self, number: int, link: Connection) -> NoReturn:
        """Do what is said, until nobody is there to say it."""
        gc.freeze()  # ranks look for what is left behind, again and again
        log = self._log(number).open("w")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        os.chdir(self._folder)  # for core dumps, which are removed with it
        limit_core_dumps()
        for dumping in DUMPING:  # a shell may have set some to be ignored
            signal.signal(dumping, signal.SIG_DFL)
        lock = threading.Lock()

        def say(word: str, facts: Any = None) -> None:
            with lock:
                link.send((word, facts))

        code = 0
        try:
            rank = self._make(number, say)
            while True:
                word, args = link.recv()
                try:
                    say(word, getattr(rank, word)(*args))
                except Exception:
                    say("broken", traceback.format_exc())
        except EOFError:
            pass
        except SystemExit:
            code = 3
        except BaseException:
            code = 1
            traceback.print_exc()
        log.flush()
        os._exit(code)


def limit_core_dumps() -> None:
    """Limit this process's core dumps to a small size; disable them if they go to a program."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    size = 0 if pattern.startswith("|") else CORE
    resource.setrlimit(resource.RLIMIT_CORE, (size, size))
