"""Elastic training as Horovod's scripts write it, on torchrun's restarts.

    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 1000:
            ...
            state.step += 1
            if state.step % 100 == 0:
                state.commit()

    train(state)

Horovod keeps the processes that live and gives them new ranks. torchrun ends all processes of a job
when one dies or a node joins, and starts the script anew on each node. So a commit is not kept in
memory alone: one rank of each node writes it to a file in the folder that the node's agent of
torchrun has for its logs (``--log-dir``), and `run` puts the newest commit back that a node has.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import itertools
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler

from pycomm.elastic.contents import keep_dtypes
from pycomm.env import agent_folder
from pycomm.errors import Error
from pycomm.folders import distrust
from pycomm.horovod.basics import local_rank, places, rank, size
from pycomm.horovod.functions import broadcast_optimizer_state, broadcast_parameters
from pycomm.log import logger
from pycomm.policy.exchange import device_of, gather_json
from pycomm.reduction import members

T = TypeVar("T")


class HostsUpdatedInterrupt(RuntimeError):
    """A script may raise it to be started anew with the nodes that there are.

    Nothing in pycomm does: torchrun ends the processes without asking them.
    """


def run(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function that goes on from the last commit; decorator.

    The decorated function takes a `State` first. All ranks call it, after `hvd.init`. It puts the
    newest commit that a node of this job has into the state of all ranks and calls the callbacks of
    `State.register_reset_callbacks`, or, without a commit, gives all ranks the state of rank 0. An
    error of a collective ends the process, as any other error does, and torchrun starts all anew
    (``--max-restarts``). The commits go when the function has returned on all ranks: what follows
    it in a script is not protected.

    Raises:
        Error: a collective has failed; or the nodes' commits cannot be read.
    """

    @functools.wraps(function)
    def elastic(state: State, *args: Any, **kwargs: Any) -> T:
        places()
        state._begin(f"{function.__module__}.{function.__qualname__}")
        try:
            result = function(state, *args, **kwargs)
        except (Error, HostsUpdatedInterrupt) as error:
            then = (
                f"torchrun starts all ranks anew, from commit {state._number}"
                if state._file
                else "nothing starts this job anew: start it with torchrun --max-restarts"
            )
            logger.warning("rank %d ends (%s); %s", dist.get_rank(), type(error).__name__, then)
            raise
        state._end()
        return result

    return elastic


class State(ABC):
    """What ranks have in common and commit from time to time.

    A class of a script's own defines `save`, `restore` and `sync`; what `save` puts into
    `saved` is written to the file of the commit: tensors and plain Python types.

    Attributes:
        saved: what `restore` puts back.
        root_rank: the rank whose state `sync` gives to all.
    """

    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}
        self.root_rank = 0
        self._callbacks: list[Callable[[], object]] = []
        self._number = 0  # of the last commit
        self._file: Path | None = None

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Add functions that are called when training goes on from a commit.

        The number of ranks may have changed, so they adjust learning rates or batches.
        """
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the callbacks; `run` does so after a commit was put back."""
        self.reset()
        for callback in self._callbacks:
            callback()

    def reset(self) -> None:  # noqa: B027 - a class may leave it
        """Adapt to another number of ranks; for a class of a script's own."""

    def commit(self) -> None:
        """Save the state, in memory and in a file on each node; collective.

        Raises:
            Error: it has objects that are no tensors or plain Python types, on this rank.
            OSError: the file cannot be written.
        """
        self.save()
        self._check(self.saved if self._number == 0 else self.saved.get("objects"))
        self._number += 1
        if self._file and local_rank() == 0:
            # A process that is ended while it writes leaves the commit before.
            part = self._file.with_suffix(".part")
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                torch.save({"number": self._number, "saved": self.saved}, file)
            part.replace(self._file)
        self.check_host_updates()

    def check_host_updates(self) -> None:  # noqa: B027 - Horovod's scripts call it
        """Do nothing: torchrun ends the processes when nodes come or go."""

    @abstractmethod
    def save(self) -> None:
        """Copy the state into `saved`."""

    @abstractmethod
    def restore(self) -> None:
        """Put `saved` back."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of `root_rank`, and save it; collective."""

    def _check(self, saved: object) -> None:
        """Check that a commit of this could be read."""
        written = io.BytesIO()
        torch.save(saved, written)
        written.seek(0)
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(written)
        if unknown:
            raise Error(
                f"rank {rank()}: a commit with {', '.join(unknown)} could not be read again: keep "
                "numbers, texts, containers and tensors in the state, or name the classes in "
                "torch.serialization.add_safe_globals"
            )

    def _begin(self, name: str) -> None:
        """Put the newest commit of the nodes back; collective.

        Args:
            name: of what is run.
        """
        folder, number, problem = agent_folder(), 0, ""
        if folder is not None:
            digest = hashlib.sha256(name.encode()).hexdigest()[:12]
            self._file = folder / f"pycomm-commit-{digest}.pt"
        try:
            number = self._read()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        assert dist.group.WORLD is not None
        told = gather_json([number, problem], dist.group.WORLD)
        numbers = [theirs for theirs, _ in told]
        newest = max(numbers)
        broken = [r for r, (_, text) in enumerate(told) if text]
        if broken and newest == 0:
            raise Error(
                f"rank {rank()}: rank {broken[0]} cannot read the last commit of its node "
                f"({told[broken[0]][1]}), and no other node has one"
            )
        root = numbers.index(newest)
        if newest > 0 and rank() == root:
            self.restore()
        self.root_rank = root
        self.sync()
        self.root_rank, self._number = 0, newest
        if newest > 0:
            self.on_reset()

    def _read(self) -> int:
        """Read the commit of this node into `saved`; return its number, 0: there is none."""
        if self._file is None or local_rank() != 0 or not self._file.exists():
            return 0
        if reason := distrust(self._file):
            raise PermissionError(reason)
        found = torch.load(self._file, weights_only=True, map_location="cpu")
        self.saved = found["saved"]
        return int(found["number"])

    def _end(self) -> None:
        """Remove the commit, once training has ended on all ranks; collective."""
        if dist.is_initialized():
            dist.barrier()
        if self._file and local_rank() == 0:
            self._file.unlink(missing_ok=True)


class ObjectState(State):
    """Objects of plain Python types, which are attributes.

    Args:
        bcast_object: not used.
        get_rank: not used.
        attributes: their names and first values.
    """

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **attributes: Any) -> None:
        super().__init__()
        self._names = list(attributes)
        for name, value in attributes.items():
            setattr(self, name, value)

    def save(self) -> None:
        self.saved["objects"] = copy.deepcopy({name: getattr(self, name) for name in self._names})

    def restore(self) -> None:
        for name, value in copy.deepcopy(self.saved["objects"]).items():
            setattr(self, name, value)

    def sync(self) -> None:
        group = dist.group.WORLD
        assert group is not None
        mine = {name: getattr(self, name) for name in self._names}
        theirs = members.broadcast_object(mine, self.root_rank, group, device_of(group))
        for name, value in theirs.items():
            setattr(self, name, value)
        self.save()


class TorchState(ObjectState):
    """Models, optimizers, samplers, and objects of plain Python types.

    Args:
        model: the model, or None.
        optimizer: its optimizer, also a `DistributedOptimizer`, or None. What a compression still
            owes to the gradients (residuals) is not part of the state.
        attributes: more of them, and objects, by the names of the attributes that they become.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **attributes: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        attributes = {n: v for n, v in given.items() if v is not None} | attributes
        kinds = (nn.Module, torch.optim.Optimizer, ElasticSampler)
        self._parts = {n: v for n, v in attributes.items() if isinstance(v, kinds)}
        super().__init__(**{n: v for n, v in attributes.items() if n not in self._parts})
        for name, part in self._parts.items():
            setattr(self, name, part)

    def save(self) -> None:
        """Copy the state into `saved`; collective if it has samplers."""
        super().save()
        for sampler in self._parts.values():
            if isinstance(sampler, ElasticSampler):
                sampler.merge()
        states = {name: part.state_dict() for name, part in self._parts.items()}
        self.saved["parts"] = copy.deepcopy(states)

    def restore(self) -> None:
        super().restore()
        for name, part in self._parts.items():
            state = copy.deepcopy(self.saved["parts"][name])
            part.load_state_dict(state)
            if isinstance(part, torch.optim.Optimizer):
                keep_dtypes(part, self.saved["parts"][name])

    def sync(self) -> None:
        for part in self._parts.values():
            if isinstance(part, nn.Module):
                broadcast_parameters(part.state_dict(), self.root_rank)
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part, self.root_rank)
            else:
                part.merge(self.root_rank)
                part.reset()
        super().sync()

    def reset(self) -> None:
        for sampler in self._parts.values():
            if isinstance(sampler, ElasticSampler):
                sampler.reset()


class ElasticSampler(Sampler[int]):
    """Divides among the ranks what of a dataset no rank has processed in this epoch.

    Call `record_batch` or `record_indices` after each batch, pass the sampler to `TorchState`, and
    call `set_epoch` at the end of each epoch. Ranks get equally many samples; some occur twice if
    they cannot be divided.

    Args:
        dataset: what has a length.
        shuffle: mix the samples, alike on all ranks.
        seed: of the order, together with the epoch; the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self._merged: set[int] = set()  # the same on all ranks
        self._own: set[int] = set()
        self.indices: list[int] = []
        """Those of this rank, in their order."""
        self.reset()

    @property
    def processed_indices(self) -> set[int]:
        """What is known to be processed in this epoch."""
        return self._merged | self._own

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in which nothing is processed yet."""
        self.epoch, self._merged, self._own = epoch, set(), set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that a batch of this rank is processed, counted from 0 since the last `reset`."""
        begin = batch_idx * batch_size
        self.record_indices(self.indices[begin : begin + batch_size])

    def record_indices(self, indices: list[int]) -> None:
        """Note that samples are processed."""
        self._own.update(indices)

    def merge(self, root_rank: int = 0) -> None:
        """Learn what all ranks have processed in the epoch of one of them; collective.

        The order of this rank's samples stays, until the next `reset` or epoch.
        """
        assert dist.group.WORLD is not None
        mine = [self.epoch, sorted(self._own), sorted(self._merged) if rank() == root_rank else []]
        told = gather_json(mine, dist.group.WORLD)
        epoch, _, before = told[root_rank]
        own = [theirs for number, theirs, _ in told if number == epoch]
        self.epoch, self._own = epoch, set()
        self._merged = {*before, *itertools.chain.from_iterable(own)}

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and what is processed in it."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from another one's state."""
        self.epoch = int(state["epoch"])
        self._merged, self._own = set(state["processed_indices"]), set()
        self.reset()

    def reset(self) -> None:
        """Divide among the ranks what is left of the epoch."""
        done = self.processed_indices
        left = [index for index in range(len(self.dataset)) if index not in done]
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(left)
        ranks = size()
        each = -(-len(left) // ranks)
        whole = itertools.islice(itertools.cycle(left), each * ranks)
        self.indices = list(itertools.islice(whole, rank(), None, ranks))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
