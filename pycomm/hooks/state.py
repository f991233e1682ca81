"""What all hooks keep between steps: the plan of codecs, the residuals, and the buckets they know.

A step is `begin_step`, one `reduce` for each bucket, `end_step`. Its residuals become current when
the next step begins, if all of it came through and is finite; until then it can be taken back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from pycomm import backend
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback, Residuals, reshard, sources
from pycomm.feedback.rule import EXACT
from pycomm.hooks import powersgd, two_shot
from pycomm.hooks.bucket import Bucket, Piece
from pycomm.hooks.checkpoint import load_saved
from pycomm.policy import Decision, Parameter, Plan, Policy

STATE_VERSION = 2
CODED = (torch.float32, torch.float16, torch.bfloat16)


class CompressionState:
    """Codecs and feedback of the parameters that one group of ranks reduces.

    Hooks of DDP, FSDP2 and the outer steps of LocalSGD are thin layers above it.

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
    """

    def __init__(
        self,
        codec: str | Codec | Policy = "int8",
        *,
        process_group: dist.ProcessGroup | None = None,
        feedback: bool | str | Feedback | None = True,
        seed: int = 0,
    ) -> None:
        process_group = process_group or dist.group.WORLD
        if process_group is None:
            raise Error("there is no process group: call init_process_group first")
        self.process_group: dist.ProcessGroup = process_group
        self.plan = Plan(Policy.of(codec), process_group)
        rule = Feedback.of(feedback)
        self.residuals = Residuals(rule, process_group.size()) if rule else None
        self.seed = seed
        self.step = 0
        """Number of the current step, from 1."""
        self.overflows = 0
        """Steps whose result was not finite; they have left the residuals as they were."""

        self._names: dict[int, str] = {}  # by id of the parameter
        self._parameters: list[torch.Tensor] = []  # keeps their ids from being used again
        self._numbers: dict[str, int] = {}
        self._device = torch.device("cpu")
        self._optimizer: torch.optim.Optimizer | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._rates: dict[str, float] = {}  # by parameter: the learning rate of its residual
        self._loss_scale = 0.0  # of all residuals; 0: there are none yet
        self._buckets: dict[tuple[str, ...], Bucket] = {}
        self._exchanges = powersgd.Exchanges(process_group)
        self._finite: list[Callable[[], bool]] = []  # of the current step, one for each bucket
        self._touched: dict[str, Piece] = {}  # of the current step, those with a residual
        self._complete = False
        self._was_finite = True

    # ------------------------------------------------------------------ for users

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.plan.policy}, step={self.step}, "
            f"overflows={self.overflows})"
        )

    @property
    def decisions(self) -> dict[str, Decision]:
        """The codec of each parameter, by name."""
        return self.plan.decisions

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
            "rates": dict(self._rates),
            "loss_scale": self._loss_scale,
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
        self.settle()
        self.seed, self.step = about["seed"], about["step"]
        self._rates, self._loss_scale = dict(about["rates"]), about["loss_scale"]
        self.plan.load_state_dict(about["plan"])
        self._exchanges.memory.load_state_dict(saved.get("factors", {}))
        if self.residuals:
            self._load_residuals(saved, about["world_size"])
        self._buckets.clear()

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
        self.residuals.load_state_dict(
            own[0] if before == ranks else reshard(self.residuals.rule, own, before, ranks)
        )

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
        self._optimizer, self._scaler = optimizer, scaler

    # ------------------------------------------------------------------ for hooks

    def add(self, name: str, parameter: torch.Tensor) -> None:
        """Enter a parameter, or the part of it that is reduced here. All ranks in one order."""
        if not self._numbers:
            self._device = parameter.device
        self._names[id(parameter)] = name
        self._parameters.append(parameter)
        self._numbers[name] = len(self._numbers)
        self.plan.add(Parameter(name, tuple(parameter.shape), parameter.dtype))

    def agree(self) -> None:
        """Check that all ranks have decided alike; collective. See `Plan.agree`.

        `reduce` does it too, for parameters that it has not seen before.
        """
        self.plan.agree(self._device)

    def begin_step(self) -> None:
        """Settle the step before and begin another; before its first `reduce`, on all ranks."""
        self.settle()
        self._exchanges.forget()
        self.step = (self.step + 1) % 2**32
        if self.residuals:
            self._rescale()
            reset = self.residuals.rule.reset
            if reset and self.step % reset == 0:
                self.residuals.reset()
        self._forget_buckets(self.plan.advance(self.step, self._device, finite=self._was_finite))

    def reduce(
        self, tensor: torch.Tensor, names: Sequence[str]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the group, in place.

        Args:
            tensor: the gradients of the named parameters, one behind the other. float32, or 16-bit
                floats, which are converted to float32 and back. Other dtypes are averaged as they
                are.
            names: as they were added; equal on all ranks.

        Returns:
            A future of `tensor`.
        """
        if tensor.is_sparse:
            raise Error(
                f"rank {self.process_group.rank()}: the gradient of {names[0]} is sparse and "
                "cannot be compressed; make the embedding with sparse=False"
            )
        if self.process_group.size() == 1 and not self._is_fed(names):
            return _done(tensor)
        if tensor.dtype not in CODED:
            return self._reduce_plain(tensor)
        bucket = self._bucket(tuple(names), tensor.device)
        if any(piece.codec.combine == "factors" for piece in bucket.pieces):
            return self._reduce_factors(tensor, bucket)
        return self._reduce_coded(tensor, bucket)

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

    def _rescale(self) -> None:
        """See `follow`. A learning rate of 0 moves nothing, so it does not count."""
        assert self.residuals is not None
        if self._scaler is not None and (now := self._scaler.get_scale()) > 0:
            if self._loss_scale not in (0.0, now):
                self.residuals.scale_units(now / self._loss_scale)
            self._loss_scale = now
        for group in self._optimizer.param_groups if self._optimizer else ():
            names = [self._names[id(p)] for p in group["params"] if id(p) in self._names]
            rate = float(group["lr"])
            for name in names if rate > 0 else ():
                before = self._rates.setdefault(name, rate)
                if before != rate:
                    self.residuals.scale(before / rate, [name])
                    self._rates[name] = rate

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

    def _forget_buckets(self, names: Set[str]) -> None:
        for bucket in [bucket for bucket in self._buckets if not names.isdisjoint(bucket)]:
            del self._buckets[bucket]

    # ------------------------------------------------------------------ the exchange

    def _reduce_factors(
        self, tensor: torch.Tensor, bucket: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        """For a bucket with PowerSGD in it, which ends with the step; other codecs as ever."""
        taken = [piece for piece in bucket.pieces if powersgd.takes(piece)]
        others = [piece for piece in bucket.pieces if not powersgd.takes(piece)]
        self._use(taken, bucket, tensor)
        probe = self.plan.probe(tensor, taken, self._owed)
        places = [tensor[p.offset : p.offset + p.numel] for p in others]
        coded = _done(tensor)
        if others:
            names = tuple(piece.name for piece in others)
            coded = self._reduce_coded(torch.cat(places), self._bucket(names, tensor.device))

        def put_back() -> None:
            parts = torch.split(coded.wait(), [piece.numel for piece in others]) if others else ()
            for place, part in zip(places, parts, strict=True):
                place.copy_(part)

        exchange, future = self._exchanges.start(
            tensor, taken, put_back, seed=self.seed, step=self.step
        )
        self._finite.append(lambda: exchange.finite)
        if probe is None:
            return future
        return future.then(lambda done: probe.finish(done.value()))

    def _reduce_coded(
        self, tensor: torch.Tensor, bucket: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        self._clip(bucket, tensor)
        self._use(bucket.pieces, bucket, tensor)
        probe = self.plan.probe(tensor, bucket.pieces, self._owed)
        native = backend.find(self.process_group) if tensor.is_cpu else None
        if native is not None:
            work = native.compressed_all_reduce(
                tensor, bucket.native, bucket.sides, self.seed, self.step
            )
            self._finite.append(lambda: work.finite)
            coded: torch.futures.Future[torch.Tensor] = work.get_future()
            if probe is None:
                return coded
            return coded.then(lambda future: probe.finish(future.value()))
        values = tensor.float().contiguous()
        finite = two_shot.all_reduce(
            values, bucket, self.process_group, seed=self.seed, step=self.step
        )
        self._finite.append(lambda: bool(finite))
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
        if probe is not None:
            probe.finish(tensor)
        return _done(tensor)

    def _use(self, pieces: Sequence[Piece], bucket: Bucket, tensor: torch.Tensor) -> None:
        for piece in pieces:
            if piece.residual is not None:
                gradient = tensor[piece.offset : piece.offset + piece.numel]
                piece.residual.use(
                    bucket.layout, self.process_group.size(), gradient if bucket.levels else None
                )
                self._touched[piece.name] = piece

    def _clip(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        """Bound the norm of each gradient of this rank (DGC, Lin et al. 2018, section 3.3)."""
        clip = self.residuals.rule.clip if self.residuals else 0.0
        for piece in bucket.pieces if clip else ():
            gradient = tensor[piece.offset : piece.offset + piece.numel]
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            most = clip / self.process_group.size() ** 0.5
            gradient.mul_(torch.where(norm > most, most / norm, torch.ones_like(norm)))

    def _is_fed(self, names: Sequence[str]) -> bool:
        """Whether there is something to add to these gradients, even if there is nobody else."""
        return self.residuals is not None and (
            self.residuals.rule.kind == "momentum" or any(n in self.residuals for n in names)
        )

    def _owed(self, name: str, begin: int, end: int, row: int) -> torch.Tensor | None:
        return self.residuals.owed(name, begin, end, row) if self.residuals else None

    def _reduce_plain(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """For dtypes that no codec takes, such as float64: the group's own all_reduce."""
        verdict: list[bool] = []

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            result = future.value()[0]
            verdict.append(bool(result.isfinite().all()))
            return result

        tensor.div_(self.process_group.size())
        work = dist.all_reduce(tensor, group=self.process_group, async_op=True)
        self._finite.append(lambda: verdict == [True])
        plain: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
        return plain

    def _bucket(self, names: tuple[str, ...], device: torch.device) -> Bucket:
        bucket = self._buckets.get(names)
        if bucket is None:
            self.agree()
            decisions = [self.part(self.decisions[name]) for name in names]
            if self.process_group.size() == 1:  # pays what a checkpoint of more ranks owes
                decisions = [replace(decision, codec=EXACT) for decision in decisions]
            numbers = [self._numbers[name] for name in names]
            native = backend.find(self.process_group) if device.type == "cpu" else None
            levels = native.levels if native and self.rows == 1 else ()
            bucket = Bucket(
                decisions, numbers, self.residuals, device, rows=self.rows, levels=levels
            )
            self._buckets[names] = bucket
        return bucket

    @property
    def rows(self) -> int:
        """How many parts of each parameter a rank contributes; see `Bucket`."""
        return 1

    def part(self, decision: Decision) -> Decision:
        """Return the decision for what a bucket holds of a parameter: all of it, if not told."""
        return decision


def _done(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future
