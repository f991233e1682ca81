"""DeepSpeed's engine, compressed: what pycomm replaces, on fakes of its objects.

A fake has only what is replaced or read: the methods that reduce, and the options that decide
whether they can be replaced. `make trainers` does the same with the package.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.errors import Error
from tests.extent import each_value
from tests.torch.harness import equal, heard, near_zero
from tests.torch.hooks.given_gradients import (
    SHAPES,
    Net,
    by_torch,
    drawn,
    lost_with_remove,
    mean,
)
from tests.torch.pool import on_ranks

STAGES = (0, 2)


class DeepSpeedZeroOptimizer:
    """As that of ZeRO 1 and 2: reduces flat buckets."""

    def __init__(self, net: Net) -> None:
        self.net, self.exact, self.loss_scale = net, 0, 1.0
        self.contiguous_gradients = self.reduce_scatter = self.gradient_average = True
        self.bit16_groups = [list(net.weights)]
        self.ipg_buckets: dict[torch.dtype, SimpleNamespace] = {}

    def gradient_reduction_w_predivide(
        self, tensor: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        self.exact += 1
        dist.all_reduce(tensor)
        return tensor.div_(dist.get_world_size())

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        pass

    def backward(self, alone: bool) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        # The last gradients come first.
        for places in ((2,), (1,), (0,)) if alone else ((2, 1), (0,)):
            flat = torch.cat([self.net.weights[at].grad.view(-1) for at in places])
            params = [(0, at, at) for at in places]
            self.ipg_buckets[torch.float32] = SimpleNamespace(params=params)
            flat = self.gradient_reduction_w_predivide(flat, torch.float32)
            sizes = [self.net.weights[at].numel() for at in places]
            for at, part in zip(places, torch.split(flat, sizes), strict=True):
                found[at] = part.view(SHAPES[at])
        self.overlapping_partition_gradients_reduce_epilogue()
        return [found[at] for at in range(len(SHAPES))]


class DeepSpeedZeroOptimizer_Stage3:
    """As that of ZeRO 3: scatters the gradients of whole parameters."""

    def __init__(self, net: Net) -> None:
        self.net, self.exact, self.loss_scale = net, 0, 1.0
        self.gradient_accumulation_dtype, self.reduce_scatter = torch.float32, False

    def __avg_scatter_grads(
        self, parameters: list[nn.Parameter], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        self.exact += 1
        shards = []
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            whole = parameter.grad.view(-1) / dist.get_world_size()
            shards.append(shard(whole, dist.get_rank(), dist.get_world_size()))
        return shards

    def independent_gradient_partition_epilogue(self) -> None:
        pass

    def backward(self, alone: bool) -> list[torch.Tensor]:
        scatter = self.__avg_scatter_grads
        weights = list(self.net.weights)
        found = scatter(weights[1:], torch.float32)
        found = [*scatter(weights[:1], torch.float32), *found]
        self.independent_gradient_partition_epilogue()
        return found


class BF16_Optimizer:
    loss_scale = 1.0


DeepSpeedZeroOptimizer.__module__ = "deepspeed.runtime.zero.stage_1_and_2"
DeepSpeedZeroOptimizer_Stage3.__module__ = "deepspeed.runtime.zero.stage3"
OPTIMIZERS = {0: lambda _: SimpleNamespace(), 2: DeepSpeedZeroOptimizer}
OPTIMIZERS |= {1: DeepSpeedZeroOptimizer, 3: DeepSpeedZeroOptimizer_Stage3}


class DeepSpeedEngine(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.module, self.stage, self.exact = Net(), stage, 0
        self.optimizer = OPTIMIZERS[stage](self.module)
        self.seq_data_parallel_group = dist.group.WORLD
        self.enable_backward_allreduce = self.gradient_average = True
        self.basic_optimizer, self.sequence_parallel_size = None, 1
        self.has_moe_layers, self.quantizes, self.partition = False, False, 1
        self.alone = False  # each parameter has a bucket

    def zero_optimization_stage(self) -> int:
        return self.stage

    def zero_quantized_gradients(self) -> bool:
        return self.quantizes

    def zero_hpz_partition_size(self) -> int:
        return self.partition

    def buffered_allreduce_fallback(
        self, grads: object = None, elements_per_buffer: int = 500000000
    ) -> None:
        self.exact += 1
        for weight in self.module.weights:
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()

    def backward(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Set the gradients and reduce them as DeepSpeed does; return what the optimizer gets."""
        for weight, gradient in zip(self.module.weights, gradients, strict=True):
            weight.grad = gradient.clone()
        if self.stage:
            return self.optimizer.backward(self.alone)
        self.buffered_allreduce_fallback(elements_per_buffer=0 if self.alone else 2000)
        return [weight.grad for weight in self.module.weights]


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def shard(flat: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    size = -(-flat.numel() // ranks)
    return flat[rank * size : (rank + 1) * size]


def exact(engine: DeepSpeedEngine) -> int:
    return engine.exact + getattr(engine.optimizer, "exact", 0)


@on_ranks(2)
@each_value
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_all_reduces_have_the_bits_of_ddp(rank, ranks, codec, stage):
    engine = DeepSpeedEngine(stage)
    # A bucket is cut among the owners, and what is coded together depends on where.
    engine.alone = codec != "fp32"
    pycomm.compress(engine, codec)
    wanted = by_torch(rank, codec, 4)
    assert all(equal(engine.backward(drawn(rank, step)), wanted[step]) for step in range(4))
    assert exact(engine) == 0
    assert equal(wanted[0], mean(0, ranks)) == (codec == "fp32")


@on_ranks()
@pytest.mark.parametrize("ranks", [2, 3])
def test_zero_3_gets_its_shards_of_the_mean(rank, ranks):
    engine = DeepSpeedEngine(3)
    pycomm.compress(engine, "fp32")
    assert engine.optimizer.reduce_scatter
    for step in range(2):
        wanted = [shard(whole.view(-1), rank, ranks) for whole in mean(step, ranks)]
        assert equal(engine.backward(drawn(rank, step)), wanted)

    engine = DeepSpeedEngine(3)
    pycomm.compress(engine, "int4")
    wanted = [shard(whole.view(-1), rank, ranks) for whole in mean(0, ranks)]
    first, steps = None, 64
    total = [torch.zeros_like(part) for part in wanted]
    for _ in range(steps):
        found = engine.backward(drawn(rank, 0))
        first = first or [part.clone() for part in found]
        for sum_, part in zip(total, found, strict=True):
            sum_ += part
    error = [float((a - b).abs().max()) for a, b in zip(first, wanted, strict=True)]
    assert error[0] > 0.01
    assert error[1] == 0  # it is too small to be coded
    # The sum of all results lacks what residuals hold: about the error of a coding.
    for sum_, whole, once in zip(total, wanted, error, strict=True):
        assert float((sum_ - steps * whole).abs().max()) <= 3 * once + 1e-3
    assert exact(engine) == 0


@on_ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_residuals_follow_the_loss_scale(rank, ranks, stage):
    plain, scaled = DeepSpeedEngine(stage), DeepSpeedEngine(stage)
    for engine in (plain, scaled):
        pycomm.compress(engine, "int4")
    for step, scale in enumerate((1.0, 8.0, 8.0, 2.0)):
        scaled.optimizer.loss_scale = scale
        wanted = plain.backward(drawn(rank, step))
        found = scaled.backward(drawn(rank, step, scale))
        # Powers of two change no bit of what is coded.
        assert equal(found, [scale * part for part in wanted])


@on_ranks(2)
def test_without_gradient_average_gradients_are_summed(rank, ranks):
    for stage in STAGES:
        engine = DeepSpeedEngine(stage)
        (engine.optimizer if stage else engine).gradient_average = False
        pycomm.compress(engine, "fp32")
        wanted = [ranks * part for part in mean(0, ranks)]
        assert equal(engine.backward(drawn(rank, 0)), wanted)


@on_ranks(2)
def test_what_travels_exactly_is_told_once(rank, ranks):
    engine = DeepSpeedEngine(0)
    pycomm.compress(engine, "int4")

    with heard() as told:
        for _ in range(2):
            for weight, gradient in zip(engine.module.weights, drawn(rank, 0), strict=True):
                weight.grad = gradient
            engine.buffered_allreduce_fallback(grads=[w.grad for w in engine.module.weights])
    assert engine.exact == 2
    said = ["deepspeed: gradients that are given to allreduce_gradients() travel exactly"]
    assert told == (said if rank == 0 else [])
    with heard() as told:
        for weight, gradient in zip(engine.module.weights, drawn(rank, 0), strict=True):
            weight.grad = gradient.to_sparse() if gradient.dim() == 2 else None
        engine.buffered_allreduce_fallback()
    assert told == (["deepspeed: sparse gradients travel exactly"] if rank == 0 else [])
    assert not any(weight.grad.is_sparse for weight in engine.module.weights)
    assert torch.equal(engine.module.weights[1].grad, torch.zeros(SHAPES[1]))


@on_ranks(2)
def test_unsupported_engines_are_refused(rank, ranks):
    def refused(stage, what, **attributes):
        engine = DeepSpeedEngine(stage)
        for name, value in attributes.items():
            setattr(engine, name, value)
        before = dict(vars(engine.optimizer))
        with pytest.raises(Error, match=what):
            pycomm.compress(engine, "int4")
        assert vars(engine.optimizer) == before
        assert pycomm.state_of(engine) is None

    for stage in (0, 1, 2, 3):
        refused(stage, "Set sequence_parallel_size to 1", sequence_parallel_size=2)
        refused(stage, "experts", has_moe_layers=True)
        refused(stage, "Leave zero_quantized_gradients out", quantizes=True)
        refused(stage, "reduces the gradients itself", enable_backward_allreduce=False)
        one_bit = type("OneBitAdam", (), {})()
        refused(stage, "OneBitAdam reduces the gradients itself", basic_optimizer=one_bit)
    refused(3, "zero_hpz_partition_size", partition=2)
    refused(2, "its optimizer is SimpleNamespace", optimizer=SimpleNamespace())
    refused(3, "which has not been tested", optimizer=BF16_Optimizer())
    refused(0, "Use ZeRO stage 1 or 2", optimizer=BF16_Optimizer())

    engine = DeepSpeedEngine(2)
    engine.optimizer.contiguous_gradients = False
    with pytest.raises(Error, match="Set contiguous_gradients to true"):
        pycomm.compress(engine, "int4")
    engine = DeepSpeedEngine(2)
    engine.optimizer.gradient_reduction_w_predivide = None
    with pytest.raises(Error, match="version of deepspeed cannot be compressed"):
        pycomm.compress(engine, "int4")
    engine = DeepSpeedEngine(3)
    with pytest.raises(ValueError, match="powersgd has its results at the end of a step"):
        pycomm.compress(engine, "powersgd:rank=2")
    pycomm.compress(engine, "int4")
    with pytest.raises(Error, match="compressed already"):
        pycomm.compress(engine, "int8")


@on_ranks(2)
def test_remove_sends_residuals_and_restores_deepspeed(rank, ranks):
    for stage in STAGES:
        engine = DeepSpeedEngine(stage)
        state = pycomm.compress(engine, "int4")
        missing = lost_with_remove(engine.backward, state, rank, ranks)
        assert not missing[1].any()  # it is too small to be coded
        near_zero(*missing)
        assert exact(engine) == 0
        assert equal(engine.backward(drawn(rank, 3)), mean(3, ranks))
        assert exact(engine) > 0
        replaced = ("buffered_allreduce_fallback", "gradient_reduction_w_predivide")
        assert not set(replaced) & {*vars(engine), *vars(engine.optimizer)}
        assert pycomm.state_of(engine) is None
