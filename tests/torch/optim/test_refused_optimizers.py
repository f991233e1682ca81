"""What CodedAdamW cannot do is refused by all ranks, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error, WireMismatch
from tests.torch.harness import Chosen


def refused(rank: int, size: int) -> dict[str, str]:
    def text(make_one: Any) -> str:
        try:
            make_one()
        except (Error, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def attempt(model: nn.Module | None = None, **options: Any) -> str:
        own = model if model is not None else DistributedDataParallel(Chosen())
        given = {"params": own.parameters(), "model": own, **options}
        return text(lambda: pycomm.CodedAdamW(**given))

    ddp = DistributedDataParallel(Chosen())
    rmsprop = torch.optim.RMSprop(ddp.parameters(), lr=0.1)
    amsgrad = torch.optim.AdamW(ddp.parameters(), amsgrad=True)
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=True)))
    compressed = DistributedDataParallel(Chosen())
    pycomm.compress(compressed, "int8")
    return {
        "betas": attempt(betas=(1.0, 0.9)),
        "one beta": attempt(betas=(0.9,)),
        "no beta": attempt(betas=0.9),
        "lr": attempt(lr=-1.0),
        "eps": attempt(eps=float("nan")),
        "refresh": attempt(refresh=-1),
        "group": attempt(params=[{"params": [*ddp.parameters()], "betas": (0.9, 1.0)}], model=ddp),
        "sparse": attempt(sparse),
        "eden": attempt(codec="eden:bits=1"),
        "powersgd": attempt(codec="powersgd:4"),
        "auto": attempt(codec="auto"),
        "feedback": attempt(feedback="decay"),
        "bare": attempt(nn.Linear(4, 4)),
        "foreign": attempt(params=nn.Linear(4, 4).parameters()),
        "twice": attempt(compressed),
        "rmsprop": text(lambda: pycomm.code_optimizer(rmsprop, ddp)),
        "amsgrad": text(lambda: pycomm.code_optimizer(amsgrad, ddp)),
    }


def test_what_cannot_work_is_refused(pool):
    words = {
        "betas": "ValueError: CodedAdamW: betas=(1.0, 0.9)",
        "one beta": "give two numbers",
        "no beta": "give two numbers",
        "lr": "ValueError: CodedAdamW: lr=-1.0",
        "eps": "eps=nan is not a finite number",
        "refresh": "refresh=-1",
        "group": "ValueError: CodedAdamW: betas=(0.9, 1.0)",
        "sparse": "ValueError: CodedAdamW: 0 has sparse gradients",
        "eden": "scale=mmse",
        "powersgd": "factors",
        "auto": "name a codec",
        "feedback": "kind residual",
        "bare": "TypeError: CodedAdamW takes a model wrapped",
        "foreign": "does not belong",
        "twice": "Error: the model has the communication hook",
        "rmsprop": "TypeError: code_optimizer takes torch.optim.AdamW or SGD, not RMSprop",
        "amsgrad": "ValueError: code_optimizer: CodedAdamW has no amsgrad",
    }
    for found in pool.run(refused):
        assert found.keys() == words.keys()
        for what, text in words.items():
            assert text in found[what], (what, found[what])


def differ(rank: int, size: int, what: dict[str, Any]) -> str:
    model = DistributedDataParallel(Chosen())
    options = {key: value[rank] for key, value in what.items()}
    try:
        pycomm.CodedAdamW(model.parameters(), model=model, **options)
    except WireMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "what",
    [
        {"lr": (0.1, 0.2)},
        {"codec": ("sign", "int4")},
        {"refresh": (1, 2)},
        {"seed": (1, 2)},
        {"scaler": (None, torch.amp.GradScaler("cpu"))},
    ],
    ids=lambda what: next(iter(what)),
)
def test_ranks_that_differ_get_an_error_each(pool, what):
    assert all("rank" in text for text in pool.run(differ, what))
