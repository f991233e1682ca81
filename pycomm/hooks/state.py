"""What all hooks keep between steps: the plan of codecs, the residuals, and the buckets they know.

A step is `begin_step`, one `reduce` for each bucket, `end_step`. Its residuals become current when
the next step begins, if all of it came through and is finite; until then it can be taken back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist

from pycomm.codecs import Codec
from pycomm.feedback import Cut, Feedback, reshard, sources
from pycomm.hooks.checkpoint import load_saved
from pycomm.hooks.rates import Rates
from pycomm.hooks.reducer import BucketReducer
from pycomm.policy import Policy

STATE_VERSION = 2


class CompressionState(BucketReducer):
    """Codecs and feedback of the parameters that one group of ranks reduces.

    Collective: all ranks of the group make one. Hooks of DDP, FSDP2 and the outer steps of LocalSGD
    are thin layers above it.

    Args:
        codec: a codec, its text ("int8", "quant:bits=4,block=64"), a `Policy`, or the text of one
            ("auto", "int4 warmup=100"). A codec leaves norms, biases and tiny parameters exact; a
            policy does what it says.
        process_group: where to reduce; None: the default group.
        feedback: what becomes of the error of each payload: True, False, or a kind with options,
            "ema:0.9,storage=int8"; see `pycomm.Feedback`. Equal on all ranks.
        seed: of random rounding; equal on all ranks.

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
    ) -> None:
        super().__init__(codec, process_group=process_group, feedback=feedback, seed=seed)
        self.overflows = 0
        """Steps whose result was not finite; they have left the residuals as they were."""
        self._rates = Rates()
        self._complete = False
        self._was_finite = True

    # ------------------------------------------------------------------ for users

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.plan.policy}, step={self.step}, "
            f"overflows={self.overflows})"
        )

    def summary(self) -> str:
        """Return the decisions that hold now, a line for each codec and reason, and the changes."""
        return self.plan.summary()

    def set_epoch(self, epoch: int) -> None:
        """Tell the number of the epoch, from 0, for schedules by epoch; on all ranks alike."""
        self.plan.set_epoch(epoch)

    def residual_norms(self) -> dict[str, tuple[float, float]]:
        """Return the L2 norms of each parameter's worker and owner residual after the last step."""
        self.settle()
        return self.residuals.norms() if self.residuals else {}

    def residual_ages(self) -> dict[str, int]:
        """Return how many steps each residual has been waiting; see `Residuals.ages`."""
        self.settle()
        return self.residuals.ages(self.step) if self.residuals else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs; between two steps. Every rank saves its own.

        Entries have the number of their rank in their names, so torch.distributed.checkpoint keeps
        those of all ranks apart. `load_checkpoint` reads them on any number of ranks.
        """
        self.settle()
        about = {
            "version": STATE_VERSION,
            "world_size": self.process_group.size(),
            "seed": self.seed,
            "step": self.step,
            "plan": self.plan.state_dict(),
            **self._rates.state_dict(),
        }
        residuals = self.residuals.state_dict() if self.residuals else {}
        return {
            "about": (about,),  # a tuple, which checkpoints keep in one piece
            "factors": self._exchanges.memory.state_dict(),
            f"rank{dist.get_rank()}": residuals,  # of a group: replicas' ranks differ in each
        }

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, by as many ranks or by another number.

        Args:
            states: our own one; on another number of ranks those of all ranks.

        Raises:
            ValueError: the state is of another version, or ranks are missing.
        """
        saved = {key: value for state in states for key, value in state.items()}
        (about,) = saved["about"]
        if about["version"] != STATE_VERSION:
            raise ValueError(
                f"the hook's state has version {about['version']}, not {STATE_VERSION}"
            )
        self._load_common(about, saved.get("factors", {}))
        if self.residuals:
            self._load_residuals(saved, about["world_size"])
        self._buckets.clear()

    def _load_common(self, about: Mapping[str, Any], factors: dict[str, dict[str, Any]]) -> None:
        """Take over what all ranks have saved alike."""
        self.settle()
        self.seed, self.step = about["seed"], about["step"]
        self._rates.load_state_dict(about)
        self.plan.load_state_dict(about["plan"])
        self._exchanges.memory.load_state_dict(factors)

    def _load_residuals(self, saved: Mapping[str, Any], before: int) -> None:
        assert self.residuals is not None
        ranks = self.process_group.size()
        needed = self._needed(before)
        if missing := [key for key in needed if key not in saved]:
            raise ValueError(
                f"the hook's state was saved by {before} ranks and is loaded by rank "
                f"{self.process_group.rank()} of {ranks}, which needs what {', '.join(missing)} "
                "has saved: ranks owe different things"
            )
        own = [saved[key] for key in needed]
        if before != ranks:
            own = [reshard(self.residuals.rule, own, before, ranks, self._cuts())]
        self.residuals.load_state_dict(own[0])

    def _cuts(self) -> dict[str, Cut]:
        """How ranks share the parameters; nothing: each has all of them."""
        return {}

    def _needed(self, before: int) -> list[str]:
        """The entries that this rank takes over from `before` ranks."""
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
        return [f"rank{r}" for r in sources(self.residuals.rule, before, rank, ranks)]

    def take_over(self, before: CompressionState) -> None:
        """Go on where the state of a group has stopped that has lost ranks; collective.

        For the group of those that are left, as `torch.distributed.shrink_group` makes it: each
        brings the state that it had. Codecs, schedules and the number of the step go on as the
        first of them knows them. What they owe stays owed to the average of the fewer ranks; what
        the lost ranks owed is lost with them.

        Args:
            before: the state that has stopped. It is of no use afterwards.

        Raises:
            ValueError: ranks share the parameters (FSDP2): the lost ranks' shards are lost, too.

        Example:
            >>> dist.shrink_group(error.ranks, shrink_flags=1)  # doctest: +SKIP
            >>> model = DistributedDataParallel(model.module)  # doctest: +SKIP
            >>> state, lost = pycomm.compress(model, "int4"), state  # doctest: +SKIP
            >>> state.take_over(lost)  # doctest: +SKIP
        """
        if self._cuts():
            raise ValueError(
                "ranks share these parameters, and the shards of lost ranks are gone with them; "
                "go on from a checkpoint, with load_checkpoint"
            )
        saved = before.state_dict()
        owed = before.residuals.state_dict() if before.residuals else {}
        every_rank = [saved["about"], saved["factors"]]
        if self.residuals and self.residuals.rule.kind == "ef21":
            every_rank.append(owed)  # whose mean must be the same everywhere
        first = dist.get_global_rank(self.process_group, 0)
        dist.broadcast_object_list(every_rank, src=first, group=self.process_group)
        (about,), factors, *mean = every_rank
        self._load_common(about, factors)
        if self.residuals:
            rule, ranks = self.residuals.rule, self.process_group.size()
            owed = mean[0] if mean else owed
            self.residuals.load_state_dict(reshard(rule, [owed], about["world_size"], ranks))
        self._buckets.clear()

    def load_checkpoint(self, checkpoint_id: str | os.PathLike[str], key: str = "pycomm") -> None:
        """Continue from a checkpoint of torch.distributed.checkpoint; collective.

        Args:
            checkpoint_id: the folder, as ``dcp.save`` got it.
            key: under which it was saved: ``dcp.save({key: state.state_dict()}, ...)``. By any
                number of ranks.

        Raises:
            ValueError: the checkpoint has nothing under this key.
        """
        about = load_saved(checkpoint_id, key, ["about"], self.process_group)["about"]
        needed = self._needed(about[0]["world_size"])
        saved = load_saved(checkpoint_id, key, ["about", "factors", *needed], self.process_group)
        for part in needed:
            saved.setdefault(part, {})  # it had nothing to save
        self.load_state_dict(saved)

    def rescale(self, factor: float, names: Iterable[str] | None = None) -> None:
        """Multiply what is owed: a residual is in units of a learning rate's gradients.

        When the learning rate changes from a to b, ``rescale(a / b)`` lets what is owed move the
        parameters as far as it would have (Zheng et al. 2019, algorithm 1). `follow` does it.

        Args:
            factor: positive.
            names: of the parameters concerned; None: all.
        """
        self.settle()
        if self.residuals:
            self.residuals.scale(factor, names)

    def follow(
        self,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Rescale what is owed at the start of each step in which one of these has changed.

        Args:
            optimizer: its learning rates, by parameter group.
            scaler: its loss scale, which is the unit of all gradients and residuals.
        """
        self._rates.optimizer, self._rates.scaler = optimizer, scaler

    # ------------------------------------------------------------------ for hooks

    def begin_step(self) -> None:
        """Settle the step before and begin another; before its first `reduce`, on all ranks."""
        self.settle()
        self._exchanges.forget()
        self.step = (self.step + 1) % 2**32
        if self.residuals:
            self._rates.rescale(self.residuals, self._names)
            reset = self.residuals.rule.reset
            if reset and self.step % reset == 0:
                self.residuals.reset()
        self._forget_buckets(self.plan.advance(self.step, self._device, finite=self._was_finite))

    def end_step(self) -> None:
        """Tell that every bucket of this step has been given to `reduce`."""
        self._exchanges.finish()
        self._complete = True

    def settle(self) -> None:
        """Wait for the last step; keep its residuals if all of it has come through, finite."""
        if not self._finite:
            return
        finite = all([check() for check in self._finite])
        if self.residuals:
            kept = self._touched.keys() - self._unused() if finite and self._complete else set()
            self.residuals.take_back(self._touched.keys() - kept)
            self.residuals.commit(kept, self.step)
            self._drop_paid(kept)
        self._exchanges.memory.commit(finite and self._complete)
        self.overflows += not finite
        self._was_finite = finite
        self._finite.clear()
        self._touched.clear()
        self._complete = False

    def _unused(self) -> set[str]:
        """The parameters whose result of the last step nobody has taken, since no rank used them.

        What they owe stays owed.
        """
        return set()

    def _drop_paid(self, names: Set[str]) -> None:
        """Forget the residuals of parameters whose codec leaves no debts: all has been told."""
        assert self.residuals is not None
        paid = {
            name
            for name in names
            if not self.residuals.rule.keeps_errors(self._touched[name].codec)
            and self.residuals[name].worker is not None
        }
        for name in paid:
            self.residuals.drop(name)
        self._forget_buckets(paid)
