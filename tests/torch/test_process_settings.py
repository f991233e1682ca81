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
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.horovod as hvd
from pycomm.local_sgd import Streamed
from tests.torch.harness import equal

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


def gradients(codec: str, **options: Any) -> Callable[[], list[torch.Tensor]]:
    def run() -> list[torch.Tensor]:
        model = DistributedDataParallel(Net())
        with pycomm.compress(model, codec, **options):
            return train(model, torch.optim.SGD(model.parameters(), lr=0.05))

    return run


def sharded(codec: str) -> list[torch.Tensor]:
    model = fully_shard(Net())
    with pycomm.compress(model, codec, weights="int8"):
        return train(model, torch.optim.SGD(model.parameters(), lr=0.05))


def optimizer(name: str, **options: Any) -> Callable[[], list[torch.Tensor]]:
    def run() -> list[torch.Tensor]:
        model = DistributedDataParallel(Net())
        return train(model, getattr(pycomm, name)(model.parameters(), 1e-3, model=model, **options))

    return run


def sharded_momentum() -> list[torch.Tensor]:
    model = fully_shard(Net())
    return train(model, pycomm.CodedAdamW(model.parameters(), model=model, codec="sign"))


def local(**options: Any) -> Callable[[], list[torch.Tensor]]:
    def run() -> list[torch.Tensor]:
        model = Net()
        outer = pycomm.LocalSGD(model, every=2, **options)
        return train(model, torch.optim.SGD(model.parameters(), lr=0.05), outer.step)

    return run


METHODS: dict[str, Callable[[], list[torch.Tensor]]] = {
    **{codec: gradients(codec) for codec in ("int4", "sign", "topk:0.01", "powersgd:2", "auto")},
    **{codec: gradients(codec) for codec in ("dgc:0.01", "lossless", "nvfp4")},
    "eden": gradients("eden:bits=2,size=128"),
    "residuals in int8": gradients("int4", feedback="decay:0.9,storage=int8"),
    "sharded": lambda: sharded("int4"),
    "coded momentum": optimizer("CodedAdamW", codec="sign"),
    "coded momentum, int4": optimizer("CodedAdamW", codec="int4"),
    "sharded momentum": sharded_momentum,
    "sgd": optimizer("CodedSGD", codec="sign"),
    "local": local(codec="int4"),
    "local in streams": local(codec="topk:0.05,values=bins2", exchange=Streamed(2, overlap=0)),
}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, outer: Callable[[], Any] = lambda: None
) -> list[torch.Tensor]:
    for step in range(STEPS):
        model(100 * step + 10 * dist.get_rank()).backward()
        optimizer.step()
        outer()
        optimizer.zero_grad()
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def both(rank: int, size: int, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    plain = METHODS[name]()
    with defaults(torch.float64, "meta"):
        return plain, METHODS[name]()


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "pycomm") for name in METHODS]
    + [(name, "gloo") for name in ("int4", "topk:0.01", "coded momentum")],
)
def test_training_has_the_same_bits(pool, name, backend):
    """Gloo sends payloads that the core has made; pycomm's backend does all in the core."""
    for plain, other in pool.run(both, name, ranks=2, backend=backend):
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
