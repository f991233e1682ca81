"""A process of an elastic group, as the tests of this folder use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import pycomm
from pycomm import elastic
from tests.torch.pool import OfRank, on_ranks

LIMIT = timedelta(seconds=20)


class Member:
    """A process of an elastic group that has no members yet, and the store that its test uses."""

    def __init__(self, rank: int, size: int, store: Any, **options: Any) -> None:
        self.rank, self.size, self.store = rank, size, store
        store.set_timeout(2 * LIMIT)
        options = pycomm.Options(enable_reconfigure=True, **options)
        dist.init_process_group(
            "pycomm", store=store, rank=rank, world_size=size, pg_options=options, timeout=LIMIT
        )
        self.backend = pycomm.backend.find()
        assert self.backend is not None

    def handles(self, topic: str) -> list[str]:
        self.store.set(f"{topic} {self.rank}", elastic.handle())
        return [self.store.get(f"{topic} {r}").decode() for r in range(self.size)]

    def meet(self, topic: str) -> None:
        self.store.set(f"{topic} {self.rank}", "here")
        for rank in range(self.size):
            self.store.get(f"{topic} {rank}")

    def form(self, uuid: int, handles: list[str]) -> None:
        elastic.reconfigure(uuid, handles, timeout=LIMIT)
        assert dist.get_world_size() == len(handles)
        assert handles[dist.get_rank()] == elastic.handle()


def run(rank: int, size: int, store: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on every process; the group, whatever has become of it, ends after it."""
    try:
        return function(rank, size, store, *args)
    finally:
        dist.destroy_process_group()


def on_members(ranks: int = 2, **options: Any) -> Callable[[OfRank], OfRank]:
    """Make a test of a function as `on_ranks` does; `run` ends the group that it forms."""

    def decorate(function: OfRank) -> OfRank:
        @functools.wraps(function)
        def ended(rank: int, size: int, store: Any, *args: Any) -> Any:
            return run(rank, size, store, function, *args)

        return on_ranks(ranks, backend=None, **options)(ended)

    return decorate
