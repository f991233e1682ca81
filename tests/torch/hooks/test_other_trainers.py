"""DeepSpeed and Megatron-Core, compressed: what pycomm replaces, on fakes of their objects.

A fake has only what is replaced or read. Its gradients are those that a test gives it. `make
trainers` does the same with the packages. Two small trainers show what any other one needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import pycomm
from pycomm.errors import Error
from pycomm.policy import Policy
from pycomm.reduction.adapter import Adapter, Layout
from pycomm.reduction.state import CompressionState
from tests.extent import each_value
from tests.torch.harness import SHAPES as EVEN
from tests.torch.harness import Chosen, equal, gradients, heard, mean, near_zero
from tests.torch.pool import on_ranks

# Of odd sizes; two buckets: the first, and the others.
SHAPES = {"first": (61, 37), "short": (33,), "last": (64, 41)}
Net = partial(Chosen, SHAPES)


def drawn(rank: int, step: int, scale: float = 1.0) -> list[torch.Tensor]:
    return list(gradients(rank, step, shapes=SHAPES, scale=scale).values())


def means(step: int, ranks: int) -> list[torch.Tensor]:
    return list(mean(ranks, step, shapes=SHAPES).values())


def lost_in_all(
    backward: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    state: pycomm.CompressionState,
    rank: int,
    ranks: int,
) -> list[torch.Tensor]:
    """Return what two steps, and the exact one that follows, lack of the means, in sum."""
    total = [torch.zeros(shape) for shape in SHAPES.values()]
    for step in range(3):
        if step == 2:
            state.set_policy("none")
        found = backward(drawn(rank, step))
        for sum_, want, part in zip(total, means(step, ranks), found, strict=True):
            sum_ += want - part
    return total


def by_torch(rank: int, codec: str, steps: int) -> list[list[torch.Tensor]]:
    """Return what torch's DDP makes of the same gradients."""
    model = DDP(Net(), bucket_cap_mb=1e-6)  # a bucket for each parameter
    model(gradients(rank, 0, shapes=SHAPES)).backward()  # in its first step DDP has one bucket
    pycomm.compress(model, codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(gradients(rank, step, shapes=SHAPES)).backward()
        optimizer.step()  # else the gradients count as thrown away
        found.append([weight.grad.clone() for weight in model.parameters()])
    return found


# ---------------------------------------------------------------------------------------- DeepSpeed
# The methods of its engine that reduce, and the options that decide whether they can be replaced.


STAGES = (1, 2)


class DeepSpeedZeroOptimizer:
    """As that of ZeRO 1 and 2: reduces flat buckets."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights, self.exact, self.loss_scale = weights, 0, 1.0
        self.contiguous_gradients = self.reduce_scatter = self.gradient_average = True
        self.bit16_groups = [weights]
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
            flat = torch.cat([self.weights[at].grad.view(-1) for at in places])
            params = [(0, at, at) for at in places]
            self.ipg_buckets[torch.float32] = SimpleNamespace(params=params)
            flat = self.gradient_reduction_w_predivide(flat, torch.float32)
            sizes = [self.weights[at].numel() for at in places]
            for at, part in zip(places, torch.split(flat, sizes), strict=True):
                found[at] = part.view_as(self.weights[at])
        self.overlapping_partition_gradients_reduce_epilogue()
        return [found[at] for at in range(len(self.weights))]


class OtherOptimizer:
    loss_scale = 1.0


DeepSpeedZeroOptimizer.__module__ = "deepspeed.runtime.zero.stage_1_and_2"


class DeepSpeedEngine(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.module, self.stage = Net(), stage
        self.optimizer = DeepSpeedZeroOptimizer(list(self.module.parameters()))
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
        for weight, gradient in zip(self.module.parameters(), gradients, strict=True):
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
    assert equal(wanted[0], means(0, ranks)) == (codec == "fp32")


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
    wanted = [ranks * part for part in means(0, ranks)]
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

    for name, value, what in (
        ("contiguous_gradients", False, "Set contiguous_gradients to true"),
        ("gradient_reduction_w_predivide", None, "version of deepspeed cannot be compressed"),
    ):
        engine = DeepSpeedEngine(2)
        setattr(engine.optimizer, name, value)
        with pytest.raises(Error, match=what):
            pycomm.compress(engine, "int4")
    engine = DeepSpeedEngine(1)
    pycomm.compress(engine, "int4")
    with pytest.raises(Error, match="compressed already"):
        pycomm.compress(engine, "int8")


# ------------------------------------------------------------------------------------ Megatron-Core
# Flat buffers, their buckets, and the two methods of a bucket group.


class BucketGroup:
    """As Megatron's: begins to reduce its buckets, and waits for them."""

    def __init__(self, buckets: list[SimpleNamespace], config: SimpleNamespace) -> None:
        self.buckets, self.ddp_config = buckets, config
        self.is_first_batch, self.grad_reduce_handle = False, None
        self.exact, self.checked = 0, 0

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.exact += 1
        for bucket in self.buckets:
            bucket.grad_data *= bucket.gradient_scaling_factor
            dist.all_reduce(bucket.grad_data)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.start_grad_sync()

    def check_grads(self, **_: bool) -> None:
        self.checked += 1


class DistributedDataParallel(nn.Module):
    """As Megatron's: parameters have main_grad, a view into a buffer."""

    def __init__(
        self, padding: int = 0, factor: float = 0.5, alone: bool = False, **config: object
    ) -> None:
        super().__init__()
        self.module = Net()
        self.ddp_config = SimpleNamespace(
            num_distributed_optimizer_instances=1,
            check_for_nan_in_grad=False,
            check_for_large_grads=False,
            overlap_grad_reduce=True,
            average_in_collective=False,
        )
        vars(self.ddp_config).update(config)
        self.intra_dp_cp_group = dist.group.WORLD
        self.expert_parallel_bucket_groups: list[SimpleNamespace] = []
        weights = list(self.module.parameters())
        self.bucket_groups = [
            BucketGroup([bucket(part, padding, factor)], self.ddp_config)
            for part in ([[each] for each in weights] if alone else (weights[:1], weights[1:]))
        ]

    def backward(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Write the gradients, and reduce them as Megatron does; return what there is then."""
        for weight, gradient in zip(self.module.parameters(), gradients, strict=True):
            weight.main_grad.copy_(gradient)
        for group in reversed(self.bucket_groups):
            group.start_grad_sync()
        self.finish()
        return [weight.main_grad.clone() for weight in self.module.parameters()]

    def finish(self) -> None:
        for group in self.bucket_groups:
            group.finish_grad_sync()


DistributedDataParallel.__module__ = "megatron.core.distributed.distributed_data_parallel"


def bucket(weights: list[nn.Parameter], padding: int, factor: float) -> SimpleNamespace:
    data = torch.full((sum(w.numel() + padding for w in weights),), 9.0)
    at = 0
    for weight in weights:
        weight.main_grad = data[at : at + weight.numel()].view(weight.shape)
        at += weight.numel() + padding
    return SimpleNamespace(params_list=weights, grad_data=data, gradient_scaling_factor=factor)


@on_ranks(2)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_buckets_have_the_bits_of_ddp(rank, ranks, codec, padding):
    # A bucket is cut among the owners, and what is coded together depends on where.
    model = DistributedDataParallel(padding, alone=codec != "fp32")
    pycomm.compress(model, codec)
    wanted = by_torch(rank, codec, 4)
    assert all(equal(model.backward(drawn(rank, step)), wanted[step]) for step in range(4))
    assert not any(group.exact for group in model.bucket_groups)
    if codec == "int4":  # else nothing would be lost, and this would say nothing of residuals
        exact = DistributedDataParallel(padding).backward(drawn(rank, 0))
        assert not equal(wanted[0], exact)
    if padding:
        flat = model.bucket_groups[0].buckets[0].grad_data
        assert torch.equal(flat[-padding:], torch.full((padding,), 9.0))


@on_ranks(2)
def test_sums_and_averages_follow_megatrons_config(rank, ranks):
    for factor, averages, wanted in ((0.5, False, 0.5), (1.0, False, 1.0), (1.0, True, 0.5)):
        model = DistributedDataParallel(factor=factor, average_in_collective=averages)
        pycomm.compress(model, "fp32")
        found = model.backward(drawn(rank, 0))
        assert equal(found, [wanted * ranks * each for each in means(0, ranks)])


@on_ranks(2)
def test_megatrons_call_order_is_followed(rank, ranks):
    model = DistributedDataParallel(check_for_nan_in_grad=True)
    pycomm.compress(model, "int4")
    model.backward(drawn(rank, 0))
    assert [group.checked for group in model.bucket_groups] == [1, 1]

    model = DistributedDataParallel(overlap_grad_reduce=False)
    pycomm.compress(model, "fp32")
    wanted = by_torch(rank, "fp32", 1)[0]
    for weight, gradient in zip(model.parameters(), drawn(rank, 0), strict=True):
        weight.main_grad.copy_(gradient)
    model.finish()  # without overlap, waiting begins
    assert equal([weight.main_grad for weight in model.parameters()], wanted)

    first = model.bucket_groups[0]
    first.start_grad_sync()
    first.start_grad_sync()  # the first batch of Megatron begins twice
    model.bucket_groups[1].start_grad_sync()
    model.finish()

    model = DistributedDataParallel()
    pycomm.compress(model, "fp32")
    with pytest.raises(Error, match=r"got no gradient.*overlap_grad_reduce=False"):
        model.bucket_groups[0].finish_grad_sync()
    model.bucket_groups[0].start_grad_sync()
    with pytest.raises(Error, match="reduced twice before they are waited for"):
        model.bucket_groups[0].start_grad_sync()
    model.bucket_groups[1].start_grad_sync()
    model.finish()


@on_ranks(2)
def test_unsupported_models_are_refused(rank, ranks):
    with pytest.raises(ValueError, match="num_distributed_optimizer_instances=2"):
        pycomm.compress(DistributedDataParallel(num_distributed_optimizer_instances=2), "int4")
    model = DistributedDataParallel()
    pycomm.compress(model, "int4")
    with pytest.raises(Error, match="compressed already"):
        pycomm.compress(model, "int8")
    model = DistributedDataParallel()
    for group in model.bucket_groups:
        group.finish_grad_sync = None
    with pytest.raises(Error, match="BucketGroup has no finish_grad_sync"):
        pycomm.compress(model, "int4")


@on_ranks(2)
def test_experts_that_travel_exactly_are_named_once(rank, ranks):
    with heard() as said:
        model = DistributedDataParallel()
        (*_, last) = model.parameters()
        group = model.bucket_groups.pop()
        model.expert_parallel_bucket_groups = [SimpleNamespace(params=[last])]
        pycomm.compress(model, "int4")
        model.bucket_groups.append(group)
    found = [text for text in said if "experts" in text]
    assert len(found) == (rank == 0)
    assert all("1 parameters of experts, from last on" in text for text in found)


@on_ranks(2)
@pytest.mark.parametrize("trainer", ["deepspeed", "megatron"])
def test_an_exact_codec_sends_what_is_owed(rank, ranks, trainer):
    model = DeepSpeedEngine(2) if trainer == "deepspeed" else DistributedDataParallel()
    state = pycomm.compress(model, "int4")
    assert pycomm.state_of(model) is state
    missing = lost_in_all(model.backward, state, rank, ranks)
    assert not missing[1].any()  # it is too small to be coded
    near_zero(*missing)
    assert not any(one.exact for one in getattr(model, "bucket_groups", None) or [model.optimizer])


# ------------------------------------------------------------------------- a trainer of one's own
# What trainers need to send their gradients compressed: `compress` and `compress_shards` below.


Gradients = dict[str, torch.Tensor]


class Trainer:
    """A trainer of somebody else, which averages gradients after each backward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def average(self, named: Gradients) -> None:
        for gradient in named.values():
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())


def compress(trainer: Trainer, codec: str | Policy, **options: Any) -> CompressionState:
    """Let the trainer's averages travel compressed."""
    state = CompressionState(codec, adapter=Adapter("Trainer"), **options)
    for name, parameter in trainer.module.named_parameters():
        state.add(name, parameter)
    state.agree()

    def average(named: Gradients) -> None:
        state.begin_step()
        futures = [state.reduce(gradient.view(-1), [name]) for name, gradient in named.items()]
        state.end_step()
        for future in futures:
            state.wait(future)

    trainer.average = average
    return state


def averaged(trainer: Trainer, rank: int, step: int) -> Gradients:
    given = gradients(rank, step)
    trainer.average(given)
    return given


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_the_exact_codec_has_the_bits_of_the_trainer(rank, size):
    plain, trainer = Trainer(Chosen()), Trainer(Chosen())
    compress(trainer, "fp32")
    for step in range(3):
        assert equal(averaged(trainer, rank, step), averaged(plain, rank, step))


class Shards:
    """A trainer of which each rank has rows of all parameters, and gets their gradients."""

    def __init__(self, ranks: int) -> None:
        cuts = {name: (shape[0] // ranks, *shape[1:]) for name, shape in EVEN.items()}
        self.shapes = {name: torch.Size(shape) for name, shape in cuts.items()}

    def rows_of_ranks(self, named: Gradients) -> torch.Tensor:
        parts = [named[name].reshape(dist.get_world_size(), -1) for name in self.shapes]
        return torch.cat(parts, dim=1).view(-1)


def compress_shards(trainer: Shards, codec: str | Policy) -> CompressionState:
    """Let the trainer's reduce-scatters travel compressed."""
    group = dist.group.WORLD
    layout = Layout(trainer.shapes, by_rows=set(EVEN), shard_group=group, scatters=True)
    state = CompressionState(codec, adapter=Adapter("Shards", layout))
    for name, shape in EVEN.items():
        state.add(name, torch.empty(shape))
    state.agree()
    return state


def scattered(state: CompressionState, trainer: Shards, given: Gradients) -> torch.Tensor:
    rows = trainer.rows_of_ranks(given)
    ours = torch.empty(rows.numel() // dist.get_world_size())
    state.begin_step()
    state.reducer.scatter(ours, rows, list(EVEN), dist.group.WORLD, average=True)
    state.end_step()
    return ours


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_layout_of_shards_scatters_what_is_owed(rank, size, backend):
    """Each rank gets its rows of the means, and an exact codec sends what a coarse one owes."""
    trainer = Shards(size)
    state = compress_shards(trainer, Policy("int4", guard=None))
    missing = torch.zeros(sum(shape.numel() for shape in trainer.shapes.values()))
    for step in range(3):
        if step == 2:
            state.set_policy("none")
        want = trainer.rows_of_ranks(mean(size, step)).view(size, -1)[rank]
        missing += want - scattered(state, trainer, gradients(rank, step))
        assert step == 2 or missing.any()
    near_zero(missing)
