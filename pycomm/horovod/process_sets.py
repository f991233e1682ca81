"""Horovod's process sets: groups of ranks, each with the collectives of the whole job."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from pycomm.errors import Error


class ProcessSet:
    """A set of ranks; `init` or `add_process_set` makes its group.

    Args:
        ranks: numbers of ranks among all ranks, in any order.

    Raises:
        ValueError: an entry is no number.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet takes a list of ranks, not {ranks!r}")
        self.ranks: list[int] = sorted(ranks)
        self.process_set_id: int | None = None
        """A number that all ranks have in common; None: there is no group."""
        self.group: dist.ProcessGroup | None = None
        """Its group, on the ranks that it includes."""

    def included(self) -> bool:
        """Return whether this rank is one of them."""
        return dist.get_rank() in self.ranks

    def size(self) -> int | None:
        """Return the number of ranks; None: there is no group."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this rank's place in the set; None: there is no group, or it is not included."""
        there = self.process_set_id is not None and self.included()
        return self.ranks.index(dist.get_rank()) if there else None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
"""All ranks."""

_sets: list[ProcessSet] = []
_made = 0


def begin(sets: Sequence[ProcessSet]) -> None:
    """Make the groups of a job that begins; collective."""
    end()
    global_process_set.ranks = list(range(dist.get_world_size()))
    _note(global_process_set, 0, dist.group.WORLD)
    for process_set in sets:
        add_process_set(process_set)


def _note(process_set: ProcessSet, number: int, group: dist.ProcessGroup | None) -> None:
    process_set.process_set_id, process_set.group = number, group
    _sets.append(process_set)


def end() -> None:
    """Forget the groups of a job that has ended."""
    for process_set in _sets:
        process_set.process_set_id = process_set.group = None
    _sets.clear()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make the group of a set of ranks, and return the set; all ranks of the job call it.

    Raises:
        ValueError: there is a set of these ranks, or a rank that the job does not have.
        Error: `init` was not called.
    """
    global _made
    check_made(global_process_set)
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks, everyone = process_set.ranks, global_process_set.ranks
    if any(ranks == other.ranks for other in _sets):
        raise ValueError(f"there is a process set of the ranks {ranks} already")
    if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(everyone):
        raise ValueError(
            f"a process set has ranks from 0 to {len(everyone) - 1}, each once, not {ranks}"
        )
    group = dist.new_group(ranks)
    _made += 1
    _note(process_set, _made, group if process_set.included() else None)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """End the group of a set; all ranks of the job call it. Return whether there was one."""
    if not process_set.process_set_id:  # all ranks have number 0
        return False
    _sets.remove(process_set)
    group, process_set.group, process_set.process_set_id = process_set.group, None, None
    if group is not None:
        dist.destroy_process_group(group)
    return True


def check_made(process_set: ProcessSet) -> None:
    """Check that a set has a group.

    Raises:
        Error: it has none; on all ranks.
    """
    if process_set.process_set_id is None:
        made = "hvd.init()" if process_set is global_process_set else "hvd.add_process_set()"
        raise Error(f"{process_set} has no group: call {made} first")


def group_of(process_set: ProcessSet) -> dist.ProcessGroup:
    """Return the group of a set that includes this rank.

    Raises:
        Error: there is none, or this rank is not included.
    """
    check_made(process_set)
    if process_set.group is None:
        raise Error(f"rank {dist.get_rank()} is not in {process_set}, and cannot call for it")
    return process_set.group
