"""A process of an elastic group, as the tests of this folder use it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import pycomm
from pycomm import elastic
from tests.torch.harness import check_sum
from tests.torch.pool import OfRank, on_ranks

LIMIT = timedelta(seconds=20)


def until_lost() -> None:
    while True:
        dist.barrier()


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


def on_members(
    ranks: int = 2,
    formed: bool = True,
    then: Callable[[list[Any]], None] | None = None,
    **options: Any,
) -> Callable[[OfRank], OfRank]:
    """Make a test of a function of the processes of an elastic group, as `on_ranks` does.

    The function names what it needs: `member`, `handles` (of all processes), `rank`, `size`,
    `store`, and what its marks give, of which `transport` is the group's.

    Args:
        formed: the group has all processes as members when the function begins, in uuid 1.
        then, options: those of `on_ranks`.
    """

    def decorate(function: OfRank) -> OfRank:
        ours = ["rank", "size", "store", "member", "handles"]
        named = list(inspect.signature(function).parameters)
        marked = [name for name in named if name not in ours]

        @functools.wraps(function)
        def of_member(rank: int, size: int, store: Any, *args: Any) -> Any:
            given = dict(zip(marked, args, strict=True))
            of_group = {name: given[name] for name in ("transport",) if name in given}
            member = Member(rank, size, store, **of_group)
            handles = member.handles("all")
            if formed:
                member.form(1, handles)
                check_sum()
            values = dict(zip(ours, (rank, size, store, member, handles), strict=True))
            return function(**given, **{name: values[name] for name in named if name in ours})

        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        of_member.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, keyword) for name in (*ours[:3], *marked)]
        )
        return on_ranks(ranks, then, backend=None, **options)(of_member)

    return decorate
