"""Leads processes through cycles, with a deadline for every word, and looks at what they hold."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.soak.held import Sample, held
from tests.soak.rank import serve
from tests.soak.schedule import RANKS, Event, GroupSetup, draw, draw_joins

DEADLINE = 150.0
"""Seconds in which every rank has answered, on a machine that others use."""
LEARNED = 0.8
"""The last loss of a cycle is below this share of the first. It falls to 0.4 as a rule."""


class Broken(AssertionError):
    """A promise was not kept."""


class Director:
    """The processes, and what has come of the run so far."""

    def __init__(self, folder: str, every: float, joins: bool = False) -> None:
        self._folder, self._every = Path(folder), every
        self._draw = draw_joins if joins else draw
        self._handles: dict[int, str] = {}  # of the members of an elastic group
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.soak.rank"])  # imports torch once
        self._processes: dict[int, tuple[BaseProcess, Connection]] = {}
        self._store: dist.TCPStore | None = None
        self._due = time.monotonic() + every
        self._setups = 0
        self.cycle = self.events = self.restarts = self.steps = 0
        self.doing = "nothing"
        self.losses: list[float] = []
        self.samples: list[Sample] = []
        self.seen: dict[str, int] = {}
        """events by name"""

    # ------------------------------------------------------------------ processes

    def _logs(self, process: int) -> Path:
        return self._folder / f"process{process}.log"

    def _start_missing(self) -> None:
        for process in range(RANKS):
            if process in self._processes:
                continue
            here, there = self._context.Pipe()
            child = self._context.Process(
                target=serve, args=(process, there, str(self._logs(process))), daemon=True
            )
            child.start()
            there.close()
            self._processes[process] = (child, here)
            self.restarts += self.cycle > 0

    def stop(self) -> None:
        """End all processes."""
        for process in list(self._processes):
            self._bury(process, kill=True)

    def _bury(self, process: int, kill: bool = False) -> None:
        child, link = self._processes.pop(process)
        if kill:
            child.kill()
        child.join(DEADLINE)
        child.close()
        link.close()

    def _tell(
        self,
        word: str,
        *args: Any,
        dies: int | None = None,
        to: Iterable[int] | None = None,
    ) -> dict[int, Any]:
        """Say a word to all processes, or some, and wait for their answers.

        Raises:
            Broken: one raised, died without being told to, or has not answered in time.
        """
        waited = {self._processes[one][1]: one for one in (self._processes if to is None else to)}
        for link in waited:
            link.send((word, args))
        answers: dict[int, Any] = {}
        failed: list[str] = []
        end = time.monotonic() + DEADLINE
        while waited:
            now = time.monotonic()
            if now >= self._due:
                self._look(now)
            if now >= end or (failed and now >= end - DEADLINE + 5):
                break
            for link in wait(list(waited), timeout=min(0.5, end - now)):
                assert isinstance(link, Connection)
                process = waited.pop(link)
                try:
                    good, answer = link.recv()
                except EOFError:
                    if process != dies:
                        failed.append(f"process {process} died")
                    continue
                if good:
                    answers[process] = answer
                else:
                    failed.append(f"process {process}:\n{answer}")
        if waited:
            failed.append(self._stacks(sorted(waited.values())))
        if failed:
            raise Broken("\n".join(failed))
        if dies is not None:
            self._bury(dies)
        return answers

    def _stacks(self, processes: Iterable[int]) -> str:
        text = ""
        for process in processes:
            pid = self._processes[process][0].pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            text += f"process {process} has not answered:\n{self._logs(process).read_text()}\n"
        return text

    # ------------------------------------------------------------------ samples

    def _look(self, now: float) -> None:
        self._due = now + self._every
        for process, (child, _) in self._processes.items():
            try:
                what = held(child.pid or 0)
            except OSError:  # it has just been killed
                continue
            self.samples.append(Sample(self.events, process, False, what))

    # ------------------------------------------------------------------ cycles

    def play(self, seed: int, number: int) -> None:
        """Play a cycle from its start to its end, where no group is left."""
        self.cycle = number
        self._first = self._last = 0.0
        for place, event in enumerate(self._draw(seed, number)):
            self.doing = f"event {place}: {event}"
            self._happen(event)
            self.events += 1
            self.seen[event.what] = self.seen.get(event.what, 0) + 1
        self.doing = "the end"
        self._tell("leave")
        self._store = None
        if not self._last < LEARNED * self._first:  # NaN too
            raise Broken(f"the loss was {self._first:.3f} at first and {self._last:.3f} at last")
        self.losses.append(self._last / self._first)
        for process, what in self._tell("rest").items():
            self.samples.append(Sample(self.events, process, True, what))

    def _happen(self, event: Event) -> None:
        if event.what == "start":
            self._start_missing()
            self._join(event.setup)
            self._tell("begin", event.seed)
            self._wrap(event.codec)
        elif event.what in ("found", "quit", "die", "return"):
            self._change_members(event)
            self._compare(self._tell("train", event.steps, to=self._handles))
            return
        elif event.what == "restart":
            self._restart(event)
        elif event.what == "codec":
            self._wrap(event.codec)
        elif event.what == "kill":
            self._tell("kill", event, dies=event.process)
        elif event.what == "cut":
            self._compare(self._tell("cut", event))
        else:
            self._tell(event.what, event)
            if event.what == "abort":
                self._join(event.setup)
                self._wrap(self._codec)
        self._compare(self._tell("train", event.steps))

    def _wrap(self, codec: str) -> None:
        self._codec = codec
        self._tell("wrap", codec)

    def _change_members(self, event: Event) -> None:
        """Members of an elastic group come or go."""
        codec = event.codec if event.what == "found" else self._codec
        if event.what == "found":
            self._start_missing()
            self._codec, self._transport = codec, event.setup.transport if event.setup else ""
            self._handles = self._tell("found", event.setup)
            self._form(event)
            self._tell("begin", event.seed)
            self._tell("wrap", codec)
        elif event.what == "quit":
            self._tell("leave", to=[event.process])
            del self._handles[event.process]
            self._form(event)  # a member that leaves needs nothing else
        elif event.what == "die":
            self._tell("die", event, dies=event.process)
            del self._handles[event.process]
            self._form(event)
            self._tell("wrap", codec)
        else:
            self._start_missing()
            self._handles |= self._tell("found", event.setup, to=[event.process])
            self._form(event)
            if len(set(self._tell("hand_over", event).values())) != 1:
                raise Broken("a hand-over has left members with different states")
            self._tell("wrap", codec, True)

    def _form(self, event: Event) -> None:
        self._setups += 1
        order = event.setup.order if event.setup else sorted(self._handles)
        handles = [self._handles[process] for process in order]
        described = self._tell("form", self._setups, handles, to=self._handles)
        if not all(self._transport in text for text in described.values()):
            raise Broken(f"a group over {self._transport} is {described}")

    def _restart(self, event: Event) -> None:
        """From a checkpoint of those that are left, with as many as at the start."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            self._tell("save", folder)
            left = len(self._processes)
            self._tell("leave")
            self._start_missing()
            self._join(event.setup)
            self._tell("begin", event.seed)
            self._tell("load", folder, left)

    def _join(self, setup: GroupSetup | None) -> None:
        assert setup is not None
        self._setups += 1
        self._store = None
        address = str(self._folder / f"store{self._setups}")
        if setup.store == "tcp":
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            address = str(self._store.port)
        described = self._tell("join", setup, address)
        if not all(setup.transport in text for text in described.values()):
            raise Broken(f"a group over {setup.transport} is {described}")

    def _compare(self, trained: dict[int, dict[str, Any]]) -> None:
        """All ranks have the same parameters, to the bit."""
        if len({each["parameters"] for each in trained.values()}) != 1:
            raise Broken(f"parameters differ between processes: {trained}")
        self.steps += sum(each["steps"] for each in trained.values())
        self._last = sum(each["loss"] for each in trained.values()) / len(trained)
        self._first = self._first or self._last
