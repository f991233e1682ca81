"""Faults while the members of a group change: a process joins, comes back, or all form anew.

The group is one of pycomm for torch.distributed, made with `enable_reconfigure`.
"""

from __future__ import annotations

import gc
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.faults.injection.case import ELASTIC, Call
from tests.faults.injection.groups import Place, TorchGroup
from tests.faults.injection.rank import SETTLE, Rank, held, leaks, wait_for

NAME = "elastic"


class ElasticGroup(TorchGroup):
    """A process of a group without members; they are given by the numbers of their processes."""

    def __init__(self, place: Place) -> None:
        import torch
        import torch.distributed as dist

        from pycomm._build import load_c10d

        c10d = load_c10d()
        options = c10d.Options()
        options.enable_reconfigure, options.group_name = True, NAME
        options.transport, options._timeout = place.transport, timedelta(seconds=place.timeout)
        store = dist.HashStore()
        self.backend: Any = c10d.Backend(store, 0, 1, options, NAME)
        super().__init__(dist.ProcessGroup(store, 0, 1))
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._group._set_default_backend(kind)
        self._group._register_backend(torch.device("cpu"), kind, self.backend)
        self._folder = Path(place.folder)
        self._process = place.rank

    def publish(self) -> None:
        """Let the other processes read this one's handle."""
        unfinished = self._folder / f"unfinished.{self._process}"
        unfinished.write_text(self.backend.handle())
        unfinished.rename(self._folder / f"handle.{self._process}")

    def _handle(self, process: int) -> str:
        file = self._folder / f"handle.{process}"
        wait_for(file)
        return file.read_text()

    def form(self, uuid: int, processes: list[int], seconds: float) -> None:
        """Form the group of these processes."""
        from pycomm import elastic

        alone = processes == [self._process]
        handles = [self.backend.handle()] if alone else [self._handle(p) for p in processes]
        self.backend.form(uuid, handles, timedelta(seconds=seconds))
        elastic.fit(self._group, self.backend)
        self.rank, self.ranks = processes.index(self._process), len(processes)
        self.completed = 0

    def set_timeout(self, seconds: float) -> None:
        self.backend.set_timeout(timedelta(seconds=seconds))

    def abort(self, reason: str) -> None:
        self.backend.abort()

    def close(self) -> None:
        self.backend.shutdown()


class ElasticRank(Rank):
    """A process of a case whose phase is one of `ELASTIC`."""

    def main(self) -> None:
        """Play the case and report its outcome."""
        case, everyone = self.case, list(range(self.case.ranks))
        place = Place(self.folder, "", self.rank, case.ranks, case.transport, case.timeout)
        first = everyone if case.phase == "reconfigure" else everyone[:-1]
        assert case.phase in ELASTIC
        self._warm_up(place)
        before = held()
        facts: dict[str, Any] = {}
        group = self.group = ElasticGroup(place)
        group.publish()
        try:
            if case.phase == "rejoin":
                group.form(1, everyone, 8.0)
                self.run(Call("all_reduce", 10))
            if self.rank in first:
                group.form(2, first, 8.0)
                self.run(Call("all_reduce", 10))
            group.set_timeout(case.timeout)
            self.say("ready", at=time.monotonic())
            self.arm()
            group.form(3, everyone, case.rendezvous)
            self.operate()
        except Exception as error:
            facts = self.tell(error)
        self.say("over", at=time.monotonic(), **facts)
        left = [r for r in everyone if r not in case.leavers]
        if self.rank in left:  # the group that had the error is formed anew
            group.set_timeout(8.0)
            group.form(4, left, 8.0)
            if not group.call(Call("all_reduce", 1000), False):
                raise AssertionError("the new members' result is wrong")
        group.close()
        self.group = group = None  # type: ignore[assignment]
        gc.collect()
        self.say("left", leaks=leaks(before, SETTLE))

    def _warm_up(self, place: Place) -> None:
        """Start what torch and pycomm keep for the life of a process, and no threads of OpenMP."""
        import torch

        torch.set_num_threads(1)
        alone = ElasticGroup(place)  # not published: others would take its handle
        alone.form(1, [self.rank], 8.0)
        alone.call(Call("all_reduce", 10), True)
        alone.close()
