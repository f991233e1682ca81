"""Compressed gradients of DeepSpeed's engine, with ZeRO 1 and 2.

DeepSpeed has no hooks for its reductions. In these stages its optimizer all-reduces buckets, of
which each rank then takes its part; the method that does so is replaced on the engine's optimizer
(tested with DeepSpeed 0.19.8). A backward is a step: ZeRO 2 reduces in each, also while gradients
accumulate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.hooks.replaced import attach, is_a, refuse_second, replace
from pycomm.policy import Policy
from pycomm.policy.names import clean
from pycomm.reduction.adapter import Adapter
from pycomm.reduction.refusals import DEEPSPEED, refused
from pycomm.reduction.state import CompressionState


def is_deepspeed(model: nn.Module) -> bool:
    """Return whether a module is an engine, as `deepspeed.initialize` returns it."""
    return is_a(model, "deepspeed.runtime.engine", "DeepSpeedEngine")


def compress_engine(codec: str | Codec | Policy, engine: Any, **options: Any) -> CompressionState:
    """Replace the reductions of an engine, and return the state that they use.

    Args:
        codec, options: as for `CompressionState`.
        engine: DeepSpeed's engine.

    Raises:
        Error: the engine is compressed already, or reduces in a way that cannot be replaced; the
            text says which, and what to use.
    """
    refuse_second(engine, "engine")
    if why := _obstacle(engine):
        raise Error(f"DeepSpeed's engine cannot be compressed: {why}")
    group = engine.seq_data_parallel_group
    state = CompressionState(codec, process_group=group, adapter=Adapter(DEEPSPEED), **options)
    names = {
        parameter: clean(name)
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    for parameter, name in names.items():
        state.add(name, parameter)
    attach(state, engine)
    DeepSpeedHooks(state, engine.optimizer, names)
    return state


class DeepSpeedHooks:
    """What takes the place of reductions of an engine's optimizer.

    Args:
        state: codecs and feedback of the engine's parameters.
        optimizer: the engine's.
        names: of the parameters.
    """

    def __init__(self, state: CompressionState, optimizer: Any, names: dict[Any, str]) -> None:
        self._state, self._optimizer, self._name_of = state, optimizer, names
        self._scale = self._loss_scale()
        # With it the optimizer cuts a bucket by the ranks that take its parts, and all-reduces the
        # parts together all the same.
        optimizer.reduce_scatter = False
        self._reduce_exactly = replace(
            optimizer, "gradient_reduction_w_predivide", self._reduce_bucket
        )
        # It reduces the last bucket of a backward.
        name = "overlapping_partition_gradients_reduce_epilogue"
        self._end_backward = replace(optimizer, name, self._close)

    def _loss_scale(self) -> float:
        found = getattr(self._optimizer, "loss_scale", 1.0)
        return float(found) if isinstance(found, (int, float)) else 1.0

    def _open_step(self) -> None:
        """Begin a step, if none is open. Residuals follow the loss scale, in whose units gradients
        are."""
        if self._state.is_open:
            return
        if (now := self._loss_scale()) != self._scale:
            self._state.rescale(now / self._scale, momentum=True)
            self._scale = now
        self._state.begin_step()

    def _close(self, *args: Any, **kwargs: Any) -> Any:
        result = self._end_backward(*args, **kwargs)
        if self._state.is_open:
            self._state.end_step()
        return result

    @torch.no_grad()
    def _reduce_bucket(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        optimizer, state = self._optimizer, self._state
        if tensor.numel() == 0:
            reduced: torch.Tensor = self._reduce_exactly(tensor, dtype)
            return reduced
        self._open_step()
        names = [
            self._name_of[optimizer.bit16_groups[group][place]]
            for group, place, _ in optimizer.ipg_buckets[dtype].params
        ]
        state.wait(state.reduce(tensor, names))
        if not optimizer.gradient_average:
            tensor.mul_(float(state.process_group.size()))
        return tensor


def _obstacle(engine: Any) -> str:
    """Return why an engine's reductions cannot be replaced, and what to do; "": they can."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    inner = type(getattr(engine, "basic_optimizer", None)).__name__
    name, known = type(optimizer).__name__, "deepspeed.runtime.zero.stage_1_and_2"
    reduces = not engine.enable_backward_allreduce or "OneBit" in inner or inner == "ZeroOneAdam"
    found = {
        "pipelines": is_a(engine, "deepspeed.runtime.pipe.engine", "PipelineEngine"),
        "1-bit optimizers": reduces,
        "sequence parallelism": engine.sequence_parallel_size > 1,
        "experts": engine.has_moe_layers,
        "`zero_quantized_gradients`": engine.zero_quantized_gradients(),
        "no ZeRO": stage == 0,
        "ZeRO 3": stage == 3,
        "other optimizers of its own": (type(optimizer).__module__, name)
        != (known, "DeepSpeedZeroOptimizer"),
        "no `contiguous_gradients`": not getattr(optimizer, "contiguous_gradients", True),
    }
    option = next((option for option, there in found.items() if there), "")
    return refused(DEEPSPEED, option, inner=inner, name=name) if option else ""
