"""How far coded optimizers move values where gradients fade in some rows, or jump in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch import harness as ddp
from tests.torch.harness import equal, gradients
from tests.torch.optim import test_sharded_adamw as sharded
from tests.torch.optim.test_coded_adamw import EDEN, SIZES, make, values


def moves(optimizer: Any, model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Take a step, and return by how many learning rates the values of a matrix have moved."""
    parameter = model.module.big
    before = parameter.detach().clone()
    optimizer.zero_grad()
    model(given).backward()
    optimizer.step()
    kept = before * (1 - SIZES["lr"] * SIZES["weight_decay"])
    return (parameter.detach() - kept) / SIZES["lr"]


def with_faint_rows(rank: int, size: int, codec: str) -> float:
    """Return the most that a value moves in a step, while rows fade."""
    model, optimizer = make(codec, betas=(0.9, 0.8))
    most = 0.0
    for step in range(60):
        faint = gradients(rank, step)
        faint["big"][3:9] *= 0.5**step
        most = max(most, float(moves(optimizer, model, faint).abs().max()))
    return most


@pytest.mark.parametrize("codec", ["sign", EDEN])
def test_coding_errors_do_not_move_rows_of_faint_gradients(pool, codec):
    # Adam's coordinates move by a learning rate or two, and codes of one bit add some.
    assert max(pool.run(with_faint_rows, codec)) < 6


def with_a_jump(rank: int, size: int, codec: str, refresh: int) -> float:
    """Return how far the values move in all after a step whose gradients were 1000 times larger."""
    model, optimizer = make(codec, refresh=refresh)
    moved = []
    for step in range(30):
        given = gradients(rank, step)
        if step == 10:
            given = {name: 1000 * gradient for name, gradient in given.items()}
        moved.append(moves(optimizer, model, given))
    return float(sum(moved[10:]).square().mean().sqrt())


@pytest.mark.parametrize("codec", ["sign", "topk:0.05", "int4"])
def test_a_jump_of_the_gradients_moves_values_little(pool, codec):
    # Without a bound it is hundreds of learning rates.
    for refresh in (1, 16):
        assert max(pool.run(with_a_jump, codec, refresh)) < 6


def with_a_jump_in_shards(rank: int, size: int) -> float:
    """The same for shards of rows, of which the last rank's has padding."""
    model, optimizer = sharded.make(size)
    moved = []
    for step in range(30):
        given = sharded.gradients(rank, step)
        if step == 10:
            given = {name: 1000 * gradient for name, gradient in given.items()}
        before = sharded.values(model)[0]
        sharded.step(model, optimizer, given)
        kept = before * (1 - SIZES["lr"] * SIZES["weight_decay"])
        moved.append((sharded.values(model)[0] - kept) / SIZES["lr"])
    return float(sum(moved[10:]).square().mean().sqrt())


def test_a_jump_in_shards_moves_values_little(pool):
    assert max(pool.run(with_a_jump_in_shards, ranks=3)) < 6


def of_all_ranks(rank: int, size: int, which: str, refresh: int) -> list[list[torch.Tensor]]:
    """Finite gradients whose squares overflow, on one rank: in the first steps, and later."""
    found = []
    for bad in (0, 1, 9):
        if which == "sharded":
            model, optimizer = sharded.make(size, refresh=refresh)
        elif which == "adamw":
            model, optimizer = make(refresh=refresh)
        else:
            model = DistributedDataParallel(ddp.Chosen())
            optimizer = pycomm.CodedSGD(model.parameters(), 1e-3, model=model)
        for step in range(24):
            given = (sharded if which == "sharded" else ddp).gradients(rank, step)
            if step == bad and rank == 1:
                given["big"][3, 4] = 1e20
            optimizer.zero_grad()
            model(given).backward()
            optimizer.step()
        shared = ("row", "column", "moment_weight", "coding_error", "momentum_buffer")
        kept = [s[key] for s in optimizer.state.values() for key in shared if key in s]
        assert all(one.isfinite().all() for one in kept)
        found.append([*kept, *([] if which == "sharded" else values(model))])
        if which != "sgd":
            steps = [moment._steps for moment in optimizer.compression.moments.values()]
            found.append([torch.tensor(steps)])
    return found


@pytest.mark.parametrize("refresh", [1, 4])
@pytest.mark.parametrize("which", ["adamw", "sharded", "sgd"])
def test_overflowing_squares_leave_ranks_alike(pool, which, refresh):
    first, second = pool.run(of_all_ranks, which, refresh)
    for one, other in zip(first, second, strict=True):
        assert equal(one, other)
