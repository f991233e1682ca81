"""What trainers need to send their gradients compressed: `compress` and `compress_shards` below."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pycomm.policy import Policy
from pycomm.reduction.adapter import Adapter, Layout
from pycomm.reduction.state import CompressionState
from tests.torch.harness import SHAPES, Chosen, equal, gradients, mean, near_zero, owed
from tests.torch.pool import on_ranks

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


@on_ranks(2)
@pytest.mark.parametrize("codec", ["int4", "topk:0.1"])
def test_what_is_owed_is_sent_by_an_exact_codec(rank, size, codec):
    trainer = Trainer(Chosen())
    state = compress(trainer, Policy(codec, guard=None))
    missing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(6):
        if step == 3:
            assert any(one.norm() > 0 for one in owed(state).values())
            state.set_policy("none")
        found, want = averaged(trainer, rank, step), mean(size, step)
        for name in SHAPES:
            missing[name] += want[name] - found[name]
    near_zero(*missing.values())


class Shards:
    """A trainer of which each rank has rows of all parameters, and gets their gradients."""

    def __init__(self, ranks: int) -> None:
        cuts = {name: (shape[0] // ranks, *shape[1:]) for name, shape in SHAPES.items()}
        self.shapes = {name: torch.Size(shape) for name, shape in cuts.items()}

    def rows_of_ranks(self, named: Gradients) -> torch.Tensor:
        parts = [named[name].reshape(dist.get_world_size(), -1) for name in self.shapes]
        return torch.cat(parts, dim=1).view(-1)


def compress_shards(trainer: Shards, codec: str | Policy) -> CompressionState:
    """Let the trainer's reduce-scatters travel compressed."""
    group = dist.group.WORLD
    layout = Layout(trainer.shapes, by_rows=set(SHAPES), shard_group=group, scatters=True)
    state = CompressionState(codec, adapter=Adapter("Shards", layout))
    for name, shape in SHAPES.items():
        state.add(name, torch.empty(shape))
    state.agree()
    return state


def scattered(state: CompressionState, trainer: Shards, given: Gradients) -> torch.Tensor:
    rows = trainer.rows_of_ranks(given)
    ours = torch.empty(rows.numel() // dist.get_world_size())
    state.begin_step()
    wait = state.reducer.scatter(ours, rows, list(SHAPES), dist.group.WORLD, average=True)
    state.end_step()
    wait()
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
