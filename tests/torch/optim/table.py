"""The table of the contract: every coded optimizer in every wrapper, and a loop that trains all.

The folder `contract` has the promises, each of which holds for all rows, or for those that it
names. A row is a text, by which the functions here make a model and its optimizer, and a number of
ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch import harness
from tests.torch.harness import Chosen, equal, whole

SHAPES = {"big": (65, 96), "small": (41, 70), "bias": (50,)}
"""Shards of two ranks are not of equal size."""
RATES = {"adamw": 1e-2, "sgd": 2.0**-7, "local": 2.0**-7}
KINDS = {
    "adamw": (pycomm.CodedAdamW, torch.optim.AdamW),
    "sgd": (pycomm.CodedSGD, torch.optim.SGD),
    "local": (None, torch.optim.SGD),  # with the outer step of LocalSGD in every second one
}
MOMENTUM = {"adamw": "exp_avg", "sgd": "momentum_buffer"}
# Without rebuilt buckets after the first step, so that two models have the same layout.
CALM = {"find_unused_parameters": True}
ROWS = [
    ("adamw", 2),
    ("sgd", 2),
    ("adamw on replicas", 2),
    ("sgd on replicas", 2),
    ("adamw on shards", 2),
    ("sgd on shards", 2),
    ("adamw on replicas of shards", 4),
    ("sgd on replicas of shards", 4),
]


def rows(*more: tuple[str, int], of: str = "") -> pytest.MarkDecorator:
    """Return the mark of a test for all rows, or those that begin with a word, and for others."""
    found = [row for row in ROWS if row[0].startswith(of)]
    return pytest.mark.parametrize(("which", "ranks"), [*found, *more])


in_ddp = pytest.mark.parametrize("which", ["adamw", "sgd"])


def net(**options: Any) -> Chosen:
    """Return a model without zeros, whose gradients are its inputs."""
    return Chosen(SHAPES, options.pop("unit", 0.01))


def gradients(rank: int, number: int, *names: str, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a rank's gradients of a step, of all parameters or of those that are named."""
    return harness.gradients(rank, number, names or None, shapes=SHAPES, scale=scale)


def integers(rank: int, number: int, shapes: Any = SHAPES) -> dict[str, torch.Tensor]:
    """Return gradients whose squares add up to the same in any order."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return {n: torch.randint(-9, 10, s, generator=generator).float() for n, s in shapes.items()}


def wrap(which: str, module: nn.Module, **options: Any) -> Any:
    """Put a module into the wrapper of a row; options are those of DDP."""
    size = dist.get_world_size()
    if which == "local":
        return module
    if which.endswith("replicas of shards"):
        names = ("replicate", "shard")
        return fully_shard(
            module, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)
        )
    if which.endswith("shards"):
        return fully_shard(module, mesh=init_device_mesh("cpu", (size,)))
    if which.endswith("replicas"):
        return replicate(module)
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.005, **CALM, **options})


def coded(which: str, model: Any, params: Any = None, **options: Any) -> Any:
    """Return the coded optimizer of a model, or of some of its parameters."""
    kind = which.split()[0]
    params = model.parameters() if params is None else params
    if kind != "local":
        settings = {"lr": RATES[kind], "weight_decay": 0.125, **options}
        return KINDS[kind][0](params, model=model, **settings)
    codec = options.pop("codec", "int4")
    optimizer = plain(which, params, **options)
    local = pycomm.LocalSGD(model, every=2, codec=codec)
    optimizer.register_step_post_hook(lambda *_: local.step())
    optimizer.local = local
    return optimizer


def plain(which: str, params: Any, **options: Any) -> Any:
    """Return the optimizer of torch that a row codes."""
    kind = which.split()[0]
    momentum = {} if kind == "adamw" else {"momentum": 0.9}
    return KINDS[kind][1](
        params, **{"lr": RATES[kind], "weight_decay": 0.125, **momentum, **options}
    )


def make(which: str, **options: Any) -> tuple[Any, Any]:
    """Return a model in its wrapper, and its coded optimizer."""
    model = wrap(which, net())
    return model, coded(which, model, **options)


def step(model: Any, optimizer: Any, *given: dict[str, torch.Tensor]) -> None:
    """Take a step by some backwards, of which the last reduces the gradients of all."""
    optimizer.zero_grad()
    *earlier, last = given
    for one in earlier:
        without_reduction(model, one)
    model(last).backward()
    optimizer.step()


def train(model: Any, optimizer: Any, rank: int, numbers: range) -> None:
    """Take some steps."""
    for number in numbers:
        step(model, optimizer, gradients(rank, number))


def without_reduction(model: Any, given: dict[str, torch.Tensor]) -> None:
    """Do a backward whose gradients are reduced with those of the next."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            model(given).backward()
        return
    model.set_requires_gradient_sync(False)
    model(given).backward()
    model.set_requires_gradient_sync(True)


def named(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters by name, without those of wrappers."""
    return dict(getattr(model, "module", model).named_parameters())


def kept(optimizer: Any) -> dict[str, Any]:
    """Return all that an optimizer keeps on this rank, by name."""
    found = {
        f"{i}.{key}": whole(value)
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    if hasattr(optimizer, "local"):
        return {**found, "outer": optimizer.local.state_dict()}
    optimizer.compression.settle()
    state = optimizer.compression.state_dict()
    for kind in ("rank", "own"):
        for name, entry in state.get(f"{kind}{dist.get_rank()}", (0, {}))[1].items():
            found |= {f"{name}.{k}": t for k, t in entry.items() if isinstance(t, torch.Tensor)}
    return found


def assert_alike(one: Any, two: Any) -> None:
    """Check that two optimizers keep the same."""
    a, b = kept(one), kept(two)
    assert a.keys() == b.keys()
    assert [name for name in a if not equal(a[name], b[name])] == []
