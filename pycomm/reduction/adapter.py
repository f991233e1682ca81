"""Adapter: what a trainer tells a state whose gradients that reduces.

In each backward a trainer calls its state, on all ranks alike:

    state.begin_step()
    future = state.reduce(gradients, names)  # of a bucket; or `reducer.scatter`, which waits
    state.end_step()
    state.wait(future)  # or before `end_step`

The `Adapter` says what else the state has to know. A trainer gives what differs from the defaults
here, as values and functions. `pycomm.reduction.refusals` has what trainers refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from pycomm.feedback import Cut
from pycomm.policy import Decision
from pycomm.reduction.factors import Matrix


@dataclass(frozen=True, eq=False)
class Layout:
    """The values of each parameter that a rank contributes, and those that it gets.

    By default it contributes whole parameters and gets whole averages.
    """

    shards: Mapping[str, torch.Size] = field(default_factory=dict)
    """By name: shape of a rank's shard, with padding; filled before the parameter is added."""
    by_rows: Collection[str] = ()
    """Names of the parameters whose shards are equal numbers of rows."""
    shard_group: dist.ProcessGroup | None = None
    """The ranks that share the parameters; None: each has whole ones."""
    scatters: bool = False
    """These ranks reduce-scatter; else replicas of each shard all-reduce it."""
    device: torch.device | None = None
    """The device of the groups; None: that of the first parameter."""

    @cached_property
    def ranks(self) -> int:
        """Number of ranks that share the parameters."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @cached_property
    def rows(self) -> int:
        """Number of parts of each parameter that a rank contributes; see `Bucket`."""
        return self.ranks if self.scatters else 1

    def groups(self, group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
        """Return the groups whose ranks have the same parameters, or shards of the same ones.

        Args:
            group: the ranks that reduce.
        """
        shared = self.shard_group
        return [group] if self.scatters or shared is None else [group, shared]

    def part(self, decision: Decision) -> Decision:
        """Return the decision for a bucket's part of a parameter."""
        shape = self.shards.get(decision.parameter.name)
        if shape is None:
            return decision
        return replace(decision, parameter=replace(decision.parameter, shape=tuple(shape)))

    def cuts(self, decisions: Mapping[str, Decision]) -> dict[str, Cut]:
        """Return how a reduce-scatter shards parameters, by name."""
        names = [name for name in self.by_rows if self.scatters and name in decisions]
        return {name: Cut(decisions[name].parameter.shape, self.ranks) for name in names}

    def matrix(self, decision: Decision) -> Matrix | None:
        """Return a parameter as a matrix; None: there are no whole rows here.

        All dimensions but the first count as columns.
        """
        shape = self.part(decision).parameter.shape
        if len(shape) < 2 or not torch.Size(shape).numel():
            return None
        given = got = slice(0, shape[0])
        if self.shard_group is not None and self.ranks > 1:
            if decision.parameter.name not in self.by_rows:
                return None
            first = self.shard_group.rank() * shape[0]
            got = slice(first, first + shape[0])
            given = slice(0, self.ranks * shape[0]) if self.scatters else got
        return Matrix(decision.parameter.shape[0], torch.Size(shape[1:]).numel(), given, got)


def _no_bucket(state: Any, bucket: Any) -> Any:
    raise AssertionError("this trainer has no buckets of DDP")


@dataclass(frozen=True, eq=False)
class Adapter:
    """A trainer as its state sees it.

    The functions refer to no state, so that a state ends with its model.
    """

    trainer: str = ""
    """Its name in the table of refusals; "": it refuses nothing."""
    layout: Layout = field(default_factory=Layout)
    early: bool = False
    """A step begins before its backward adds to any gradient, and gradients are shards: FSDP2."""
    defers: bool = False
    """On a device a step may begin before the host knows whether the last one is finite. Whoever
    reads residuals on the host between two steps cannot have that."""
    ignored: Collection[str] = ()
    """Names of the parameters that the trainer was told not to average."""
    reduce_bucket: Callable[[Any, dist.GradBucket], torch.futures.Future[Any]] = _no_bucket
    """Averages a bucket of DDP for the `CompressionState` that it gets; see `pycomm.compress_hook`.
    """
    unused: Callable[[], Set[str]] = frozenset
    """Returns the parameters of which one knows by now that no rank has used them in the last step:
    the trainer leaves their gradients as they are."""
    rebuilds: Callable[[], bool] = lambda: False
    """Whether the trainer makes new buckets after the next backward."""
    is_new: Callable[[], bool] = lambda: False
    """Whether this rank takes over the parameters of others, and so owes nothing."""
    saved: Callable[[], dict[str, Any]] = dict
    """Returns entries of a checkpoint, equal on all ranks."""
    loaded: Callable[[Mapping[str, Any]], None] = lambda _: None
    """Gets the entries of a loaded checkpoint; nothing, if they are those of other members."""
