"""No training reads a pickle of another rank: reading one runs code that its sender chooses."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import cache
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.horovod as hvd

_read: list[str] = []
_watching = False


def _audit(event: str, args: tuple[object, ...]) -> None:
    if _watching and event == "pickle.find_class":
        _read.append(f"{args[0]}.{args[1]}")


@cache
def _install() -> None:
    sys.addaudithook(_audit)  # for the life of the process


def _watched(train: Callable[[], None]) -> list[str]:
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


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(300, 300)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 300)).square().mean().backward()
        optimizer.step()


def _compressed(codec: str) -> Callable[[], None]:
    def train() -> None:
        model = DistributedDataParallel(_model())
        state = pycomm.compress(model, codec)
        _step(model, torch.optim.AdamW(model.parameters()))
        state.remove()

    return train


def _coded() -> None:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, pycomm.code_optimizer(optimizer, model, "sign"))


def _adopted() -> None:
    optimizers = []
    for _ in range(2):
        model = DistributedDataParallel(_model())
        optimizer = pycomm.CodedAdamW(model.parameters(), lr=1e-3, codec="sign", model=model)
        _step(model, optimizer)
        optimizers.append(optimizer)
    optimizers[1].adopt_state(optimizers[0])


def _local() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    with pycomm.LocalSGD(model, every=1, optimizer=optimizer):
        _step(model, optimizer)


def _handed_over() -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer)
    pycomm.elastic.hand_over(model, optimizer, has=torch.distributed.get_rank() == 0)


def _horovod() -> None:
    hvd.init()
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    if hvd.rank() == 0:
        _step(model, optimizer)
    hvd.broadcast_parameters(model.state_dict())
    hvd.broadcast_optimizer_state(optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    _step(model, optimizer)


TRAININGS = {
    "int4": _compressed("int4"),
    "auto": _compressed("auto"),
    "powersgd": _compressed("powersgd:2"),
    "coded optimizer": _coded,
    "adopted optimizer": _adopted,
    "local SGD": _local,
    "hand-over": _handed_over,
    "horovod": _horovod,
}


def trained(rank: int, ranks: int, name: str) -> list[str]:
    return _watched(TRAININGS[name])


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_reads_no_pickle(pool, name, backend):
    for read in pool.run(trained, name, backend=backend):
        assert read == ["torch.Size"]  # the hook has seen the one that was read on purpose
