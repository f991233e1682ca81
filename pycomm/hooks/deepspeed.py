"""Compressed gradients of DeepSpeed's engine, with ZeRO 0, 1, 2 and 3.

DeepSpeed has no hooks for its reductions, so the methods that reduce are replaced on the engine's
optimizer, or on the engine (tested with DeepSpeed 0.19.8):

* Without ZeRO, and with ZeRO 1 and 2, DeepSpeed all-reduces buckets; in ZeRO 1 and 2 each rank then
  takes its part. They become compressed all-reduces.
* ZeRO 3 reduce-scatters the gradients. It becomes a compressed reduce-scatter, as in FSDP2: one
  coding. The all-gather of the weights stays exact.

A backward is a step: ZeRO 2 and 3 reduce in each, also while gradients accumulate.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Cut
from pycomm.hooks.replaced import ReplacedState, is_a, state_in
from pycomm.log import logger
from pycomm.policy import CODED, Decision, Policy
from pycomm.policy.names import clean

_states: weakref.WeakSet[DeepSpeedState] = weakref.WeakSet()


def is_deepspeed(model: nn.Module) -> bool:
    """Return whether a module is an engine, as `deepspeed.initialize` returns it."""
    return is_a(model, "deepspeed.runtime.engine", "DeepSpeedEngine")


def reducing() -> bool:
    """Return whether a state of this process has reduced an engine's gradients."""
    return any(state.step > 0 for state in _states)


def deepspeed_state(codec: str | Codec | Policy, engine: Any, **options: Any) -> DeepSpeedState:
    """Return the state for an engine's stage of ZeRO; see `DeepSpeedState`."""
    stage = engine.zero_optimization_stage()
    kind = ShardedState if stage == 3 else PartitionedState if stage else EngineState
    return kind(codec, engine, **options)


class DeepSpeedState(ReplacedState, ABC):
    """Codecs and feedback of an engine's parameters.

    Args:
        codec: a codec, a `Policy`, or the text of either; see `CompressionState`.
        engine: DeepSpeed's engine.
        options: feedback and seed; see `CompressionState`.

    Raises:
        Error: the engine is compressed already, or reduces in a way that cannot be replaced; the
            text says which.
        ValueError: PowerSGD, whose results come at the end of a step.
    """

    def __init__(self, codec: str | Codec | Policy, engine: Any, **options: Any) -> None:
        if state_in(engine) is not None:
            raise Error(
                "this engine is compressed already: change its codec by set_policy() of that state"
            )
        if why := _obstacle(engine):
            raise Error(f"DeepSpeed's engine cannot be compressed: {why}")
        super().__init__(codec, process_group=engine.seq_data_parallel_group, **options)
        self._optimizer = engine.optimizer
        self._scale = self._loss_scale()
        self._shapes: dict[str, torch.Size] = {}
        self._name_of: dict[Any, str] = {}
        for name, parameter in engine.module.named_parameters():
            if not parameter.requires_grad or parameter.numel() == parameter.dim() == 0:
                continue
            name = clean(name)
            # Under ZeRO 3 a parameter is empty, and DeepSpeed notes its shape.
            shape = getattr(parameter, "ds_shape", parameter.shape)
            self._shapes[name], self._name_of[parameter] = torch.Size(shape), name
            self.add(name, torch.empty(shape, dtype=parameter.dtype, device="meta"))
            self._device = parameter.device
        self.plan.complete()
        self.agree()
        self._attach(engine)
        self._warned: set[str] = set()
        self._install(engine)
        _states.add(self)

    def _refusal(self, codec: Codec) -> str:
        if codec.combine == "factors":
            return (
                f"{codec.name} has its results at the end of a step, and DeepSpeed uses those of "
                "each bucket at once: take another codec"
            )
        return super()._refusal(codec)

    @abstractmethod
    def _install(self, engine: Any) -> None:
        """Take the reductions of an engine over."""

    def _loss_scale(self) -> float:
        found = getattr(self._optimizer, "loss_scale", 1.0)
        return float(found) if isinstance(found, (int, float)) else 1.0

    def open_step(self, *, absent: bool = False) -> bool:
        """See `ReplacedState`. Residuals follow the loss scale, in whose units gradients are."""
        if not self.is_open and not self.removed and (now := self._loss_scale()) != self._scale:
            self.rescale(now / self._scale)
            self._scale = now
        return super().open_step(absent=absent)

    def _after(self, owner: Any, name: str) -> None:
        """Let a method end the step: DeepSpeed's last bucket of a backward is reduced in it."""

        def close(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.close_step()
            return result

        original = self._replace(owner, name, close)

    def _average(self, tensor: torch.Tensor, names: Sequence[str], factor: float) -> None:
        """Average the gradients of these parameters in place, and multiply them by a factor."""
        self.wait(self.reduce(tensor, names))
        if factor != 1.0:
            tensor.mul_(factor)

    def _tell(self, why: str) -> None:
        """Warn once that some gradients travel exactly."""
        if why not in self._warned and self.process_group.rank() == 0:
            logger.warning("deepspeed: %s", why)
        self._warned.add(why)


def _obstacle(engine: Any) -> str:
    """Return why an engine's reductions cannot be replaced, and what to do; "": they can."""
    name = type(engine.optimizer).__name__
    inner = type(getattr(engine, "basic_optimizer", None)).__name__
    if is_a(engine, "deepspeed.runtime.pipe.engine", "PipelineEngine"):
        return "a PipelineEngine has not been tested. Use deepspeed.initialize without a pipeline"
    if not engine.enable_backward_allreduce or "OneBit" in inner or inner == "ZeroOneAdam":
        return (
            f"{inner} reduces the gradients itself, compressed in its own way. Use "
            "torch.optim.AdamW to compress them by pycomm"
        )
    if engine.sequence_parallel_size > 1:
        return "sequence parallelism has not been tested. Set sequence_parallel_size to 1"
    if engine.has_moe_layers:
        return (
            "the parameters of experts are reduced in groups of their own. Use fully_shard(model)"
        )
    if engine.zero_quantized_gradients():
        return (
            "ZeRO++ quantizes the gradients already. Leave zero_quantized_gradients out to "
            "compress them by pycomm, with error feedback"
        )
    known = (
        ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
        ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    )
    stage = engine.zero_optimization_stage()
    if stage and (type(engine.optimizer).__module__, name) not in known:
        return f"its optimizer is {name}, which has not been tested. Use the usual one of ZeRO"
    if stage == 3 and engine.zero_hpz_partition_size() > 1:
        return "zero_hpz_partition_size has not been tested. Leave it out"
    if stage in (1, 2) and not engine.optimizer.contiguous_gradients:
        return (
            "without contiguous_gradients, gradients have no buffer. Set contiguous_gradients to "
            "true"
        )
    if not stage and name == "BF16_Optimizer":
        return (
            "the optimizer of bf16 keeps its gradients without their names. Use ZeRO stage 1 or 2"
        )
    return ""


class EngineState(DeepSpeedState):
    """DeepSpeed without ZeRO: the engine all-reduces the gradients after backward."""

    def _install(self, engine: Any) -> None:
        self._engine = engine
        self._reduce_exactly = self._replace(
            engine, "buffered_allreduce_fallback", self._reduce_gradients
        )

    @torch.no_grad()
    def _reduce_gradients(self, grads: Any = None, elements_per_buffer: int = 500000000) -> None:
        if grads is not None:
            self._tell("gradients that are given to allreduce_gradients() travel exactly")
        if grads is not None or not self.open_step():
            self._reduce_exactly(grads=grads, elements_per_buffer=elements_per_buffer)
            return
        # DeepSpeed makes missing gradients zero; and all ranks have sparse ones alike.
        factor = 1.0 if self._engine.gradient_average else float(self.process_group.size())
        found, sparse = [], []
        for parameter, name in self._name_of.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad.is_sparse:
                sparse.append(parameter)
            else:
                found.append((name, parameter.grad))
        if sparse:
            self._tell("sparse gradients travel exactly")
            for parameter in sparse:
                parameter.grad = parameter.grad.to_dense()
                found.append((self._name_of[parameter], parameter.grad))
        for bucket in _buckets(found, elements_per_buffer):
            grads = [grad for _, grad in bucket]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            self._average(flat, [name for name, _ in bucket], factor)
            parts = torch.split(flat, [grad.numel() for grad in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))
        self.close_step()


def _buckets(
    named: Sequence[tuple[str, torch.Tensor]], most: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split gradients into buckets of one dtype and about as many values as are wanted."""
    for _, alike in groupby(sorted(named, key=lambda pair: str(pair[1].dtype)), _dtype):
        bucket: list[tuple[str, torch.Tensor]] = []
        held = 0
        for name, grad in alike:
            bucket.append((name, grad))
            held += grad.numel()
            if held > most:
                yield bucket
                bucket, held = [], 0
        if bucket:
            yield bucket


def _dtype(pair: tuple[str, torch.Tensor]) -> torch.dtype:
    return pair[1].dtype


class PartitionedState(DeepSpeedState):
    """ZeRO 1 and 2: the optimizer all-reduces flat buckets, of which each rank takes its part."""

    def _install(self, engine: Any) -> None:
        optimizer = self._optimizer
        # With it the optimizer cuts a bucket by the ranks that take its parts, and all-reduces
        # the parts together all the same.
        self._set(optimizer, "reduce_scatter", False)
        self._reduce_exactly = self._replace(
            optimizer, "gradient_reduction_w_predivide", self._reduce_bucket
        )
        self._after(optimizer, "overlapping_partition_gradients_reduce_epilogue")

    @torch.no_grad()
    def _reduce_bucket(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        optimizer = self._optimizer
        if tensor.numel() == 0 or not self.open_step():
            reduced: torch.Tensor = self._reduce_exactly(tensor, dtype)
            return reduced
        names = [
            self._name_of[optimizer.bit16_groups[group][place]]
            for group, place, _ in optimizer.ipg_buckets[dtype].params
        ]
        factor = 1.0 if optimizer.gradient_average else float(self.process_group.size())
        self._average(tensor, names, factor)
        return tensor


class ShardedState(DeepSpeedState):
    """ZeRO 3: the optimizer reduce-scatters the gradients, whose shards are flat and equal."""

    def _install(self, engine: Any) -> None:
        optimizer = self._optimizer
        self.stays_because = (
            "its ranks share the parameters (ZeRO 3), whose shards keep their places: go on from a "
            "checkpoint, with load_checkpoint"
        )
        self._set(optimizer, "reduce_scatter", True)  # else it all-reduces where it can
        self._scatter_exactly = self._replace(
            optimizer, f"_{type(optimizer).__name__}__avg_scatter_grads", self._scatter
        )
        self._after(optimizer, "independent_gradient_partition_epilogue")

    @torch.no_grad()
    def _scatter(self, parameters: Sequence[Any], dtype: torch.dtype) -> list[torch.Tensor]:
        optimizer, group = self._optimizer, self.process_group
        if dtype not in CODED or not self.open_step():
            exact: list[torch.Tensor] = self._scatter_exactly(parameters, dtype)
            return exact
        names = [self._name_of[parameter] for parameter in parameters]
        ranks, rank = group.size(), group.rank()
        sizes = [self._shard(name) for name in names]
        rows = torch.zeros(ranks, sum(sizes), dtype=dtype, device=parameters[0].grad.device)
        for parameter, part in zip(parameters, torch.split(rows, sizes, dim=1), strict=True):
            values = parameter.grad.reshape(-1)
            for row, shard in zip(part, torch.split(values, part.shape[1]), strict=False):
                row[: shard.numel()].copy_(shard)
        output = torch.empty(sum(sizes), dtype=dtype, device=rows.device)
        self._weigh(rows)
        self.scatter(output, rows.view(-1), names, group, average=True)()
        output = output.to(optimizer.gradient_accumulation_dtype)
        counts = [
            max(0, min(n, self._shapes[name].numel() - rank * n))
            for name, n in zip(names, sizes, strict=True)
        ]
        return [
            part[:count] for part, count in zip(torch.split(output, sizes), counts, strict=True)
        ]

    def _shard(self, name: str) -> int:
        """Return the number of values in a rank's shard of a parameter, with padding."""
        return -(-self._shapes[name].numel() // self.process_group.size())

    def _cuts(self) -> dict[str, Cut]:
        ranks = self.process_group.size()
        return {name: Cut((shape.numel(),), ranks) for name, shape in self._shapes.items()}

    @property
    def rows(self) -> int:
        """A reduce-scatter has a row for every owner."""
        return self.process_group.size()

    def part(self, decision: Decision) -> Decision:
        """Return the decision for one rank's shard of a parameter, padded."""
        shape = (self._shard(decision.parameter.name),)
        parameter = replace(decision.parameter, shape=shape)
        return replace(decision, parameter=parameter, codec=decision.codec.fit(shape))
