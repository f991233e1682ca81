"""Compression state of a model: its steps, its checkpoints, and the members of its group.

A step is `begin_step`, one `reduce` for each bucket, and `end_step`. Its residuals become current
when the next step begins, if all of its reductions completed and are finite; until then the step
can be taken back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from pycomm.arguments import number, typed
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback, Residuals, reshard, sources
from pycomm.log import warn_once
from pycomm.policy import Decision, Plan, Policy, refused_together
from pycomm.policy.exchange import gather_in_mesh
from pycomm.policy.names import few, matching, renamed
from pycomm.reduction import members, paths
from pycomm.reduction.adapter import Adapter
from pycomm.reduction.reducer import BucketReducer
from pycomm.reduction.refusals import ALL, FSDP, HSDP, refused, stays_because
from pycomm.reduction.saved import check_sizes, known, load_saved, residuals_of
from pycomm.reduction.step import Step, StepStatus
from pycomm.reduction.taken import DiscardedGradients

STATE_VERSION = 3


class CompressionState:
    """Codecs and feedback of the parameters that one group of ranks reduces.

    Collective: all ranks of the group make one. Hooks of trainers call it.

    Args:
        codec: a codec, its text ("int8", "quant:bits=4,block=64"), a `Policy`, or the text of one
            ("auto", "int4 warmup=100"). A codec leaves norms, biases and tiny parameters exact; a
            policy does what it says.
        process_group: the ranks that reduce; None: the default group.
        feedback: error feedback: True, False, or a kind with options, "decay:0.9,storage=int8"; see
            `pycomm.Feedback`. Equal on all ranks.
        seed: seed of random rounding; equal on all ranks.
        transform: what takes the place of the gradients, the `Momenta` of an optimizer; None:
            nothing does.
        adapter: what the trainer is like.

    Raises:
        Error: there is no process group.
        ValueError: an unknown codec or kind of feedback, or bad options.
        WireMismatch: ranks were given different codecs, policies, feedback or seeds; on all ranks.
    """

    def __init__(
        self,
        codec: str | Codec | Policy = "int8",
        *,
        process_group: dist.ProcessGroup | None = None,
        feedback: bool | str | Feedback | None = True,
        seed: int = 0,
        transform: Any = None,
        adapter: Adapter | None = None,
    ) -> None:
        self.adapter = adapter or Adapter()
        self.reducer = reducer = BucketReducer(
            codec,
            process_group=process_group,
            feedback=feedback,
            seed=seed,
            adapter=self.adapter,
            transform=transform,
        )
        self.process_group, self.residuals = reducer.process_group, reducer.residuals
        self.transform = transform
        self.add, self.reduce, self.wait = reducer.add, reducer.reduce, reducer.wait
        self.agree = reducer.agree
        self.discarded: DiscardedGradients | None = None
        """Observer that detects unused gradients, if the trainer has one."""
        self._rank = self.process_group.rank()  # in the group for which residuals are laid out
        self._met_in = 0 if not reducer.formed_with else -1
        """How often the group's members had been set when they compared where they stand."""
        self.stays_because = stays_because(self.adapter.trainer)
        """Reason why this state cannot go on with other members of its group; "": it can."""
        if transform is not None:
            transform.bind(self)

    # ------------------------------------------------------------------ for users

    @property
    def step(self) -> int:
        """Number of the current step, from 1."""
        return self.reducer.step.number

    @property
    def plan(self) -> Plan:
        """The policy, and the codec of each parameter."""
        return self.reducer.plan

    @property
    def decisions(self) -> dict[str, Decision]:
        """The codec of each parameter, by name."""
        return self.plan.decisions

    @property
    def codecs(self) -> dict[str, Codec]:
        """Their codecs alone."""
        return {name: decision.codec for name, decision in self.decisions.items()}

    @property
    def overflows(self) -> int:
        """Steps whose result was not finite; they have left the residuals as they were."""
        self.reducer.settle_deferred()
        return self.plan.overflows

    def __repr__(self) -> str:
        what = f"{self.plan.policy}, step={self.step}, overflows={self.overflows}"
        return f"{type(self).__name__}({what})"

    def __deepcopy__(self, memo: dict[int, Any]) -> DetachedState:
        self._warn_of_copies()
        return DetachedState(str(self.plan.policy))

    def __reduce__(self) -> tuple[Any, ...]:
        self._warn_of_copies()
        return DetachedState, (str(self.plan.policy), self.state_dict())

    def _warn_of_copies(self) -> None:
        warn_once(
            f"rank {self.process_group.rank()}: a model that is compressed was copied or saved "
            "whole; the copy's gradients travel exactly until pycomm.compress is called on it. A "
            "checkpoint keeps the residuals by state.state_dict()"
        )

    def summary(self) -> str:
        """Return the current decisions, a line for each codec and reason, their changes, the paths
        of the buckets that were reduced, the nodes by which they were, and the memory of the
        residuals on this rank."""
        reducer = self.reducer
        taken = paths.summary(reducer.buckets.values())
        nodes = f"by nodes: {reducer.nodes}" if reducer.nodes else reducer.flat_because
        lines = [self.plan.summary(), taken, nodes, reducer.memory_text()]
        return "\n".join(filter(None, lines))

    @property
    def residual_bytes(self) -> int:
        """Memory of the residuals on this rank when all of them have been written, in bytes."""
        return self.reducer.residual_bytes

    def set_policy(self, codec: str | Codec | Policy) -> None:
        """Change the codec or policy from the next step on; collective, between two steps.

        Residuals are kept and sent with the new codecs, completely if a parameter becomes exact.
        The kind of feedback stays. "none" makes gradients exact, after a step that also sends what
        is left of all residuals.

        Args:
            codec: as for `pycomm.compress`, equal on all ranks. Steps of a warm-up or a schedule
                count from the start of training.

        Raises:
            ValueError: an unknown codec, or one that a coded momentum cannot use; the state is
                unchanged.
            WireMismatch: ranks were given different codecs or policies.
        """
        self.settle()
        of = Policy.of if self.transform is None else self.transform.policy_of
        try:
            with refused_together(*self.plan.groups):
                self.plan.follow(of(codec), self.reducer.device)
        finally:
            self.reducer.forget_buckets()  # whose codecs may have changed even if ranks disagree

    def _check_idle(self) -> None:
        if first := self.reducer.step.busy_until:
            raise Error(
                f"rank {self.process_group.rank()}: gradients are on the way, which use the "
                f"residuals: call {first} first"
            )

    def residual_norms(self) -> dict[str, tuple[float, float]]:
        """Return the L2 norms of each parameter's worker and owner residual after the last step."""
        self.settle(last=False)
        return self.reducer.factors.norms(self.residuals) if self.residuals else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint; between two steps. Every rank saves its own.

        Gradients are not part of a checkpoint, so it excludes the residuals of gradients that no
        optimizer has used yet.

        The keys contain the rank, so torch.distributed.checkpoint keeps the entries of all ranks
        apart; the entries are tuples, which it saves and loads whole. So ``dcp.save`` and
        ``dcp.load`` take the state itself if the number of ranks stays the same; `load_checkpoint`
        reads it on any number of ranks.
        """
        self.settle(last=False)
        residuals = self.residuals.state_dict() if self.residuals else {}
        others = self.transform.state_dict() if self.transform else {}
        # The global rank: every replica group has a rank 0.
        own = {f"rank{dist.get_rank()}": (self.step, residuals)}
        return {"about": (self._common(),), **own, **others}

    def _common(self) -> dict[str, Any]:
        """Return what is equal on all ranks."""
        return {
            "version": STATE_VERSION,
            "world_size": self.process_group.size(),
            "seed": self.reducer.seed,
            "step": self.step,
            "plan": self.plan.state_dict(),
            "factors": self.reducer.factors.state_dict(),
            **self.adapter.saved(),
        }

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, on the same or another number of ranks.

        Args:
            states: this rank's state; on another number of ranks the states of all ranks.

        Raises:
            ValueError: the state is of another version or model, ranks are missing, or this rank's
                entry was not loaded with the rest.
        """
        self._check_idle()
        for state in states:
            typed("state", state, Mapping)
        saved = {key: value for state in states for key, value in state.items()}
        if "about" not in saved:
            raise ValueError(
                "this is no state of pycomm, which has an entry 'about': it has "
                f"{', '.join(map(str, saved)) or 'nothing'}"
            )
        (about,) = saved["about"]
        if about["version"] != STATE_VERSION:
            version = about["version"]
            raise ValueError(
                f"the hook's state has version {version}, not {STATE_VERSION}: load it with the "
                "pycomm that has saved it"
            )
        entries = self._entries(saved, about)  # what does not fit raises before there is a change
        if self.transform is not None:
            self.transform.drop_step()
        self._load_common(about)
        # Those of the step after which they were saved: the next step may have others.
        codecs = self.plan.codecs_of(self.step)
        for residuals, mine in entries:
            residuals.load_state_dict(mine, codecs)
        self.reducer.forget_buckets()
        self.adapter.loaded(about)

    def _load_common(self, about: Mapping[str, Any]) -> None:
        """Restore what is equal on all ranks; own residuals get their units."""
        self.settle()
        plan, units = dict(about["plan"]), about["factors"]
        names = matching({*plan["escalated"], *chain(*units.values())}, self.reducer.numbers)
        plan["escalated"] = renamed(plan["escalated"], names)
        self.plan.load_state_dict(plan)
        self.reducer.seed, self.reducer.step.number = about["seed"], about["step"]
        self.plan.step = self.step
        self.reducer.factors.load_state_dict(units, names, self.reducer.shape, self.residuals)

    def _entries(
        self, saved: Mapping[str, Any], about: Mapping[str, Any]
    ) -> list[tuple[Residuals, Mapping[str, Any]]]:
        """Return all residuals of this rank, each with what it takes over of a saved state, by the
        parameters' names here."""
        before, ranks = about["world_size"], self.process_group.size()
        rank, layout = self.process_group.rank(), self.adapter.layout
        needed = self._needed(before)
        if missing := [key for key in chain(*needed.values()) if key not in saved]:
            raise ValueError(
                f"the hook's state was saved by {before} ranks and is loaded by rank {rank} of "
                f"{ranks}, which needs what {', '.join(missing)} has saved: each rank has "
                "residuals of its own"
            )
        parts = {name: layout.part(one).parameter for name, one in self.decisions.items()}
        sizes = {name: (layout.rows, part.numel) for name, part in parts.items()}
        found = []
        for residuals, keys in needed.items():
            own = [residuals_of(saved, key, about["step"]) for key in keys]
            # Renamed before they are resharded: the cuts are known by the names here.
            tell = rank == 0 and residuals is self.residuals
            own = known(own, self.reducer.numbers, tell=tell)
            if before != ranks:
                own = [reshard(own, before, ranks, layout.cuts(self.decisions))]
            check_sizes(own[0], sizes)
            residuals.check_kind(own[0])
            found.append((residuals, own[0]))
        return found

    def _needed(self, before: int) -> dict[Residuals, list[str]]:
        """Return the keys of the entries of `before` ranks that each of this rank's residuals
        needs."""
        if self.residuals is None:
            return {}
        rank, ranks = self.process_group.rank(), self.process_group.size()
        numbers = [dist.get_rank()]
        if before != ranks:
            if ranks != dist.get_world_size():
                option = "residuals on another number of ranks"
                raise ValueError(refused(HSDP, option, before=before, ranks=ranks))
            numbers = sources(before, rank, ranks)
        kinds = {self.residuals: "rank"} | ({self.transform.own: "own"} if self.transform else {})
        return {residuals: [f"{kind}{n}" for n in numbers] for residuals, kind in kinds.items()}

    def adopt_state(self, previous: CompressionState | None) -> None:
        """Continue from the state of a group that has lost ranks, or has new ones; collective.

        It is called in the group of now, as `torch.distributed.shrink_group` or
        `pycomm.elastic.reconfigure` makes it; each rank passes its old state. Codecs, schedules and
        the number of the step are those of the first rank that has taken the most steps. Residuals
        of the remaining ranks are kept, for the average over as many ranks as there are now; those
        of the lost ranks are lost.

        Args:
            previous: the old state, which cannot be used afterwards; None: this rank is new.

        Raises:
            ValueError: ranks shard the parameters (FSDP2), so the lost ranks' shards are lost.

        Example:
            >>> dist.shrink_group(error.ranks, shrink_flags=1)  # doctest: +SKIP
            >>> model = DistributedDataParallel(model.module)  # doctest: +SKIP
            >>> state, previous = pycomm.compress(model, "int4"), state  # doctest: +SKIP
            >>> state.adopt_state(previous)  # doctest: +SKIP
        """
        typed("previous", previous, CompressionState, None)
        self._check_idle()
        if previous is not None:
            previous.reducer.step.busy_until = ""  # a step that its group has not ended
        if self.adapter.layout.cuts(self.decisions):
            raise ValueError(refused(FSDP, "survivors that adopt a state"))
        self._meet(previous)

    def follow_members(self) -> None:
        """Continue with the group's members after they have changed; collective among them.

        `pycomm.elastic.reconfigure` changes them in place. The next backward calls this, so a
        caller needs it only to see errors earlier. Residuals, codecs and steps are treated as by
        `adopt_state`; a member that has taken no step is new, and owes nothing.

        Raises:
            WireMismatch: members have other models, codecs, policies or options; raised on all.
            Error: this state cannot continue, for the reason that the text gives.
        """
        if self.stays_because and self.reducer.formed() != self.reducer.formed_with:
            raise Error(
                f"rank {self.process_group.rank()}: the members of the process group have changed, "
                f"and {self.stays_because}"
            )
        is_new = self.adapter.is_new()
        if not self.stays_because and self.reducer.formed() != self._met_in:
            self._meet(None if is_new else self)
        elif is_new and self.residuals:
            self.residuals.load_state_dict({})
            self.reducer.forget_buckets(alone=True)

    def _meet(self, previous: CompressionState | None) -> None:
        """Take over the furthest member's common state; keep the own residuals of `previous`."""
        group, ranks = self.process_group, self.process_group.size()
        before, own, units = ranks, {}, self.reducer.factors.current
        if previous is not None:
            previous.settle(last=previous is self)
            units = previous.reducer.factors.current
            if previous.residuals is not None:
                before, own = previous.residuals.ranks, previous.residuals.state_dict()
        formed = self.reducer.formed()
        standing = members.MemberState(
            step=previous.step if previous is not None else 0,
            agreed=formed == self.reducer.formed_with and previous in (None, self),
            rebuilds=self.adapter.rebuilds(),
            rank=previous._rank if previous is not None else -1,
            ranks=before,
        )
        standings = members.exchange_states(standing, group, self.reducer.device)
        root = members.source(standings)
        if all(one.agreed and one.step == standings[root].step for one in standings):
            self._met_in = formed  # these members have made their states together
            return
        common = (previous or self)._common() if group.rank() == root else None
        common = members.broadcast_object(common, root, group, self.reducer.device)
        if self.residuals:
            self.residuals.check_kind(own)
        self._load_common(common)
        self.adapter.loaded({})
        saved = self.plan.state_dict()
        self.plan.follow(self.plan.policy, self.reducer.device, saved=saved)
        if self.residuals:
            if not members.in_place(standings):
                own = reshard([own], before, ranks)
            self.residuals.ranks = ranks
            self.residuals.load_state_dict(own, self.codecs)
            now, self.reducer.factors.current = self.reducer.factors.current, units
            self.reducer.factors.use(now, self.reducer.shape, self.residuals)
        self.reducer.forget_buckets()
        self.reducer.formed_with, self._met_in, self._rank = formed, formed, group.rank()

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "pycomm") -> None:
        """Continue from a checkpoint of torch.distributed.checkpoint; collective.

        Args:
            checkpoint_id: the folder, as ``dcp.save`` got it.
            key: key of the state in ``dcp.save({key: state.state_dict()}, ...)``, by any number of
                ranks.

        Raises:
            ValueError: the checkpoint has no state under this key.
        """
        self._check_idle()
        about = load_saved(checkpoint_id, key, ["about"], self.process_group)["about"]
        needed = self._needed(about[0]["world_size"]).values()
        parts = ["about", *chain(*needed)]
        self.load_state_dict(load_saved(checkpoint_id, key, parts, self.process_group))

    def rescale(
        self, factor: float, names: Iterable[str] | None = None, *, momentum: bool = False
    ) -> None:
        """Multiply residuals, which are in the units of gradients at one learning rate; between
        two steps.

        When the learning rate changes from a to b, ``rescale(a / b)`` lets residuals move the
        parameters as far as they would have (Zheng et al. 2019, algorithm 1). When a loss scale
        changes from a to b, ``rescale(b / a, momentum=True)`` gives them the unit of the new
        gradients.

        Args:
            factor: positive number.
            names: names of the parameters; None: all.
            momentum: multiply feedback's momentum, too, if it has the kind momentum.
        """
        factor = number("factor", factor)
        if not 0 < factor < 2.0**128:
            raise ValueError(f"factor={factor} is not above 0, or too large for float32")
        if isinstance(names, str):
            raise TypeError(f"names={names!r} is one text: want names in a list")
        if names is not None:
            given = list(names)
            found = matching(given, self.decisions)  # a wrapper puts "module." before them
            if unknown := [name for name in given if name not in found]:
                raise ValueError(f"names={few(unknown)}: names here are {few(self.decisions)}")
            names = found.values()
        self.settle()
        if self.residuals:
            self.residuals.scale(factor, names, momentum=momentum)

    def discard(self) -> None:
        """Declare that the gradients of the last backward are thrown away; all ranks call it.

        The residuals become what they were before that backward. Call it after the backward and
        before the next one. If `zero_grad` follows without an optimizer step, that is detected
        without this call; see docs/feedback.md.
        """
        if self.reducer.has_results:  # there was a backward, and nothing has settled it
            self.reducer.step.status = StepStatus.ROLLED_BACK

    # ------------------------------------------------------------------ for hooks

    @property
    def is_open(self) -> bool:
        """Whether a step has begun, and not all of its buckets have been given to `reduce`."""
        return self.reducer.step.status is StepStatus.OPEN

    def begin_step(self, *, joined: bool = False) -> None:
        """Settle the last step and begin the next, before its first `reduce`, on all ranks.

        Args:
            joined: as of `Step`.

        Raises:
            Error: the group has other members now, and this state cannot follow; raised on all
                ranks. Or a CUDA graph is being captured.
            WireMismatch: the group has other members now, with other models, codecs or options;
                raised on all ranks.
        """
        self._check_capture()
        if self.transform is not None:
            self.transform.before_step(joined=joined)
        if self.stays_because:
            self.follow_members()  # raises if they have changed
        reducer, before = self.reducer, self.reducer.step
        if self.discarded:
            before.discarded |= self.discarded.begin(before.pieces)
        self.settle(ahead=True)
        self.follow_members()
        number = (before.number + 1) % 2**32
        finite = before.status is not StepStatus.OVERFLOWED
        changed = self.plan.advance(number, reducer.device, finite=finite)
        reducer.forget_buckets(changed)
        reducer.step = Step(number, joined=joined, parameters=len(self.decisions))
        anew = bool(changed) or not reducer.buckets or before.parameters != len(self.decisions)
        reducer.begin_factors(anew=anew)
        if self.transform is not None:
            self.transform.step_begun()

    def _check_capture(self) -> None:
        device = self.reducer.device
        module = None if device.type == "cpu" else torch.get_device_module(device)
        asks = getattr(module, "is_current_stream_capturing", None)
        if asks and asks():
            raise Error(
                f"rank {self.process_group.rank()}: {refused(ALL, 'a captured CUDA graph')}"
            )

    def end_step(self) -> None:
        """End a step: every bucket of it has been given to `reduce`.

        Ranks that share parameters agree whether it is finite.
        """
        reducer, step = self.reducer, self.reducer.step
        try:
            reducer.end_buckets()
        except BaseException:
            step.status = StepStatus.ROLLED_BACK  # so that no later call takes it for reduced
            raise
        if step.status is StepStatus.OPEN:
            step.status = StepStatus.REDUCED
        if self.discarded:
            self.discarded.end(step.pieces, elsewhere=step.joined)
        if self.transform is not None:
            self.transform.step_ended()
        _, *shared = reducer.layout.groups(self.process_group)
        if shared:
            verdict = torch.tensor(reducer.all_finite(), dtype=torch.uint8, device=reducer.device)
            dist.all_reduce(verdict, dist.ReduceOp.MIN, group=shared[0])
            # Neither 0 nor the bytes of a failure.
            step.checks = [lambda: int(verdict) == 1]

    def settle(self, *, last: bool = True, ahead: bool = False) -> None:
        """Wait for the last step; keep its residuals if it completed and is finite.

        Args:
            last: decide about all residuals. Else those of gradients that no optimizer has used yet
                remain undecided and hidden until one does or the gradients are thrown away.
            ahead: do not wait for a device that can decide itself; see `SideStream`.

        Raises:
            Error: an operation on device tensors has failed, for which only streams had waited; or
                a step is under way.
        """
        self._check_idle()
        reducer, step = self.reducer, self.reducer.step
        if ahead and self._may_defer():
            self._defer()
            return
        if not ahead or reducer.has_results:
            reducer.settle_deferred()
        if not reducer.has_results:
            return
        finite = reducer.all_finite() or step.status is StepStatus.OPEN  # which an error has ended
        came = finite and step.status is StepStatus.REDUCED
        waiting: Set[str] = set()
        if came and not last and self.discarded:
            waiting = self.discarded.waiting(step.pieces)
        if came:
            step.unused |= self.adapter.unused()
        if self.residuals:
            names = step.pieces.keys() - waiting
            kept = step.kept() - waiting if came else set()
            self.residuals.take_back(names - kept)
            self.residuals.commit(kept, step.number)
            self._drop_flushed(kept)
        if waiting:
            step.pieces = {name: step.pieces[name] for name in waiting}
            step.checks = [lambda: True]
            return
        self.plan.overflows += not finite
        step.end(finite=finite, committed=came)
        if not finite:
            reducer.check_operations()

    # ------------------------------------------------------------------ ahead of the device

    def _may_defer(self) -> bool:
        """Whether the device alone decides about the last step, and about all residuals alike."""
        side, step = self.reducer.side, self.reducer.step
        if side is None or not side.open:
            return False
        step.unused |= self.adapter.unused()
        return (
            self.adapter.defers
            and step.status is StepStatus.REDUCED
            and not (step.checks or step.found_inf or step.flushed)
            and not (step.discarded or step.unused)
            and not (self.plan.judges or side.is_full)
            and side.ahead in (None, step.pieces.keys())
            and not any(
                p.residual is not None and p.residual.has_moved for p in step.pieces.values()
            )
        )

    def _defer(self) -> None:
        """Commit the last step as if it were finite, and let the device keep account."""
        side, step = self.reducer.side, self.reducer.step
        assert side is not None
        names = set(step.pieces)
        side.defer(names)
        if self.residuals:
            self.residuals.commit(names, step.number)
        step.end(finite=True, committed=True)
        self.plan.overflows += side.hear()
        self.reducer.check_operations()

    def on_any_rank(self, found: bool) -> bool:
        """Return whether any rank has found something, also of those that share parameters;
        collective."""
        plan, device = self.plan, self.reducer.device
        return any(one for (one,) in gather_in_mesh([found], plan.groups, device))

    def _drop_flushed(self, names: Set[str]) -> None:
        """Drop the residuals that have been sent with a codec that leaves no new error."""
        assert self.residuals is not None
        flushed, residuals = self.reducer.step.flushed & names, self.residuals
        sent = {name for name in flushed if residuals[name].worker is not None}
        for name in sent:
            residuals.drop(name)
        self.reducer.forget_buckets(sent, alone=True)


class DetachedState:
    """A copied or pickled state, which has no process group.

    Process groups cannot be copied or pickled, and DDP registers no hook with the reducer of a
    copy. So a copy's gradients travel exactly until `pycomm.compress` is called on it.

    Args:
        text: the policy's text.
        saved: the state's ``state_dict()``; None: a copy within the process, which has no
            residuals.
    """

    def __init__(self, text: str, saved: dict[str, Any] | None = None) -> None:
        self.text = text
        self._saved = saved

    def __repr__(self) -> str:
        return f"DetachedState({self.text})"

    def state_dict(self) -> dict[str, Any]:
        """Return the pickled state's `state_dict`, for `load_state_dict` of another state.

        Raises:
            Error: this is a copy, which has no residuals.
        """
        if self._saved is None:
            raise Error(
                "a copy of a model has no residuals: take the state_dict() of the state that "
                "pycomm.compress has returned"
            )
        return self._saved
