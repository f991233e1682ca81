"""What coded optimizers cannot do is refused by all ranks, before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error, PeerLost, WireMismatch
from tests.torch.harness import Chosen, equal, gradients
from tests.torch.optim import table
from tests.torch.pool import on_ranks

ADAMW, SGD = pycomm.CodedAdamW, pycomm.CodedSGD


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(Chosen())


def compressed(model: nn.Module) -> nn.Module:
    pycomm.compress(model, "int8")
    return model


def sparse() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=True)))


def columns() -> nn.Module:
    return fully_shard(nn.Linear(64, 64), shard_placement_fn=lambda p: Shard(p.ndim - 1))


def divided() -> nn.Module:
    model = fully_shard(Chosen())
    model.set_gradient_divide_factor(3.0)
    return model


def made(kind: Any, model: nn.Module, **options: Any) -> Any:
    return kind(**{"params": model.parameters(), "model": model, **options})


def replaced(kind: Any, **options: Any) -> Any:
    model = ddp()
    return pycomm.code_optimizer(kind(model.parameters(), lr=0.1, **options), model)


def of_group(kind: Any, **options: Any) -> Any:
    model = ddp()
    return kind(params=[{"params": [*model.parameters()], **options}], model=model)


def foreign(kind: Any) -> Any:
    return made(kind, ddp(), params=nn.Linear(4, 4).parameters())


# What is tried, and a part of the error.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: made(ADAMW, ddp(), betas=(1.0, 0.9)), "ValueError: CodedAdamW: betas=(1.0, 0.9)"),
    (lambda: made(ADAMW, ddp(), betas=(0.9,)), "give two numbers"),
    (lambda: made(ADAMW, ddp(), betas=0.9), "give two numbers"),
    (lambda: made(ADAMW, ddp(), lr=-1.0), "ValueError: CodedAdamW: lr=-1.0"),
    (lambda: made(ADAMW, ddp(), eps=float("nan")), "eps=nan is not a finite number"),
    (lambda: made(ADAMW, ddp(), refresh=-1), "refresh=-1"),
    (lambda: of_group(ADAMW, betas=(0.9, 1.0)), "ValueError: CodedAdamW: betas=(0.9, 1.0)"),
    (lambda: made(ADAMW, sparse()), "ValueError: CodedAdamW: 0 has sparse gradients"),
    (lambda: made(ADAMW, ddp(), codec="eden:bits=1"), "scale=mmse"),
    (lambda: made(ADAMW, ddp(), codec="sign 4:eden:bits=1"), "scale=mmse"),
    (lambda: made(ADAMW, ddp(), codec="auto"), "name a codec"),
    (lambda: made(ADAMW, ddp(), feedback="decay"), "kind residual"),
    (lambda: made(ADAMW, nn.Linear(4, 4)), "TypeError: CodedAdamW takes a model wrapped"),
    (lambda: foreign(ADAMW), "does not belong"),
    (lambda: made(ADAMW, compressed(ddp())), "Error: this model is compressed already"),
    (lambda: made(ADAMW, columns()), "ValueError: CodedAdamW: weight is sharded by dimension 1"),
    (lambda: made(ADAMW, divided()), "Error: torch sums the gradients"),
    (
        lambda: made(ADAMW, compressed(fully_shard(Chosen()))),
        "Error: this model, or a part of it, is compressed already",
    ),
    (lambda: made(SGD, ddp(), momentum=1.0), "CodedSGD: momentum=1.0 must be from 0 to below 1"),
    (lambda: made(SGD, ddp(), momentum="much"), "TypeError: momentum"),
    (lambda: made(SGD, ddp()).compression.set_policy("eden:bits=1"), "scale=mmse"),
    (lambda: made(SGD, ddp()).compression.set_policy("auto"), "name a codec"),
    (
        lambda: replaced(torch.optim.RMSprop),
        "TypeError: code_optimizer takes torch.optim.AdamW, Adam or SGD, not RMSprop",
    ),
    (
        lambda: replaced(torch.optim.AdamW, amsgrad=True),
        "ValueError: code_optimizer: CodedAdamW has no amsgrad",
    ),
    (
        lambda: replaced(torch.optim.Adam, weight_decay=0.1),
        "ValueError: code_optimizer: Adam adds its weight decay to the gradients",
    ),
    (
        lambda: replaced(torch.optim.SGD, momentum=0.9, nesterov=True),
        "CodedSGD has no nesterov",
    ),
    (
        lambda: replaced(torch.optim.SGD, momentum=0.9, dampening=0.5),
        "CodedSGD has no dampening",
    ),
    (lambda: replaced(torch.optim.SGD), "no momentum that could travel"),
]


@on_ranks(2)
def test_what_cannot_work_is_refused(rank, size):
    for act, words in REFUSED:
        with pytest.raises((Error, TypeError, ValueError)) as caught:
            act()
        assert words in f"{type(caught.value).__name__}: {caught.value}"


@on_ranks(2)
def test_shards_that_fail_later_are_refused(rank, size):
    """What only a step shows: parameters without gradients, and a divisor that is set later."""
    partly, later = fully_shard(Chosen(unit=0.01)), fully_shard(Chosen(unit=0.01))
    optimizer, _ = (made(ADAMW, model) for model in (partly, later))
    partly(gradients(rank, 0)).backward()
    optimizer.step()
    with pytest.raises(Error, match=r"set_reduce_scatter_unused_params\(True\)"):
        partly(gradients(rank, 1, ["big"])).backward()
    later.set_gradient_divide_factor(3.0)
    with pytest.raises(Error, match="torch sums the gradients"):
        later(gradients(rank, 1)).backward()


def another_parameter(group: dict[str, Any]) -> None:
    group["params"][0] = nn.Parameter(group["params"][0].detach().clone())


# What becomes of a group before a step, and a part of the error.
LATER: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda group: group.update(lr=-1.0), "lr=-1.0"),
    (lambda group: group.update(lr=float("nan")), "lr=nan"),
    (lambda group: group.update(weight_decay=-1.0), "weight_decay=-1.0"),
    (lambda group: group.update(betas=(1.5, 0.9)), "betas=(1.5, 0.9)"),
    (lambda group: group.update(momentum=1.0), "momentum=1.0"),
    (lambda group: group.update(maximize=True), "has no maximize"),
    (lambda group: group.update(amsgrad=True), "has no amsgrad"),
    (lambda group: group.update(nesterov=True), "has no nesterov"),
    (another_parameter, "does not belong"),
]


@on_ranks(2)
@pytest.mark.parametrize("kind", [ADAMW, SGD])
def test_what_cannot_work_is_refused_in_every_step(rank, size, kind):
    model = ddp()
    optimizer = made(kind, model)
    (group,) = optimizer.param_groups
    before = [p.detach().clone() for p in model.parameters()]
    for change, words in LATER:
        settings = {**group, "params": [*group["params"]]}
        change(group)
        model.zero_grad()
        model(gradients(rank, 0)).backward()
        with pytest.raises(ValueError, match=re.escape(words)):
            optimizer.step()
        group.clear()
        group.update(settings)
    assert equal(before, [p.detach() for p in model.parameters()])
    optimizer.step()


DIFFERENT: list[tuple[Any, dict[str, Any]]] = [
    (kind, what)
    for kind in (ADAMW, SGD)
    for what in (
        {"lr": (0.1, 0.2)},
        {"codec": ("sign", "int4")},
        {"seed": (1, 2)},
        {"scaler": (None, torch.amp.GradScaler("cpu"))},
        {"refresh": (1, 2)},
        {"betas": ((0.9, 0.9), (0.8, 0.9))} if kind is ADAMW else {"momentum": (0.9, 0.8)},
    )
]


@on_ranks(2)
def test_ranks_that_differ_get_an_error_each(rank, size):
    for kind, what in DIFFERENT:
        options = {key: value[rank] for key, value in what.items()}
        with pytest.raises(WireMismatch, match="rank"):
            made(kind, ddp(), **options)


# ---------------------------------------------------------------- groups that have lost ranks


class OfLostRank:
    """An operation with a lost rank; a second wait says less."""

    def __init__(self) -> None:
        self.errors: list[Exception] = [RuntimeError("failed"), PeerLost("rank 7 died", 7, [7])]

    def wait(self) -> None:
        raise self.errors.pop()


@on_ranks(2)
@table.in_ddp
def test_an_exchange_that_has_failed_is_awaited_once(rank, size, which):
    """The group itself raises the first error in all that follows."""
    model, optimizer = table.make(which)
    table.train(model, optimizer, rank, range(2))
    optimizer.zero_grad()
    model(table.gradients(rank, 2)).backward()
    optimizer.momenta._sent.wait()
    optimizer.momenta._sent = OfLostRank()
    with pytest.raises(PeerLost, match="rank 7 died"):
        optimizer.step()
    table.train(model, optimizer, rank, range(3, 4))


@on_ranks(2)
def test_other_members_of_the_same_group_are_refused(rank, size):
    model, optimizer = table.make("sgd")
    table.train(model, optimizer, rank, range(1))
    optimizer.compression.reducer.formed = lambda: 1  # as after pycomm.elastic.reconfigure
    with pytest.raises(Error, match="adopt_state"):
        table.train(model, optimizer, rank, range(1, 2))
