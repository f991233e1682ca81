"""Compression state of a model, the base of all hooks: codecs, residuals and buckets.

A step is `begin_step`, one `reduce` for each bucket, and `end_step`. Its residuals become current
when the next step begins, if all of its reductions completed and are finite; until then the step
can be taken back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from pycomm.arguments import number, typed
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Cut, Feedback, reshard, sources
from pycomm.log import tell, warn_once
from pycomm.policy import Policy, refused_together
from pycomm.policy.exchange import gather
from pycomm.policy.names import few, matching, renamed
from pycomm.reduction import members, paths
from pycomm.reduction.detached import DetachedState
from pycomm.reduction.factors import Matrix, is_look, names_in
from pycomm.reduction.nodes import flat_text
from pycomm.reduction.reducer import BucketReducer
from pycomm.reduction.saved import check_sizes, known, load_saved, residuals_of
from pycomm.reduction.step import Step, StepStatus
from pycomm.reduction.taken import DiscardedGradients
from pycomm.reduction.transform import Transform

STATE_VERSION = 1


class CompressionState(BucketReducer):
    """Codecs and feedback of the parameters that one group of ranks reduces.

    Collective: all ranks of the group make one. Hooks of DDP, FSDP2 and the outer steps of LocalSGD
    are thin layers above it.

    Args:
        codec: a codec, its text ("int8", "quant:bits=4,block=64"), a `Policy`, or the text of one
            ("auto", "int4 warmup=100"). A codec leaves norms, biases and tiny parameters exact; a
            policy does what it says.
        process_group: the ranks that reduce; None: the default group.
        feedback: error feedback: True, False, or a kind with options, "decay:0.9,storage=int8"; see
            `pycomm.Feedback`. Equal on all ranks.
        seed: seed of random rounding; equal on all ranks.
        transform: what takes the place of the gradients; an optimizer gives it.

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
        transform: Transform | None = None,
    ) -> None:
        super().__init__(
            codec, process_group=process_group, feedback=feedback, seed=seed, transform=transform
        )
        self._taken: DiscardedGradients | None = None
        """Observer that detects unused gradients, if the hook has one."""
        self._told = 0  # bytes of residuals that were reported, the most so far
        self._rank = self.process_group.rank()  # in the group for which residuals are laid out
        self._met_in = 0 if not self._formed_with else -1
        """How often the group's members had been set when they compared where they stand."""
        self.stays_because = ""
        """Reason why this state cannot go on with other members of its group; "": it can."""
        self.busy = False
        """Reductions of a step run, which a hook that does not wait for them in backward says."""
        if transform is not None:
            transform.bind(self)

    # ------------------------------------------------------------------ for users

    defers = False
    """On a device a step may begin before the host knows whether the last one is finite. Whoever
    reads residuals on the host between two steps cannot have that."""

    @property
    def overflows(self) -> int:
        """Steps whose result was not finite; they have left the residuals as they were."""
        self._settle_deferred()
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
        taken = paths.summary(self._buckets.values())
        nodes = f"by nodes: {self._nodes}" if self._nodes else ""
        lines = [self.plan.summary(), taken, nodes, self._memory_text()]
        if self._flat:
            values = sum(one.parameter.numel for one in self.decisions.values())
            payload = self.plan.report().payload_bytes
            lines.append(flat_text(self._flat, payload, values, scatters=self.rows > 1))
        return "\n".join(filter(None, lines))

    def agree(self) -> None:
        """Check that all ranks have decided alike, and report the residuals' memory; collective.

        The report comes before any residual is allocated. See `Plan.agree`.
        """
        super().agree()
        taken = self.residual_bytes
        if taken > self._told and self.process_group.size() > 1:
            self._told = taken  # so that trials of "auto", and schedules, report it once
            if self.process_group.rank() == 0:
                tell(self._memory_text())

    @property
    def residual_bytes(self) -> int:
        """Memory of the residuals on this rank when all of them have been written, in bytes."""
        if self.residuals is None:
            return 0
        parts = [self.part(decision) for decision in self.decisions.values()]
        form = self.rows, self.shards
        each = (self.residuals.bytes_for(p.codec, p.parameter.numel, *form) for p in parts)
        return sum(each) * (self.transform.kept_alike if self.transform else 1)

    def _memory_text(self) -> str:
        """Return the memory of the residuals as a line of text; empty if there are none."""
        taken = self.residual_bytes
        if not taken:
            return ""
        values = sum(decision.parameter.numel for decision in self.decisions.values())
        return (
            f"feedback: residuals take up to {taken / 1e6:.3g} MB on each rank, "
            f"{taken / values:.2g} bytes for each of {values} values "
            f"({self.residuals.rule if self.residuals else None})"
        )

    def set_policy(self, codec: str | Codec | Policy) -> None:
        """Change the codec or policy from the next step on; collective, between two steps.

        Residuals are kept and sent with the new codecs, completely if a parameter becomes exact.
        The kind of feedback stays. "none" makes gradients exact, after a step that also sends what
        is left of all residuals.

        Args:
            codec: as for `pycomm.compress`, equal on all ranks. Steps of a warm-up or a schedule
                count from the start of training.

        Raises:
            ValueError: an unknown codec, or one that this wrapper or feedback cannot use; the state
                is unchanged.
            WireMismatch: ranks were given different codecs or policies.
        """
        self.settle()
        with refused_together(self.process_group):
            self.plan = self.plan.followed_by(Policy.of(codec), self._device)
        self._forget_buckets()

    def _check_idle(self) -> None:
        if self.busy:
            raise Error(
                f"rank {self.process_group.rank()}: gradients are on the way, which use the "
                "residuals: call optimizer.step() or optimizer.synchronize() first"
            )

    def residual_norms(self) -> dict[str, tuple[float, float]]:
        """Return the L2 norms of each parameter's worker and owner residual after the last step."""
        self.settle(last=False)
        return self._factors.norms(self.residuals) if self.residuals else {}

    def residual_ages(self) -> dict[str, int]:
        """Return the number of steps that each residual has waited; see `Residuals.ages`."""
        self.settle(last=False)
        return self.residuals.ages(self.step) if self.residuals else {}

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
        return {**self._common(), f"rank{dist.get_rank()}": (self.step, residuals), **others}

    def _common(self) -> dict[str, Any]:
        """Return the entries of `state_dict` that are equal on all ranks."""
        about = {
            "version": STATE_VERSION,
            "world_size": self.process_group.size(),
            "seed": self.seed,
            "step": self.step,
            "plan": self.plan.state_dict(),
            "factors": self._factors.state_dict(),
        }
        return {"about": (about,), "factors": (self._exchanges.memory.state_dict(),)}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Restore the state from `state_dict`, on the same or another number of ranks.

        Args:
            states: this rank's state; on another number of ranks the states of all ranks.

        Raises:
            ValueError: the state is of another version or model, ranks are missing, or this rank's
                entry was not loaded with the rest.
        """
        self._check_idle()
        if self.transform is not None:
            self.transform.drop_step()
        for state in states:
            typed("state", state, Mapping)
        saved = {key: value for state in states for key, value in state.items()}
        if "about" not in saved:
            raise ValueError(
                "this is no state of pycomm, which has an entry 'about': it has "
                f"{', '.join(map(str, saved)) or 'nothing'}"
            )
        (about,), (factors,) = saved["about"], saved["factors"]
        if about["version"] != STATE_VERSION:
            version = about["version"]
            raise ValueError(
                f"the hook's state has version {version}, not {STATE_VERSION}: load it with the "
                "pycomm that has saved it"
            )
        own = self._own_residuals(saved, about) if self.residuals else {}
        self._load_common(about, factors)
        if self.residuals:
            self.residuals.load_state_dict(own, self.codecs)
        self._forget_buckets()
        if self.transform is not None:
            self.transform.load_state_dict(saved)

    def _load_common(self, about: Mapping[str, Any], factors: Mapping[str, Any]) -> None:
        """Restore the entries that are equal on all ranks; own residuals get their units."""
        self.settle()
        self.seed, self.step = about["seed"], about["step"]
        plan, units = dict(about["plan"]), about.get("factors", {})
        known = {*factors, *plan["escalated"], *names_in(units)}
        names = matching(known, self._numbers)
        plan["escalated"] = renamed(plan["escalated"], names)
        self.plan.load_state_dict(plan)
        self._exchanges.memory.load_state_dict(renamed(factors, names))
        self._factors.load_state_dict(units, names, self._shape, self.residuals)

    def _own_residuals(self, saved: Mapping[str, Any], about: Mapping[str, Any]) -> Any:
        """Return the residuals for this rank, by the parameters' names here."""
        assert self.residuals is not None
        before, ranks = about["world_size"], self.process_group.size()
        needed = self.needed(before)
        others = self.transform.keys(before) if self.transform else []
        if missing := [key for key in (*needed, *others) if key not in saved]:
            raise ValueError(
                f"the hook's state was saved by {before} ranks and is loaded by rank "
                f"{self.process_group.rank()} of {ranks}, which needs what {', '.join(missing)} "
                "has saved: each rank has residuals of its own"
            )
        own = [residuals_of(saved, key, about["step"]) for key in needed]
        # Renamed before they are resharded: the cuts are known by the names here.
        own = known(own, self._numbers, tell=self.process_group.rank() == 0)
        return self.resharded(own, before)

    def resharded(self, own: Sequence[Any], before: int) -> Any:
        """Return this rank's residuals from those of `before` ranks that it takes over."""
        assert self.residuals is not None
        ranks = self.process_group.size()
        (mine,) = own if before == ranks else [reshard(own, before, ranks, self._cuts())]
        parts = {name: self.part(decision).parameter for name, decision in self.decisions.items()}
        sizes = {name: (self.rows, part.numel) for name, part in parts.items()}
        check_sizes(mine, sizes)
        return mine

    def _cuts(self) -> dict[str, Cut]:
        """Return how ranks shard the parameters; empty: each rank has all of them."""
        return {}

    def needed(self, before: int) -> list[str]:
        """Return the keys of the entries of `before` ranks that this rank needs."""
        if self.residuals is None:
            return []
        if before == self.process_group.size():
            return [f"rank{dist.get_rank()}"]
        if self.process_group.size() != dist.get_world_size():
            raise ValueError(
                f"the hook's state was saved by groups of {before} ranks; groups that are not the "
                f"whole world can only go on with as many, not {self.process_group.size()}"
            )
        rank, ranks = self.process_group.rank(), self.process_group.size()
        return [f"rank{r}" for r in sources(before, rank, ranks)]

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
            previous.busy = False  # a step that its group has not ended
        if self._cuts():
            raise ValueError(
                "ranks share these parameters, and the shards of lost ranks are gone with them; "
                "go on from a checkpoint, with load_checkpoint"
            )
        self._meet(previous)
        if self.transform is not None:
            self.transform.adopted()

    def follow_members(self) -> None:
        """Continue with the group's members after they have changed; collective among them.

        `pycomm.elastic.reconfigure` changes them in place. The next backward calls this, so a
        caller needs it only to see errors earlier. Residuals, codecs and steps are treated as by
        `adopt_state`; a member that has taken no step is new, and owes nothing.

        Raises:
            WireMismatch: members have other models, codecs, policies or options; raised on all.
            Error: this state cannot continue, for the reason that the text gives.
        """
        if self.stays_because and self._formed() != self._formed_with:
            raise Error(
                f"rank {self.process_group.rank()}: the members of the process group have changed, "
                f"and {self.stays_because}"
            )
        if not self.stays_because and self._formed() != self._met_in:
            self._meet(self)

    def _meet(self, previous: CompressionState | None) -> None:
        """Take over the furthest member's common state; keep the own residuals of `previous`."""
        group, ranks = self.process_group, self.process_group.size()
        before, own, units = ranks, {}, self._factors.current
        if previous is not None:
            previous.settle(last=previous is self)
            units = previous._factors.current
            if previous.residuals is not None:
                before, own = previous.residuals.ranks, previous.residuals.state_dict()
        formed = self._formed()
        standing = members.MemberState(
            step=previous.step if previous is not None else 0,
            agreed=formed == self._formed_with and previous in (None, self),
            rebuilds=self._rebuilds(),
            rank=previous._rank if previous is not None else -1,
            ranks=before,
        )
        standings = members.exchange_states(standing, group, self._device)
        root = members.source(standings)
        if all(one.agreed and one.step == standings[root].step for one in standings):
            self._met_in = formed  # these members have made their states together
            return
        common = (previous or self)._common() if group.rank() == root else None
        common = members.broadcast_object(common, root, group, self._device)
        (about,), (factors,) = common["about"], common["factors"]
        self._load_common(about, factors)
        self.plan.step = self.step
        self.plan = self.plan.followed_by(
            self.plan.policy, self._device, saved=self.plan.state_dict()
        )
        if self.residuals:
            if not members.in_place(standings):
                own = reshard([own], before, ranks)
            self.residuals.clear()
            self.residuals.ranks = ranks
            self.residuals.load_state_dict(own, self.codecs)
            now, self._factors.current = self._factors.current, units
            self._factors.use(now, self._shape, self.residuals)
        self._forget_buckets()
        self._formed_with, self._met_in, self._rank = formed, formed, group.rank()

    def _rebuilds(self) -> bool:
        """Return whether a wrapper makes new buckets after the next backward."""
        return False

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "pycomm") -> None:
        """Continue from a checkpoint of torch.distributed.checkpoint; collective.

        Args:
            checkpoint_id: the folder, as ``dcp.save`` got it.
            key: key of the state in ``dcp.save({key: state.state_dict()}, ...)``, by any number of
                ranks.

        Raises:
            ValueError: the checkpoint has nothing under this key.
        """
        self._check_idle()
        about = load_saved(checkpoint_id, key, ["about"], self.process_group)["about"]
        before = about[0]["world_size"]
        others = self.transform.keys(before) if self.transform else []
        parts = ["about", "factors", *self.needed(before), *others]
        saved = load_saved(checkpoint_id, key, parts, self.process_group)
        self.load_state_dict(saved)

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
        if factor <= 0:
            raise ValueError(f"factor={factor} is not above 0")
        if isinstance(names, str):
            raise TypeError(f"names={names!r} is one text: want names in a list")
        self.settle()
        if self.residuals:
            self.residuals.scale(factor, names, momentum=momentum)

    def discard(self) -> None:
        """Declare that the gradients of the last backward are thrown away; all ranks call it.

        The residuals become what they were before that backward. Call it after the backward and
        before the next one. If `zero_grad` follows without an optimizer step, that is detected
        without this call; see docs/feedback.md.
        """
        if self._has_results:  # there was a backward, and nothing has settled it
            self._current.status = StepStatus.ROLLED_BACK

    # ------------------------------------------------------------------ for hooks

    def begin_step(self, *, absent: bool = False) -> None:
        """Settle the last step and begin the next, before its first `reduce`, on all ranks.

        Args:
            absent: this rank has no data in this step.

        Raises:
            Error: the group has other members now, and this state cannot follow; raised on all
                ranks. Or a CUDA graph is being captured.
            WireMismatch: the group has other members now, with other models, codecs or options;
                raised on all ranks.
        """
        self._check_capture()
        if self.transform is not None:
            self.transform.before_step()
        if self.stays_because:
            self.follow_members()  # raises if they have changed
        before = self._current
        if self._taken:
            before.discarded |= self._taken.begin(before.pieces)
        self.settle(ahead=True)
        self._exchanges.forget()
        self.follow_members()
        self.step = (self.step + 1) % 2**32
        changed = self.plan.advance(self.step, self._device, finite=before.finite)
        self._forget_buckets(changed)
        step = self._current = Step(absent=absent, parameters=len(self.decisions))
        anew = bool(changed) or not self._buckets or before.parameters != step.parameters
        if self._factors.moved or anew:
            self._begin_factors()
        step.looks = (self.transform is None and self.process_group.size() > 1) and (
            is_look(self.step) or (anew and not self._factors.knows(self._matrices()))
        )
        if step.looks:
            self._factors.start_look()
        if self.transform is not None:
            self.transform.step_begun()

    def _matrices(self) -> dict[str, Matrix]:
        """Return all parameters that may get factors now."""
        found = {name: self.matrix(name) for name in self.decisions}
        return {name: matrix for name, matrix in found.items() if matrix is not None}

    def _begin_factors(self) -> None:
        new = self._factors.begin(self.matrix, self._shape, self.residuals, self._settle_deferred)
        if new:
            named, span = few(sorted(new)), self._factors.span(new)
            self.plan.events.append(
                f"step {self.step}: rows or columns differ, and are divided by {span} before they "
                f"are coded: {named}"
            )

    def _check_capture(self) -> None:
        if self._device.type != "cpu" and _captures(self._device):
            raise Error(
                f"rank {self.process_group.rank()}: a step with compressed gradients cannot be "
                "part of a CUDA graph, since a replay would use the residuals, the seed and the "
                "step of the capture; capture the model alone (torch.cuda.make_graphed_callables)"
            )

    def end_step(self) -> None:
        """End a step: every bucket of it has been given to `reduce`."""
        step = self._current
        if step.looks:
            self._factors.end(self._matrices(), self._all_groups, self._device)
            step.looks = False
        self._exchanges.finish()
        step.reduced()
        if self._taken:
            self._taken.end(step.pieces, elsewhere=step.absent)
        if self.transform is not None:
            self.transform.step_ended()

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
        step = self._current
        if ahead and self._has_results and self._may_defer():
            self._defer()
            return
        if not ahead or self._has_results:
            self._settle_deferred()
        if not self._has_results:
            return
        finite = self._all_finite()
        came = finite and step.status is StepStatus.REDUCED
        waiting = self._taken.waiting(step.pieces) if came and not last and self._taken else set()
        if came:
            self._find_unused()
        if self.residuals:
            names = step.pieces.keys() - waiting
            kept = step.kept() - waiting if came else set()
            self.residuals.take_back(names - kept)
            self.residuals.commit(kept, self.step)
            self._drop_flushed(kept)
        self._exchanges.memory.commit(came)
        if waiting:
            step.pieces = {name: step.pieces[name] for name in waiting}
            step.checks = [lambda: True]
            return
        self.plan.overflows += not finite
        step.end(finite=finite, committed=came)
        if not finite:
            self.check_operations()

    @property
    def _has_results(self) -> bool:
        """Whether buckets have been reduced since the last step was settled."""
        return bool(self._current.checks) or (self._side is not None and self._side.open)

    # ------------------------------------------------------------------ ahead of the device

    def _may_defer(self) -> bool:
        """Whether the device alone decides about the last step, and about all residuals alike."""
        if self._side is None or not self._side.open:
            return False
        self._find_unused()
        step = self._current
        return (
            self.defers
            and step.status is StepStatus.REDUCED
            and not (step.checks or step.flushed or step.discarded or step.unused)
            and not (self.plan.judges or self._side.is_full)
            and (not self._side.ahead or self._side.names == step.pieces.keys())
            and not any(
                p.residual is not None and p.residual.has_moved for p in step.pieces.values()
            )
        )

    def _defer(self) -> None:
        """Commit the last step as if it were finite, and let the device keep account."""
        assert self._side is not None
        self._side.defer(self.step, set(self._current.pieces))
        if self.residuals:
            self.residuals.swap(self._side.names)
        self._current.end(finite=True, committed=True)
        self.plan.overflows += self._side.hear()
        self.check_operations()

    def on_any_rank(self, found: bool) -> bool:
        """Return whether any rank has found something; collective."""
        return any(one for (one,) in gather([found], self.process_group, self._device))

    def _find_unused(self) -> None:
        """Let the step know the parameters that no rank has used, before it is settled."""

    def _drop_flushed(self, names: Set[str]) -> None:
        """Drop the residuals that have been sent with a codec that leaves no new error."""
        assert self.residuals is not None
        flushed, residuals = self._current.flushed & names, self.residuals
        sent = {name for name in flushed if residuals[name].worker is not None}
        for name in sent:
            residuals.drop(name)
        self._forget_buckets(sent, alone=True)


def _captures(device: torch.device) -> bool:
    """Return whether a graph captures what is queued on the current stream."""
    ask = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return bool(ask and ask())
