"""A pool of torch processes that lives as long as the test session.

Each test sends the ranks a function, which runs on every rank in a new process group.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import logging
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.torch.interpreter import ROOT, Interpreter

OfRank = Callable[..., Any]
RANKS = 4
PATIENT = {"timeout": 60, "deadline": 180}  # options of a run on a busy machine
RANK = "import os; from tests.torch import pool; pool.serve(int(os.environ['PASSED_FDS']))"


def _work(
    function: OfRank, args: Any, rank: int, ranks: int, backend: str | None, file: str, limit: float
) -> Any:
    """Do the job of a rank; without a backend the function may make a group in the store."""
    import torch.distributed as dist

    store = dist.FileStore(file, ranks)
    if backend is None:
        args = (store, *args)
    else:
        how = {"store": store, "rank": rank, "world_size": ranks}
        dist.init_process_group(backend, timeout=timedelta(seconds=limit), **how)
    try:
        return function(rank, ranks, *args)
    finally:  # or the group that the function has made, since the next job makes another
        if dist.is_initialized():
            dist.destroy_process_group()


def _forget() -> None:
    """Undo what a job may have left in its process, and what the next job would see."""
    from torch.distributed import distributed_c10d

    # torch names a default group by a count of groups, which only a destroyed default group
    # resets. A job whose group failed on one rank alone would give the next group two names.
    distributed_c10d._world.group_count = 0
    logging.getLogger("pycomm").setLevel(logging.NOTSET)


def serve(descriptor: int) -> None:
    """Run the jobs that come through a pipe, until it is closed."""
    import torch

    # Tensors in answers are descriptors, which the receiver fetches with this key.
    current_process().authkey = bytes.fromhex(os.environ["POOL_KEY"])
    link = Connection(descriptor)

    importlib.import_module("pycomm.backend")  # registers the name where pycomm is not installed

    torch.set_num_threads(1)
    gc.freeze()
    while True:
        try:
            job = link.recv()
        except EOFError:
            return
        try:
            answer = (True, _work(*job))
        except BaseException:
            answer = (False, traceback.format_exc())
        _forget()
        link.send(answer)


class RankFailed(AssertionError):
    """A rank raised; the text holds every rank's traceback."""


class Pool:
    """Up to `RANKS` ranks that run functions together."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Interpreter, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int = 2,
        backend: str | None = "pycomm",
        timeout: float = 20,
        deadline: float = 60,
        dies: Collection[int] = (),
    ) -> list[Any]:
        """Call ``function(rank, ranks, *args)`` on every rank and return the results.

        Args:
            function: a function of a test module.
            backend: the default group's; None: the function gets the store as its third argument,
                and need not destroy the group that it makes.
            timeout: the group's timeout, in seconds.
            deadline: seconds after which a rank without an answer counts as hung.
            dies: ranks that end their processes; their result is None.
        """
        self._start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(ranks):
                job = function, args, rank, ranks, backend, store, timeout
                self._ranks[rank][1].send(job)
            answers = [
                self._receive(rank, deadline) if rank not in dies else (True, None)
                for rank in range(ranks)
            ]
        if dies:
            self.stop()
        failed = [f"rank {r}:\n{text}" for r, (good, text) in enumerate(answers) if not good]
        if failed:
            raise RankFailed("\n".join(failed))
        return [value for _, value in answers]

    def _start(self, ranks: int) -> None:
        while len(self._ranks) < ranks:
            here, there = Pipe()
            key = current_process().authkey.hex()
            env = {**os.environ, "PYTHONPATH": str(ROOT), "POOL_KEY": key}
            process = Interpreter("-c", RANK, env=env, merged=True, fds=[there.fileno()])
            there.close()
            self._ranks.append((process, here))

    def _receive(self, rank: int, deadline: float) -> tuple[bool, Any]:
        process, link = self._ranks[rank]
        try:
            if link in wait([link], timeout=deadline):
                return link.recv()
            text = f"rank {rank} hangs: no answer within {deadline} s"
        except (EOFError, ConnectionResetError):
            text = f"rank {rank} died with exit code {process.wait(10)}"
        text += f"\n{process.output()[-4000:]}"
        self.stop()
        raise RankFailed(text)

    def stop(self) -> None:
        """End all processes; the next run starts new ones."""
        ended, self._ranks = self._ranks, []
        for _, link in ended:
            link.close()
        for process, _ in ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.kill()
            process.wait(10)


def on_ranks(
    ranks: int = 2,
    then: Callable[[list[Any]], None] | None = None,
    run: Callable[..., list[Any]] = Pool.run,
    *,
    fixture: str = "pool",
    marks: Collection[str] = ("ranks", "backend", "dies"),
    **options: Any,
) -> Callable[[OfRank], OfRank]:
    """Make a test of a function that runs on every rank of the pool, with ``(rank, ranks, ...)``.

    It stands above the marks of the function. Those named by ``marks`` are options of the run, and
    the function's further parameters come from them, too.

    Args:
        ranks: how many there are, unless a mark says so.
        then: is called with the results of all ranks.
        run: runs the function on a pool, and returns the results.
        fixture: the name of the pool's.
        options: of `Pool.run`. With ``backend=None`` the function's third parameter is the store.
    """

    def decorate(function: OfRank) -> OfRank:
        marked = {
            argument
            for mark in getattr(function, "pytestmark", [])
            if mark.name == "parametrize"
            for argument in _names(mark.args[0])
            if argument in marks
        }
        given = 3 if options.get("backend", "") is None else 2
        further = list(inspect.signature(function).parameters)[given:]

        def test(**values: Any) -> None:
            args = [values[name] for name in further]
            chosen = {"ranks": ranks, **options, **{name: values[name] for name in marked}}
            results = run(values[fixture], functools.partial(_of_test, *names), *args, **chosen)
            if then:
                then(results)

        names = function.__module__, function.__name__
        functools.update_wrapper(test, function)
        keyword = inspect.Parameter.KEYWORD_ONLY
        fixtures = [fixture, *dict.fromkeys([*further, *sorted(marked)])]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword) for name in fixtures]
        )
        return test

    return decorate


def _names(names: str | Collection[str]) -> Collection[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else names


def _of_test(module: str, name: str, *args: Any) -> Any:
    """Run a test's function on a rank: it is not sent by its name, which is the test's."""
    return getattr(importlib.import_module(module), name).__wrapped__(*args)
