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
from tests.torch.harness import equal, near_zero
from tests.torch.hooks.given_gradients import (
    SHAPES,
    Net,
    by_torch,
    drawn,
    lost_in_all,
    mean,
)
from tests.torch.pool import on_ranks

STAGES = (1, 2)


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


class OtherOptimizer:
    loss_scale = 1.0


DeepSpeedZeroOptimizer.__module__ = "deepspeed.runtime.zero.stage_1_and_2"


class DeepSpeedEngine(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.module, self.stage = Net(), stage
        self.optimizer = DeepSpeedZeroOptimizer(self.module)
        self.seq_data_parallel_group = dist.group.WORLD
        self.enable_backward_allreduce = True
        self.basic_optimizer, self.sequence_parallel_size = None, 1
        self.has_moe_layers, self.quantizes = False, False
        self.alone = False  # each parameter has a bucket

    def zero_optimization_stage(self) -> int:
        return self.stage

    def zero_quantized_gradients(self) -> bool:
        return self.quantizes

    def backward(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Set the gradients and reduce them as DeepSpeed does; return what the optimizer gets."""
        for weight, gradient in zip(self.module.weights, gradients, strict=True):
            weight.grad = gradient.clone()
        return self.optimizer.backward(self.alone)


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


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
    assert engine.optimizer.exact == 0
    assert equal(wanted[0], mean(0, ranks)) == (codec == "fp32")


@on_ranks(2)
@pytest.mark.parametrize("stage", STAGES)
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
    engine = DeepSpeedEngine(2)
    engine.optimizer.gradient_average = False
    pycomm.compress(engine, "fp32")
    wanted = [ranks * part for part in mean(0, ranks)]
    assert equal(engine.backward(drawn(rank, 0)), wanted)


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

    for stage in STAGES:
        refused(stage, "Set sequence_parallel_size to 1", sequence_parallel_size=2)
        refused(stage, "experts", has_moe_layers=True)
        refused(stage, "Leave zero_quantized_gradients out", quantizes=True)
        refused(stage, "reduces the gradients itself", enable_backward_allreduce=False)
        one_bit = type("OneBitAdam", (), {})()
        refused(stage, "OneBitAdam reduces the gradients itself", basic_optimizer=one_bit)
    refused(2, "its optimizer is OtherOptimizer, which has not been", optimizer=OtherOptimizer())
    refused(0, "Set its stage to 1", optimizer=OtherOptimizer())
    refused(3, r"Use fully_shard\(model\)", optimizer=OtherOptimizer())

    engine = DeepSpeedEngine(2)
    engine.optimizer.contiguous_gradients = False
    with pytest.raises(Error, match="Set contiguous_gradients to true"):
        pycomm.compress(engine, "int4")
    engine = DeepSpeedEngine(2)
    engine.optimizer.gradient_reduction_w_predivide = None
    with pytest.raises(Error, match="version of deepspeed cannot be compressed"):
        pycomm.compress(engine, "int4")
    engine = DeepSpeedEngine(1)
    with pytest.raises(ValueError, match="powersgd has its results at the end of a step"):
        pycomm.compress(engine, "powersgd:rank=2")
    pycomm.compress(engine, "int4")
    with pytest.raises(Error, match="compressed already"):
        pycomm.compress(engine, "int8")


@on_ranks(2)
def test_an_exact_codec_sends_what_is_owed(rank, ranks):
    engine = DeepSpeedEngine(2)
    state = pycomm.compress(engine, "int4")
    assert pycomm.state_of(engine) is state
    missing = lost_in_all(engine.backward, state, rank, ranks)
    assert not missing[1].any()  # it is too small to be coded
    near_zero(*missing)
    assert engine.optimizer.exact == 0
