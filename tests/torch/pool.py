"""A pool of torch processes that lives as long as the test session.

Each test sends the ranks a function, which runs on every rank in a new process group.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.torch.interpreter import ROOT, Interpreter

RANKS = 4
RANK = "import os; from tests.torch import pool; pool.serve(int(os.environ['PASSED_FDS']))"


@dataclass
class Job:
    """A task of one rank."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    ranks: int
    backend: str | None  # None: the function makes its own group in `store`
    store: str
    timeout: float


def _work(job: Job) -> Any:
    import torch.distributed as dist

    store = dist.FileStore(job.store, job.ranks)
    if job.backend is None:
        return job.function(job.rank, job.ranks, store, *job.args)
    dist.init_process_group(
        job.backend,
        store=store,
        rank=job.rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=job.timeout),
    )
    try:
        return job.function(job.rank, job.ranks, *job.args)
    finally:
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
            answer = (True, _work(job))
        except BaseException:
            answer = (False, traceback.format_exc())
            # A job that made its own group may have left it, and the next job makes another.
            with suppress(Exception):
                torch.distributed.destroy_process_group()
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
            backend: the default group's; None: the function gets the store as its third argument.
            timeout: the group's timeout, in seconds.
            deadline: seconds after which a rank without an answer counts as hung.
            dies: ranks that end their processes; their result is None.
        """
        self._start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(ranks):
                job = Job(function, args, rank, ranks, backend, store, timeout)
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
        """End all processes; the next run starts new ones.

        Ranks that wait for a job end by themselves, and so write what a coverage run counts.
        """
        ended, self._ranks = self._ranks, []
        for _, link in ended:
            link.close()
        for process, _ in ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.kill()
            process.wait(10)
