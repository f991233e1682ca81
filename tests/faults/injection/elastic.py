"""Faults while the members of a group change: a process joins, comes back, or all form anew."""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import pycomm
from pycomm import elastic
from tests.faults.injection.case import Call
from tests.faults.injection.groups import TorchGroup
from tests.faults.injection.rank import SETTLE, Rank, held, leaks


def found(timeout: timedelta, **options: object) -> str:
    """Make an elastic group, without members, torch's default; return this process's handle."""
    dist.init_process_group(
        "pycomm",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=timeout,
        pg_options=pycomm.Options(enable_reconfigure=True, **options),
    )
    return elastic.handle()


class ElasticRank(Rank):
    """A process of a case whose phase is one of `ELASTIC`."""

    def meet(self) -> str:
        """Return the handle of this process, which the others need to form a group with it."""
        torch.set_num_threads(1)
        self._found()  # starts what torch and pycomm keep for the life of a process
        self.form(1, [elastic.handle()])
        dist.destroy_process_group()
        self.before = held()
        return self._found()

    def _found(self) -> str:
        return found(timedelta(seconds=self.case.timeout), transport=self.case.transport)

    def form(self, uuid: int, handles: list[str], seconds: float = 8.0) -> None:
        """Form the group of these processes, and use it."""
        elastic.reconfigure(uuid, handles, timeout=timedelta(seconds=seconds))
        self.group = TorchGroup(dist.group.WORLD)
        self.run(Call("all_reduce", 10))

    def operate(self, handles: list[str]) -> None:
        """Form the group of all, and call operations until the fault."""
        facts: dict[str, Any] = {}
        self.arm()
        try:
            self.form(3, handles, self.case.rendezvous)
            self.call()
        except Exception as error:
            facts = self.tell(error)
        self.say("over", {"at": time.monotonic(), **facts})

    def go_on(self, left: list[int], handles: list[str]) -> None:
        """Form the group of the survivors anew."""
        TorchGroup(dist.group.WORLD).set_timeout(8.0)
        self.form(4, handles)
        dist.destroy_process_group()
        self.group = None
        gc.collect()
        self.say("left", leaks(self.before, SETTLE))
