"""Local SGD with an outer optimizer (DiLoCo): ranks train alone and synchronize every H steps.

Longer than others: it is one class, of which a third is documentation.

Every rank takes H optimizer steps on its own. Then the ranks' movements, start minus end, are
averaged as an outer gradient, and an outer SGD with Nesterov momentum moves the common start by it
(Douillard et al. 2023, "DiLoCo", algorithm 1). With an outer learning rate of 1 and no momentum
that is plain averaging of parameters (local SGD, Stich 2018). The outer gradient is compressed,
with feedback.

Three forms need not stop for the exchange:

* `fragments` and `overlap`: parts of the model travel one after the other while training goes on
  (Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512,
  algorithm 2).
* `delayed`: the outer gradient of a round travels while the next round is computed, and is applied
  at that round's end (Kale, Douillard, Donchev 2025, "Eager updates for overlapped communication
  and computation in DiLoCo", the delayed outer gradient of section 3).
* `quorum`: the fastest ranks carry an outer step, and what late ranks have done joins the next one
  (as Douillard et al. 2026, "Decoupled DiLoCo", arXiv 2604.21428, do it with a server).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pycomm import backend
from pycomm.arguments import number, typed, whole
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.policy import Policy, agree_on_options
from pycomm.policy.exchange import gather
from pycomm.policy.names import clean
from pycomm.reduction import cost
from pycomm.reduction.fragments import Fragment, split
from pycomm.reduction.outer import OuterParameters, Values, broadcast, reals
from pycomm.reduction.quorum import Outcome, Quorum
from pycomm.reduction.state import CompressionState
from pycomm.reduction.weights import checked, factors

logger = logging.getLogger("pycomm")

STATE_VERSION = 3


class LocalSGD:
    """Rounds of local training on the ranks of a group, with an outer step after each.

    Collective: every rank makes one, with the same model and options, and all start from the first
    rank's parameters and buffers. After an outer step all ranks have the same parameters, to the
    bit; with `overlap` or `quorum` after `finish`. Only trained parameters are averaged; each rank
    keeps its own buffers, such as a batch norm's statistics, and its own state of the inner
    optimizer.

    A parameter that is unfrozen, added or replaced during a round is averaged exactly when that
    round ends, and takes part like the others from then on; a parameter that is frozen or removed
    takes part for the last time. Such a round is neither delayed nor overlapped. All ranks must
    make such a change in the same round; with a quorum there may be none.

    Args:
        model: a model whose wrapper, if any, does not reduce over the same ranks:
            DistributedDataParallel and FSDP2 would synchronize them in every step. The intended use
            is a group of nodes with DDP or FSDP2 inside each node: sharded parameters are averaged
            shard by shard.
        every: local steps in a round.
        codec: codec of the outer gradients, its text ("int4"), or a `pycomm.Policy`. Warm-ups and
            schedules count exchanges.
        lr: outer learning rate.
        momentum: momentum of the outer optimizer; 0 for none.
        nesterov: look ahead by the momentum, as DiLoCo does.
        fragments: number of parts of the model, of about equal size, that are averaged one after
            the other in each round: a fragment every ``every / fragments`` steps.
        overlap: local steps during which a fragment's outer gradient travels. At most
            ``every // fragments``. With a quorum, the steps that a rank takes while it waits.
        mixing: share of a rank's own parameters that it keeps when an overlapped outer gradient is
            applied, from 0 to below 1: ``mixing * own + (1 - mixing) * common``.
        delayed: apply an outer gradient one round later, so that it travels meanwhile. A smaller
            momentum suits it.
        quorum: number of ranks that end a round when each has taken `every` steps; None: all.
        grace: seconds for which others are awaited then. They offer what they have after their
            current step; what comes too late joins the next round. A movement weighs as many steps,
            samples or tokens as it took.
        weighted: weight each rank's movement by the samples or tokens that `step` is given.
        average: "ranks": the mean over all ranks. "senders": with sparse codecs (top-k), each value
            is averaged over the ranks that have sent it (SparseLoCo).
        optimizer: the inner optimizer; needed only if this is used as a context manager, which
            counts the optimizer's steps.
        process_group: the ranks that train apart; None: the default group.
        feedback: error feedback; see `pycomm.compress`.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        ValueError: an option has an invalid value.
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
        codec: str | Codec | Policy = "int8",
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        fragments: int = 1,
        overlap: int = 0,
        mixing: float = 0.5,
        delayed: bool = False,
        quorum: int | None = None,
        grace: float = 1.0,
        weighted: bool = False,
        average: Literal["ranks", "senders"] = "ranks",
        optimizer: torch.optim.Optimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        feedback: bool | str | Feedback | None = True,
        seed: int = 0,
    ) -> None:
        typed("model", model, nn.Module)
        typed("optimizer", optimizer, torch.optim.Optimizer, None)
        typed("weighted", weighted, bool)
        self.every = whole("every", every, -math.inf)
        self.lr, self.momentum = number("lr", lr), number("momentum", momentum)
        self.fragments, self.overlap = whole("fragments", fragments), whole("overlap", overlap)
        self.mixing, self.grace = number("mixing", mixing), number("grace", grace)
        self.nesterov, self.delayed = nesterov, delayed
        self.quorum = None if quorum is None else whole("quorum", quorum)
        self.weighted, self.average = weighted, average
        self._check()
        self.local_steps = 0
        """Optimizer steps in this round."""
        self.rounds = 0
        """Outer gradients that were applied, or skipped because they were not finite; those of
        each fragment count."""
        self.skipped = 0
        """Outer gradients that were skipped."""
        self.late = 0
        """Outer gradients in which this rank did not take part, since the quorum had been there."""
        self.weight = 0.0
        """Samples or tokens of all steps on this rank."""
        self._optimizer = optimizer
        self._hook: Any = None
        self._model = model
        trained = self._trained()
        if not trained:
            raise ValueError("LocalSGD: the model has no parameters to train: unfreeze some")
        group = process_group or dist.group.WORLD
        self._thread: ThreadPoolExecutor | None = None
        if group is not None:
            if self.quorum is not None and not 1 <= self.quorum <= group.size():
                raise ValueError(
                    f"LocalSGD: quorum={quorum}: use 1 to {group.size()}, the number of ranks"
                )
            agree_on_options(self._terms(), group)
            on_cpu = reals(next(iter(trained.values()))).is_cpu
            if self._needs_thread(bool(backend.find_native(group) and on_cpu)):
                # A thread uses this group while the caller trains and uses its own as before.
                group = dist.new_group(
                    dist.get_process_group_ranks(group), use_local_synchronization=True
                )
                if self.quorum is None:
                    self._thread = ThreadPoolExecutor(1, "pycomm-local-sgd")
        self.state = CompressionState(codec, process_group=group, feedback=feedback, seed=seed)
        """Codecs and feedback: `residual_norms()`."""
        self.state.averages_senders = average == "senders"
        self.state.stays_because = (
            "LocalSGD keeps a start that members share: make a new LocalSGD on all ranks, which "
            "starts from the parameters of the first, and call its state.adopt_state(former.state)"
        )
        group = self.state.process_group
        _refuse_meetings(model, group)
        broadcast(model, group)
        self._parts = [
            Fragment(OuterParameters(part, momentum=self.momentum, nesterov=nesterov), end)
            for part, end in split(trained, self.fragments, self.every)
        ]
        self._enter(trained)
        self.state.plan.complete()
        self._under_way: tuple[Fragment, Callable[[], Values]] | None = None
        self._countdown = 0  # steps until what is under way is applied
        self._dirty = False  # steps were taken since the last `finish`
        self._quorum: Quorum | None = None
        if self.quorum is not None:
            device, limits = self.state._device, (self.quorum, self.grace)
            self._quorum = Quorum(group, device, self._meet, *limits)
        self._offered = False  # an offer to the quorum is under way,
        self._whole = False  # of a whole round,
        self._void = False  # and the model has gone back to its start since
        if self._quorum is not None:
            self._quorum.start()  # now, so that a long first step holds nobody up either

    def _needs_thread(self, is_async: bool) -> bool:
        """Whether exchanges need a thread and a group of their own.

        Args:
            is_async: the group runs compressed collectives on a thread of its own.
        """
        waits = self.weighted or self.average == "senders" or not is_async
        return self.quorum is not None or (waits and bool(self.delayed or self.overlap))

    def _check(self) -> None:
        if self.every < 1 or self.lr <= 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"LocalSGD: every={self.every} must be at least 1, lr={self.lr} above 0 and "
                f"momentum={self.momentum} from 0 to below 1"
            )
        if not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"LocalSGD: fragments={self.fragments}: use 1 to every={self.every}, since each "
                "takes a step of its own"
            )
        if not 0 <= self.mixing < 1 or self.grace < 0:
            raise ValueError(
                f"LocalSGD: mixing={self.mixing} must be from 0 to below 1, and "
                f"grace={self.grace} at least 0"
            )
        if self.overlap > self.every // self.fragments:
            raise ValueError(
                f"LocalSGD: overlap={self.overlap} is more than every // fragments = "
                f"{self.every // self.fragments}: the next fragment would be due before it came"
            )
        if self.delayed and (self.overlap or self.fragments > 1):
            raise ValueError(
                "LocalSGD: delayed=True sends the whole model for a round; leave it out with "
                "fragments= or overlap="
            )
        if self.quorum is not None and (self.delayed or self.fragments > 1):
            raise ValueError("LocalSGD: quorum= goes with one fragment, and without delayed=True")
        if self.average not in ("ranks", "senders"):
            raise ValueError(f"LocalSGD: average={self.average!r}: use 'ranks' or 'senders'")

    def _terms(self) -> list[str]:
        """Return the options that must be equal on all ranks."""
        names = (
            *("every", "lr", "momentum", "nesterov", "fragments", "overlap", "mixing", "delayed"),
            *("quorum", "grace", "weighted", "average"),
        )
        return [f"LocalSGD: {name}={getattr(self, name)}" for name in names]

    # ------------------------------------------------------------------ for users

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
        weight = 1.0 if weight is None else checked(weight)
        self.weight += weight
        self.local_steps += 1
        self._dirty = True
        for part in self._parts:
            part.weight += weight
        if self._quorum is not None:
            return self._meet_quorum(self._quorum)
        if self._under_way is not None and self._countdown:
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
        """End the round now and apply all outer gradients; afterwards all ranks are equal."""
        if self._quorum is not None:
            if self._dirty:
                self._finish_quorum(self._quorum)
        elif self.delayed:
            if self.local_steps:
                self._end(self._parts[0])
            if self._under_way is not None:
                self._apply()
                self._parts[0].outer.write()
        elif self._dirty:
            self._apply()
            if self.local_steps or len(self._parts) > 1 or self.overlap:
                for part in self._parts:
                    self._end(part, now=True)
        self.local_steps, self._dirty = 0, False

    def summary(self) -> str:
        """Return the codecs, and the bytes that this rank sends in a round and at most at once."""
        ranks = self.state.process_group.size()
        sizes = [cost.sent_bytes(self.state, p.outer.parameters, ranks) for p in self._parts]
        steps = f"every {self.every} steps"
        if self.overlap:
            steps += f", over {self.overlap} of them"
        tokens = ""
        if self.weighted and self.weight:
            exchanged = self.rounds / len(self._parts) * sum(sizes)
            tokens = f"; {exchanged / self.weight:.3g} bytes for each sample or token so far"
        return "\n".join(
            [
                self.state.summary(),
                f"LocalSGD: {len(self._parts)} fragments, each {steps}; a rank sends "
                f"{sum(sizes) / 1e6:.3g} MB in a round, {sum(sizes) / self.every / 1e3:.3g} kB for "
                f"each step, at most {max(sizes) / 1e6:.3g} MB at once{tokens}",
            ]
        )

    def __enter__(self) -> LocalSGD:
        if self._optimizer is None:
            raise Error("LocalSGD as a context manager counts steps: pass optimizer=")
        self._hook = self._optimizer.register_step_post_hook(self._count)
        return self

    def _count(self, *_: object) -> None:
        self.step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()
        if kind is None:
            self.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint beside model and optimizer. Each rank saves its own.

        Raises:
            Error: ranks of a quorum are at different steps of their own; call `finish` first.
        """
        if self._quorum is not None and self._dirty:
            raise Error(
                "LocalSGD: with a quorum the ranks are in different rounds: call finish() on all "
                "ranks, then save"
            )
        pending = None
        if self._under_way is not None:
            part, wait = self._under_way
            gradient = wait()
            self._under_way = part, _done(gradient)
            pending = self._parts.index(part), _copies(gradient), self._countdown
        return {
            "version": STATE_VERSION,
            "fragments": [part.state_dict() for part in self._parts],
            "pending": pending,
            "local_steps": self.local_steps,
            "dirty": self._dirty,
            "rounds": self.rounds,
            "skipped": self.skipped,
            "weight": self.weight,
            "compression": self.state.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`; the model is loaded separately.

        Raises:
            ValueError: the state is of another version, model, momentum, number of fragments, rank
                or number of ranks.
        """
        state = _current(state)
        if len(state["fragments"]) != len(self._parts):
            raise ValueError(
                f"LocalSGD's state has {len(state['fragments'])} fragments, not "
                f"{len(self._parts)}: give the same fragments="
            )
        with nullcontext() if self._quorum is None else self._quorum.loading():
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self._parts, state["fragments"], strict=True):
            part.load_state_dict(saved, self._named())
            new = part.outer.parameters.keys() - self.state.decisions.keys()
            if self._quorum is None:
                self._enter(part.outer.parameters)
            elif new:  # to agree on them would be in the way of the quorum's thread
                raise ValueError(
                    f"LocalSGD's state has the parameters {', '.join(sorted(new))}, which are "
                    "frozen here: with quorum= make them trainable before LocalSGD is made"
                )
        self.state.load_state_dict(state["compression"])
        self._under_way = None
        if state["pending"] is not None:
            index, gradient, self._countdown = state["pending"]
            self._under_way = self._parts[index], _done(_copies(gradient))
        self.local_steps, self.rounds = state["local_steps"], state["rounds"]
        self.skipped, self._dirty = state["skipped"], state["dirty"]
        self.weight = state["weight"]

    # ------------------------------------------------------------------ rounds

    def _end(self, part: Fragment, *, now: bool = False) -> None:
        """Send a fragment's movement; apply what is due.

        Args:
            part: the fragment.
            now: without overlap or delay.
        """
        last = part is self._parts[-1]
        trained = self._trained()
        renewed = last and self._differ(trained)
        moved = part.outer.moved()
        if self.delayed:
            self._apply()
        self._send(part, moved)
        later = self.overlap and not now and not renewed
        if later:
            self._countdown = self.overlap
            return
        if not self.delayed or renewed:
            self._apply()
        part.outer.write()
        if renewed:
            self._renew(trained)

    def _differ(self, trained: Mapping[str, nn.Parameter]) -> bool:
        """Whether parameters were added, removed or replaced."""
        known = {name: p for part in self._parts for name, p in part.outer.parameters.items()}
        return known.keys() != trained.keys() or any(
            known[name] is not parameter for name, parameter in trained.items()
        )

    def _renew(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Continue with other parameters: new ones join the last fragment."""
        group, rest = self.state.process_group, dict(trained)
        *others, last = self._parts
        for part in others:
            before = part.outer.parameters
            kept = {name: p for name, p in rest.items() if before.get(name) is p}
            part.outer.renew(kept, group)
            rest = {name: p for name, p in rest.items() if name not in kept}
        new = last.outer.renew(rest, group)
        self._enter({name: trained[name] for name in new})
        last.outer.write()

    def _send(self, part: Fragment, moved: Values) -> None:
        names, weight = part.outer.names, part.weight
        part.weight = 0.0

        def exchange() -> Callable[[], Values]:
            if self.weighted:
                (*weights,) = gather([weight], self.state.process_group, self.state._device)
                self.state.factors = factors([one for (one,) in weights])
            return self._reduce(moved, names)

        if self._thread is None:
            self._under_way = part, exchange()
        else:
            self._under_way = part, self._thread.submit(lambda: exchange()()).result

    def _reduce(self, moved: Values, names: Mapping[str, tuple[str, ...]]) -> Callable[[], Values]:
        """Average movements; return a function that waits for the outer gradient."""
        self.state.begin_step()
        futures = {width: self.state.reduce(moved[width], names[width]) for width in moved}
        self.state.end_step()
        return lambda: {width: future.wait() for width, future in futures.items()}

    def _apply(self) -> None:
        """Move the start by the outer gradient that is in flight, if there is one."""
        if self._under_way is None:
            return
        (part, wait), self._under_way = self._under_way, None
        self._countdown = 0
        if self._move(part, wait()) and self.overlap:
            part.outer.mix(self.mixing)

    def _move(self, part: Fragment, gradient: Values) -> bool:
        """Move a fragment's start by an outer gradient; return whether it is finite."""
        self.rounds += 1
        if all(values.isfinite().all() for values in gradient.values()):  # on all ranks alike
            part.outer.apply(gradient, self.lr)
            return True
        self.skipped += 1
        logger.warning(
            "LocalSGD: round %d is not finite on some rank; all go back to its start",
            self.rounds,
        )
        part.outer.write()
        return False

    # ------------------------------------------------------------------ quorum

    def _meet(self, moved: Values | None, weights: list[float]) -> Values:
        """Average the movements of the ranks that take part; called on the quorum's thread."""
        outer = self._parts[0].outer
        self.state.factors = factors(weights)
        # The offer itself is still needed, and the average is taken in place.
        own = _copies(moved) if moved is not None else outer.zeros()
        return self._reduce(own, outer.names)()

    def _meet_quorum(self, quorum: Quorum) -> bool:
        """Apply outer gradients that have come, and offer this rank's movement if it is due."""
        quorum.start()  # it ended with `finish`
        before = self.rounds
        while (outcome := quorum.take()) is not None:
            self._come(outcome)
        whole = self.local_steps >= self.every
        if not self._offered and (whole or quorum.wanted):
            self._offer(quorum)
            self._whole = whole
        while self._offered and self._whole and self.local_steps >= self.overlap:
            self._come(quorum.take(wait=True))
        return self.rounds > before

    def _offer(self, quorum: Quorum, *, finishing: bool = False) -> None:
        (part,) = self._parts
        if self._differ(self._trained()):
            raise Error(
                "LocalSGD: parameters were unfrozen, frozen, added or replaced, which does not go "
                "with quorum=: ranks are in different rounds. Make a new LocalSGD after finish()"
            )
        quorum.offer(part.outer.moved(), part.weight, finishing=finishing)
        part.weight, self.local_steps = 0.0, 0
        self._offered, self._void = True, False

    def _come(self, outcome: Outcome | None) -> None:
        """Apply an outer gradient; this rank may have gone on since its offer, or be late."""
        assert outcome is not None
        (part,) = self._parts
        sent = outcome.offer.moved if outcome.offer is not None else None
        if sent is None:
            self.late += 1
        else:
            self._offered = False
        if outcome.gradient is None:
            return
        before = _copies(part.outer.start)
        if not self._move(part, outcome.gradient):
            self._void = self._offered
        elif sent is not None and self.local_steps == 0:
            part.outer.write()
        else:
            part.outer.rebase(before, None if self._void else sent)

    def _finish_quorum(self, quorum: Quorum) -> None:
        while self._offered:
            self._come(quorum.take(wait=True))
        last = False
        while not last:
            if not self._offered:
                self._offer(quorum, finishing=True)
            outcome = quorum.take(wait=True)
            self._come(outcome)
            last = outcome is not None and outcome.last
        quorum.join()
        self._parts[0].outer.write()

    # ------------------------------------------------------------------ parameters

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._named().items() if p.requires_grad}

    def _named(self) -> dict[str, nn.Parameter]:
        return {clean(name): p for name, p in self._model.named_parameters()}

    def _enter(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Decide the codecs of parameters, and check that all ranks have decided alike."""
        for name, parameter in parameters.items():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self.state.add(name, own.detach())
        self.state.agree()


def _refuse_meetings(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise if the model's own wrapper reduces over ranks that are to train apart."""
    apart = set(dist.get_process_group_ranks(group))

    def refuse(what: str, ranks: set[int]) -> None:
        if len(apart & ranks) > 1:
            raise Error(
                f"LocalSGD: {what} over ranks {sorted(apart & ranks)}, which are to train apart "
                "and would meet in every step: use one of the two, or a group with one rank of "
                "each node"
            )

    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            refuse("the model is wrapped in DistributedDataParallel", set(ranks))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim in range(mesh.ndim):
                ranks = dist.get_process_group_ranks(mesh.get_group(dim))
                refuse("parameters are distributed", set(ranks))


def _current(state: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state in the present version; version 2 had no fragments."""
    if state["version"] == STATE_VERSION:
        return state
    if state["version"] != 2:
        raise ValueError(f"LocalSGD's state has version {state['version']}: not {STATE_VERSION}")
    kept = {key: state[key] for key in ("local_steps", "rounds", "skipped", "compression")}
    pending, steps = state["pending"], state["local_steps"]
    return {
        **kept,
        "version": STATE_VERSION,
        "fragments": [{**state, "weight": float(steps)}],
        "pending": None if pending is None else (0, pending, 0),
        "dirty": steps > 0 or pending is not None,
        "weight": 0.0,
    }


def _done(values: Values) -> Callable[[], Values]:
    return lambda: values


def _copies(values: Values) -> Values:
    return {width: part.clone() for width, part in values.items()}
