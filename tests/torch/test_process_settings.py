"""What a program sets for all of torch changes no result: defaults of new tensors, and autocast.

`torch.set_default_device("cuda")` is common, `torch.set_default_dtype` is in many a script, and in
many a loop the backward or the step is inside of autocast. A meta device stands for another one
here: what is made on it has no values.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard

import pycomm
import pycomm.horovod as hvd
from pycomm.local_sgd import Streamed
from tests.torch import ways
from tests.torch.harness import equal
from tests.torch.pool import on_ranks

GIVEN = {"dtype": torch.float32, "device": "cpu"}
STEPS = 6


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), **GIVEN)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(numbers(300, 64, seed=0) / 10)
        self.bias = nn.Parameter(numbers(64, seed=1) / 10)
        self.down = nn.Parameter(numbers(64, 300, seed=2) / 10)

    def forward(self, seed: int) -> torch.Tensor:
        """Return a loss whose gradients are a quarter of the parameters, and noise."""
        losses = [
            (p * p / 8 + p * numbers(*p.shape, seed=seed + i)).sum()
            for i, p in enumerate((self.up, self.bias, self.down))
        ]
        return torch.stack(losses).sum()


@contextmanager
def defaults(dtype: torch.dtype, device: str | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    # Memory that nobody has written is NaN in this mode.
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)


PLAIN = partial(torch.optim.SGD, lr=0.05)


def compressed(codec: str, **options: Any) -> ways.Way:
    return partial(ways.gradients, codec=codec, make=PLAIN, **options)


METHODS: dict[str, ways.Way] = {
    **{codec: compressed(codec) for codec in ("int4", "sign", "topk:0.01", "powersgd:2", "auto")},
    **{codec: compressed(codec) for codec in ("topk:0.01", "lossless", "nvfp4")},
    "eden": compressed("eden:bits=2,size=128"),
    "residuals in int8": compressed("int4", feedback="decay:0.9,storage=int8"),
    "sharded": ways.shards,
    "coded momentum": ways.momentum,
    "coded momentum, int4": partial(ways.momentum, codec="int4"),
    "sharded momentum": partial(ways.momentum, wrap=fully_shard),
    "sgd": partial(ways.momentum, make=ways.SGD),
    "local": partial(ways.local, make=PLAIN, every=2),
    "local in streams": partial(
        ways.local,
        make=PLAIN,
        every=2,
        codec="topk:0.05,values=bins2",
        exchange=Streamed(2, overlap=0),
    ),
}


def train(way: ways.Way) -> list[torch.Tensor]:
    training = way(Net())
    for step in range(STEPS):
        training.step(lambda model, step=step: model(100 * step + 10 * dist.get_rank()))
    training.end()
    found = training.model.parameters()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in found]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "pycomm") for name in METHODS]
    + [(name, "gloo") for name in ("int4", "topk:0.01", "coded momentum")],
)
def test_training_has_the_same_bits(rank, size, name):
    """Gloo sends payloads that the core has made; pycomm's backend does all in the core."""
    plain = train(METHODS[name])
    with defaults(torch.float64, "meta"):
        other = train(METHODS[name])
    assert equal(plain, other)


# ----------------------------------------------------------------------------- nothing is unpickled
# No training reads a pickle of another rank: reading one runs code that its sender chooses.


_read: list[str] = []
_watching = False


def _audit(event: str, args: tuple[object, ...]) -> None:
    if _watching and event == "pickle.find_class":
        _read.append(f"{args[0]}.{args[1]}")


@cache
def _install() -> None:
    sys.addaudithook(_audit)  # for the life of the process


def _watched(train: Callable[[], object]) -> list[str]:
    """Return the classes that pickles named while a training ran, and of one read on purpose."""
    global _watching
    _install()
    _read.clear()
    _watching = True
    # Texts and numbers in a pickle name no class, so torch's object collectives are watched, too.
    with mock.patch.object(distributed_c10d, "_tensor_to_object", _object_collective):
        try:
            train()
            pickle.loads(pickle.dumps(torch.Size))
        finally:
            _watching = False
    return list(_read)


def _object_collective(*args: object) -> None:
    raise AssertionError("a collective of torch that unpickles what other ranks send")


def _begun(way: ways.Way) -> ways.Training:
    torch.manual_seed(0)
    training = way(nn.Linear(300, 300))
    for _ in range(2):
        training.step(lambda model: model(torch.ones(4, 300)).square().mean())
    return training


def _adopted() -> None:
    one, other = (_begun(ways.momentum) for _ in range(2))
    other.optimizer.adopt_state(one.optimizer)


def _first_step(taken: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, after a step where one is `taken`."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    optimizer = ways.ADAMW(model.parameters())
    if taken:
        model(torch.ones(4, 300)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _handed_over() -> None:
    model, optimizer = _first_step(True)
    pycomm.elastic.hand_over(model, optimizer, has=dist.get_rank() == 0)


def _horovod() -> None:
    hvd.init()
    model, optimizer = _first_step(hvd.rank() == 0)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    _begun(partial(ways.horovod, make=ways.ADAMW))


TRAININGS: dict[str, Callable[[], object]] = {
    "int4": lambda: _begun(ways.gradients).end(),
    "auto": lambda: _begun(partial(ways.gradients, codec="auto")).end(),
    "powersgd": lambda: _begun(partial(ways.gradients, codec="powersgd:2")).end(),
    "coded optimizer": lambda: _begun(ways.momentum),
    "adopted optimizer": _adopted,
    "local SGD": lambda: _begun(ways.local).end(),
    "hand-over": _handed_over,
    "horovod": _horovod,
}


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_reads_no_pickle(rank, size, name):
    # The hook has seen the one that was read on purpose.
    assert _watched(TRAININGS[name]) == ["torch.Size"]
