"""`LocalSGD`: rounds of local training; `Blocking` and `Streamed`: its forms of exchange."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pycomm import backend
from pycomm.arguments import number, put, typed, whole
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.local_sgd.outer import Fragment, broadcast, reals, split
from pycomm.local_sgd.shared import (
    Average,
    InnerOptimizers,
    announce,
    are_finite,
    named,
    start_average,
)
from pycomm.log import logger
from pycomm.policy import Policy, agree_on_options
from pycomm.policy.names import few
from pycomm.reduction import own_group
from pycomm.reduction.adapter import Adapter
from pycomm.reduction.refusals import LOCAL_SGD, refused
from pycomm.reduction.state import CompressionState

T = TypeVar("T")

STATE_VERSION = 3
_OPTIONS = ("every", "exchange", "lr", "momentum", "weighted", "average")


@dataclass(frozen=True)
class Streamed:
    """Parts of the model travel one after the other, while training goes on (Streaming DiLoCo).

    An overlapped rank differs from the others between rounds; `LocalSGD.finish` makes all equal.
    One fragment with ``overlap=every`` is DiLoCo whose outer gradients come one round later.

    Args:
        fragments: number of parts of the model, of about equal size, that are averaged one after
            the other in each round: a fragment every ``every / fragments`` steps.
        overlap: local steps during which a fragment's outer gradient travels, at most
            ``every // fragments``; 0: training stops meanwhile.
        mixing: share of a rank's own parameters that it keeps when an overlapped outer gradient is
            applied, from 0 to below 1: ``mixing * own + (1 - mixing) * common``.

    Raises:
        TypeError: an option has another type.
        ValueError: an option is out of its range.

    Example:
        >>> from pycomm.local_sgd import Streamed
        >>> stream = Streamed(fragments=6, overlap=5)
        >>> local = pycomm.LocalSGD(model, every=30, exchange=stream)  # doctest: +SKIP
    """

    fragments: int = 1
    overlap: int = 1
    mixing: float = 0.5

    def __post_init__(self) -> None:
        put(
            self,
            fragments=whole("fragments", self.fragments, 1),
            overlap=whole("overlap", self.overlap),
            mixing=number("mixing", self.mixing),
        )
        if not 0 <= self.mixing < 1:
            raise ValueError(f"mixing={self.mixing}: use a share from 0 to below 1")

    def check(self, every: int) -> None:
        """Check these options against the steps of a round.

        Raises:
            ValueError: there are more fragments or steps of overlap than a round has steps for.
        """
        if self.fragments > every:
            raise ValueError(
                f"LocalSGD: fragments={self.fragments}: use 1 to every={every}, since each takes a "
                "step of its own"
            )
        if self.overlap > every // self.fragments:
            raise ValueError(
                f"LocalSGD: overlap={self.overlap} is more than every // fragments = "
                f"{every // self.fragments}: the next fragment would be due before it came"
            )


@dataclass(frozen=True)
class Blocking(Streamed):
    """Training stops while the outer gradients of the whole model travel: DiLoCo."""

    fragments: int = field(default=1, init=False, repr=False)
    overlap: int = field(default=0, init=False, repr=False)
    mixing: float = field(default=0.0, init=False, repr=False)


class LocalSGD:
    """Rounds of local training on the ranks of a group, with an outer step after each.

    Collective: every rank makes one, with the same model and options, and all start from the first
    rank's parameters and buffers. After an outer step all ranks have the same parameters, to the
    bit; with `Streamed` after `finish`. Only trained parameters are averaged; each rank
    keeps its own buffers, such as a batch norm's statistics, and its own state of the inner
    optimizer.

    An average that is not finite is skipped, and all ranks go back to the round's start. The rank
    that has brought it is named in the log, and where the state of its inner optimizer is not
    finite, either, that begins anew.

    The trained parameters stay the same: after `finish`, a model of which others are trained needs
    a new LocalSGD.

    Args:
        model: a model whose wrapper, if any, does not reduce over the same ranks:
            DistributedDataParallel and FSDP2 would synchronize them in every step. The intended use
            is a group of nodes with DDP or FSDP2 inside each node: sharded parameters are averaged
            shard by shard.
        every: local steps in a round.
        exchange: how outer gradients travel: ``Blocking()`` or ``Streamed(fragments, overlap,
            mixing)`` of `pycomm.local_sgd`.
        codec: codec of the outer gradients, its text ("int4"), or a `pycomm.Policy`. Warm-ups and
            schedules count exchanges.
        lr: outer learning rate.
        momentum: Nesterov momentum of the outer optimizer; 0 for none. DiLoCo's 0.9 is for long
            trainings: over a few dozen rounds it multiplies the steps by what may be too much.
        weighted: weight each rank's outer gradient by the samples or tokens that `step` is given.
        average: "ranks": the mean over all ranks. "senders": with sparse codecs (top-k), each value
            is averaged over the ranks that have sent it (SparseLoCo).
        process_group: the ranks that train apart; None: the default group.
        feedback: error feedback; see `pycomm.compress`.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        TypeError: an option has another type.
        ValueError: an option is out of its range.
        Error: the model's own wrapper reduces over ranks that are to train apart.
        WireMismatch: ranks have different models, codecs or options.

    Example:
        >>> local = pycomm.LocalSGD(model, every=32, codec="int4")  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss(model, batch).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     local.step()
        >>> local.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        exchange: Blocking | Streamed = Blocking(),
        codec: str | Codec | Policy = "int8",
        lr: float = 0.7,
        momentum: float = 0.5,
        weighted: bool = False,
        average: Literal["ranks", "senders"] = "ranks",
        process_group: dist.ProcessGroup | None = None,
        feedback: bool | str | Feedback | None = True,
        seed: int = 0,
    ) -> None:
        typed("model", model, nn.Module)
        typed("exchange", exchange, Blocking, Streamed)
        typed("weighted", weighted, bool)
        typed("process_group", process_group, dist.ProcessGroup, None)
        self.every = whole("every", every, 1)
        self.exchange = exchange
        self.lr, self.momentum = number("lr", lr), number("momentum", momentum)
        self.weighted, self.average = weighted, average
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"LocalSGD: lr={lr} must be above 0, and momentum={momentum} from 0 to below 1"
            )
        if average not in ("ranks", "senders"):
            raise ValueError(f"LocalSGD: average={average!r}: use 'ranks' or 'senders'")
        group = process_group or dist.group.WORLD
        exchange.check(self.every)
        self._model = model
        trained = self._trained()
        if not trained:
            raise ValueError("LocalSGD: the model has no parameters to train: unfreeze some")
        if wide := [name for name, p in trained.items() if reals(p).dtype == torch.float64]:
            raise ValueError(
                f"LocalSGD averages in float32, not in the float64 of {few(wide)}: train them in "
                "float32, or freeze them"
            )
        device = next(iter(trained.values())).device
        self._own: dist.ProcessGroup | None = None
        self._process = os.getpid()
        self._thread: ThreadPoolExecutor | None = None  # that runs exchanges in `_own`,
        self._stream: torch.Stream | None = None  # with those of a device on a stream of its own
        if group is not None:
            agree_on_options([f"LocalSGD: {n}={getattr(self, n)}" for n in _OPTIONS], group)
            _refuse_meetings(model, group)
            # The backend runs them on a thread of its own, but for weights and senders, which are
            # exchanged in several steps that wait for each other.
            is_async = not weighted and average == "ranks" and device.type == "cpu"
            if exchange.overlap and not (is_async and backend.find(group)):
                self._own = own_group.make(group)
                self._thread = ThreadPoolExecutor(1, "pycomm-local-sgd")
                weakref.finalize(self, _close, self._thread, self._own).atexit = False
                self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._state = CompressionState(
            codec,
            process_group=self._own or group,
            feedback=feedback,
            seed=seed,
            adapter=Adapter(LOCAL_SGD),
        )
        self.state.reducer.average = average
        self.rounds = 0
        """Outer gradients that were applied, or skipped because they were not finite; those of each
        fragment count."""
        self.skipped = 0
        """Outer gradients that were skipped."""
        self._inner = InnerOptimizers(lambda: named(model))
        for name, parameter in trained.items():
            own_part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self.state.add(name, own_part.detach())
        self.state.agree()  # first: an error of the broadcast names no parameter
        broadcast(model, self.state.process_group)
        self._parts = [
            Fragment(part, momentum=self.momentum, end=end)
            for part, end in split(trained, exchange.fragments, self.every)
        ]
        if average == "ranks" and group is not None:
            self.state.reducer.find_nodes(device)
        self.local_steps = 0
        """Optimizer steps in this round."""
        self._in_flight: tuple[Fragment, Callable[[], Average]] | None = None
        self._countdown = 0  # steps until what is in flight is applied
        self._dirty = False  # the model differs from the common start

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another value of an option.

        Raises:
            AttributeError: the ranks have agreed on it.
        """
        if name in _OPTIONS and name in vars(self):
            raise AttributeError(
                f"LocalSGD: {name} stays as it was when all ranks made this: call finish(), and "
                "make a new LocalSGD"
            )
        super().__setattr__(name, value)

    # ------------------------------------------------------------------ for users

    @property
    def state(self) -> CompressionState:
        """Codecs and feedback: `residual_norms()`. A thread that exchanges has it to itself, and is
        waited for."""
        if self._thread is not None and os.getpid() == self._process:  # a fork has no threads
            _wait(self._thread.submit(lambda: None).result, self._own, self._stream)
        return self._state

    @_disable_dynamo  # a round exchanges values, also within a compiled step of the optimizer
    def step(self, weight: float | None = None) -> bool:
        """Count one optimizer step; call it after each. Returns whether it ended a round.

        Args:
            weight: samples or tokens of the step on this rank, 0 or more; if `weighted`.

        Raises:
            ValueError: there is a weight and the average is not weighted, or the other way round.
        """
        if (weight is None) == self.weighted:
            raise ValueError(
                "LocalSGD was made with weighted=True: pass step() the samples or tokens of the "
                "step"
                if self.weighted
                else "LocalSGD.step: a weight needs weighted=True in LocalSGD, on all ranks"
            )
        weight = 1.0 if weight is None else number("weight", weight)
        if weight < 0:
            raise ValueError(f"weight={weight}: use a number of samples or tokens, 0 or more")
        self.local_steps += 1
        self._dirty = True
        for part in self._parts:
            part.weight += weight
        if self._in_flight is not None:
            self._countdown -= 1
            if not self._countdown:
                self._apply()
        for part in self._parts:
            if part.end == self.local_steps:
                self._end(part)
        if self.local_steps < self.every:
            return False
        self.local_steps = 0
        return True

    def finish(self) -> None:
        """End the round now and apply all outer gradients; afterwards all ranks are equal.

        Collective. Ranks may have taken different numbers of steps.
        """
        self._apply()
        all_finish = False
        while not all_finish:
            part, changed = self._next(), self._changed()
            gradient = part.gradient()
            announced = announce(
                self.state, gradient, part.weight, changed, finishing=True, dirty=self._dirty
            )
            all_finish = all(rank.finishing for rank in announced())
            if all_finish and not any(rank.dirty for rank in announced()):
                break
            names, weighted = list(part.parameters), self.weighted
            wait = start_average(self.state, names, gradient, announced, weighted=weighted)
            self._catch_up(part, wait)
        else:
            for _ in self._parts[1:]:
                self._catch_up(self._next(), self._exchange(self._next()))
        self.local_steps, self._dirty = 0, False

    def _next(self) -> Fragment:
        """Return the fragment whose turn it is; the first one where a round ended by an error."""
        parts = self._parts
        return next((part for part in parts if part.end > self.local_steps), parts[0])

    def _catch_up(self, part: Fragment, wait: Callable[[], Average]) -> None:
        """Apply a fragment's average at once, and go on as if its step of the round had come."""
        part.weight = 0.0
        self._complete(part, wait)
        self.local_steps = part.end % self.every

    def _end(self, part: Fragment) -> None:
        """Send a fragment's outer gradient, and apply it at once unless it overlaps with steps."""
        wait = self._exchange(part)
        part.weight = 0.0
        if self.exchange.overlap:
            self._in_flight, self._countdown = (part, wait), self.exchange.overlap
        else:
            self._complete(part, wait)

    def _exchange(self, part: Fragment) -> Callable[[], Average]:
        """Send a fragment's outer gradient; return a function that waits for the average."""
        # So that what is in flight does not hold this object.
        state, weighted, own, stream = self.state, self.weighted, self._own, self._stream
        gradient, weight, changed = part.gradient(), part.weight, self._changed()
        names = list(part.parameters)

        def exchange() -> Callable[[], Average]:
            announced = announce(state, gradient, weight, changed)
            return start_average(state, names, gradient, announced, weighted=weighted)

        if self._thread is None:
            return exchange()
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream(stream.device))

        def average() -> Average:
            with stream or nullcontext():
                return exchange()()

        result = self._thread.submit(average).result
        return lambda: _wait(result, own, stream)

    def _complete(self, part: Fragment, wait: Callable[[], Average]) -> None:
        """Wait for an average, and begin the fragment's next round from its start."""
        self._move(part, wait())
        part.write()
        self._dirty = len(self._parts) > 1 or self.exchange.overlap > 0

    def _apply(self) -> None:
        """Apply the average that is in flight, if there is one."""
        if self._in_flight is None:
            return
        (part, wait), self._in_flight = self._in_flight, None
        if self._move(part, wait()):
            part.mix(self.exchange.mixing)

    def _move(self, part: Fragment, average: Average) -> bool:
        """Move a fragment's start by an average; return whether it is finite.

        If it is not, the model goes back to the fragment's start on all ranks. A rank whose own
        outer gradient was not finite goes back to the start of all fragments, with new states of
        the inner optimizer where those are not finite either.
        """
        self.rounds += 1
        if are_finite([average.values]):  # on all ranks alike
            part.apply(average.values, self.lr)
            return True
        self.state.reducer.check_operations()
        self.skipped += 1
        rank = self.state.process_group.rank()
        logger.warning(
            "rank %d: LocalSGD skips round %d, and all ranks go back to its start: the average is "
            "not finite, since the outer gradient of %s",
            rank,
            self.rounds,
            f"rank {', '.join(map(str, average.bad))} is not"
            if average.bad
            else "no rank is, and their sum overflows",
        )
        if rank in average.bad:
            for each in self._parts:
                each.write()
            if names := self._inner.reset():
                logger.warning(
                    "rank %d: LocalSGD has reset the inner optimizer's state, which was not "
                    "finite, of %s",
                    rank,
                    few(names),
                )
        else:
            part.write()
        return False

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained now, by name."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation has left whole parameters
        return {name: p for name, p in named(self._model).items() if p.requires_grad}

    def _changed(self) -> str:
        """Return the trained parameters that are not those of the beginning; "": there are none."""
        trained = self._trained()
        known = {name: p for part in self._parts for name, p in part.parameters.items()}
        return few([n for n in {**known, **trained} if known.get(n) is not trained.get(n)])

    def summary(self) -> str:
        """Return the codecs, and the bytes that this rank sends in a round and at most at once."""
        parts = self._parts
        sizes = list(map(self._sent_bytes, parts))
        return "\n".join(
            [
                self.state.summary(),
                f"LocalSGD: {self.exchange}, every {self.every} steps; a rank sends "
                f"{sum(sizes) / 1e6:.3g} MB in a round, {sum(sizes) / self.every / 1e3:.3g} kB for "
                f"each step, at most {max(sizes) / 1e6:.3g} MB at once",
            ]
        )

    def _sent_bytes(self, part: Fragment) -> int:
        """Return the bytes that a rank sends to average these parameters once, at most.

        Payloads with owners go to the owners, and their results to all; sparse ones to all ranks.
        """
        total, ranks = 0.0, self.state.process_group.size()
        for decision in map(self.state.decisions.__getitem__, part.parameters):
            gathered = decision.codec.combine == "gather"
            total += decision.encoded_bytes * (ranks - 1) * (1 if gathered else 2 / ranks)
        return round(total)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse a copy.

        Raises:
            Error: always.
        """
        raise Error(
            "a LocalSGD cannot be copied or pickled, since it averages the parameters of its own "
            "model: keep its state_dict(), or copy the model and make a new LocalSGD"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint beside model and optimizer. Each rank saves its own."""
        pending = None
        if self._in_flight is not None:
            part, wait = self._in_flight
            average = wait()
            self._in_flight = part, lambda: average
            values = average.values.clone()
            pending = self._parts.index(part), values, average.bad, self._countdown
        return {
            "version": STATE_VERSION,
            "local_steps": self.local_steps,
            "dirty": self._dirty,
            "pending": pending,
            "fragments": [part.state_dict() for part in self._parts],
            "own": [part.values() for part in self._parts] if self._dirty else None,
            "rounds": self.rounds,
            "skipped": self.skipped,
            "compression": self.state.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`, and the model's trained parameters with it.

        Every rank loads, at the same point of a step, which may be any. Outer gradients that are
        in flight are dropped. The inner optimizer, and what of the model is not trained, are loaded
        separately.

        Raises:
            ValueError: the state is of another version, model, momentum, exchange, rank or number
                of ranks.
        """
        if (version := state.get("version")) != STATE_VERSION:
            raise ValueError(
                f"LocalSGD's state has version {version}, not {STATE_VERSION}: load it with the "
                "pycomm that has saved it"
            )
        saved = state["fragments"]
        if len(saved) != len(self._parts):
            raise ValueError(
                f"LocalSGD's state has {len(saved)} fragments, not {len(self._parts)}: give the "
                "same exchange="
            )
        for part, one in zip(self._parts, saved, strict=True):
            part.check(one)
        if self._in_flight is not None:
            self._in_flight[1]()
        self.state.load_state_dict(state["compression"])  # first: it may be refused
        self._in_flight = None
        for part, one in zip(self._parts, saved, strict=True):
            part.load_state_dict(one)
        self.rounds, self.skipped = state["rounds"], state["skipped"]
        for index, part in enumerate(self._parts):
            part.write(state["own"] and state["own"][index])
        if state["pending"] is not None:
            index, values, bad, self._countdown = state["pending"]
            part = self._parts[index]
            average = Average(values.to(part.start.device, copy=True), bad)
            self._in_flight = part, lambda: average
        self.local_steps, self._dirty = state["local_steps"], state["dirty"]


def _wait(result: Callable[[], T], own: dist.ProcessGroup | None, stream: torch.Stream | None) -> T:
    """Return what a thread that has a group, and a stream, to itself returns."""
    found = own_group.wait(result, own)
    if stream is not None:
        torch.accelerator.current_stream(stream.device).wait_stream(stream)
    return found


def _close(thread: ThreadPoolExecutor, own: dist.ProcessGroup) -> None:
    """End a thread and its group, after what is in flight."""
    thread.submit(own_group.close, own)
    thread.shutdown(wait=False)


def _refuse_meetings(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise if the model's own wrapper reduces over ranks that are to train apart."""
    apart = set(dist.get_process_group_ranks(group))

    def refuse(what: str, ranks: set[int]) -> None:
        if len(apart & ranks) > 1:
            option = "DDP or other averages over the same ranks"
            raise Error(refused(LOCAL_SGD, option, what=what, ranks=sorted(apart & ranks)))

    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            ranks = dist.get_process_group_ranks(module.process_group)
            refuse(f"the model is wrapped in {type(module).__name__}", set(ranks))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim in range(mesh.ndim):
                ranks = dist.get_process_group_ranks(mesh.get_group(dim))
                refuse("parameters are distributed", set(ranks))
