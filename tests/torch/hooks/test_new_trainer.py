"""What a trainer needs to send its gradients compressed: `compress` below is all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pycomm.policy import Policy
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
    state = CompressionState(codec, **options)
    for name, parameter in trainer.module.named_parameters():
        state.add(name, parameter)
    state.plan.complete()
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
