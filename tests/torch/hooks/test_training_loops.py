"""Training loops of many forms: exact compression has the bits of plain DDP, int8 stays close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import pycomm
from tests import extent
from tests.torch.harness import all_equal, batch, equal, network, values
from tests.torch.pool import on_ranks


def wrap(spec: str | None, module: nn.Module | None = None, **options: Any) -> Any:
    model = DistributedDataParallel(module or network(), bucket_cap_mb=0.02, **options)
    if spec is not None:
        pycomm.compress(model, spec)
    return model


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(x.to(dtype)).float(), y)


def trained(model: nn.Module, rank: int, steps: int, none: bool = True) -> nn.Module:
    optimizer = sgd(model)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=none)
        loss(model, rank, step).backward()
        optimizer.step()
    return model


def plain(rank: int, spec: Any, none: bool = True, **options: Any) -> nn.Module:
    model = wrap(spec, **options)
    return trained(model, rank, 6, none)


def penalised(rank: int, spec: Any) -> nn.Module:
    """Run backward through a gradient, as a gradient penalty does; the graph is retained."""
    model = wrap(spec)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(rank, step)
        out = model(x.requires_grad_())
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        value = nn.functional.cross_entropy(out, y) + slope.square().mean()
        value.backward(retain_graph=True)
        optimizer.step()
    return model


class Fails(nn.Module):
    """A model whose backward raises on request, on all ranks, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails = network(), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner[0](x)
        if self.fails:
            x.register_hook(self._fail)
        return self.inner[1:](x)

    def _fail(self, _: torch.Tensor) -> None:
        raise ValueError("as planned")


def interrupted(rank: int, spec: Any) -> nn.Module:
    model = wrap(spec, Fails(), find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        model.module.fails = step == 3
        if step == 3:
            with pytest.raises(ValueError, match="as planned"), model.no_sync():
                loss(model, rank, step).backward()
            continue
        loss(model, rank, step).backward()
        optimizer.step()
    return model


def two_models(rank: int, spec: Any) -> nn.Module:
    a, b = wrap(spec), wrap(spec, nn.Linear(10, 64))
    optimizers = [sgd(a), sgd(b)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = batch(rank, step)
        out = a(x)
        (nn.functional.cross_entropy(out, y) + b(out).square().mean()).backward()
        for optimizer in optimizers[:: 1 - 2 * (step % 2)]:
            optimizer.step()
    return nn.ModuleList([a, b])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Linear(64, 64, bias=False)
        self.up = nn.Linear(64, 64, bias=False)
        self.up.weight = self.down.weight
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.up(self.down(x).relu()))


def tied(rank: int, spec: Any) -> nn.Module:
    model = wrap(spec, Tied())
    return trained(model, rank, 5)


class Again(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = network(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


def checkpointed(rank: int, spec: Any, reentrant: bool) -> nn.Module:
    model = wrap(spec, Again(reentrant), static_graph=reentrant)
    return trained(model, rank, 5)


def in_threads(rank: int, spec: Any) -> nn.Module:
    model = wrap(spec)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        thread = threading.Thread(target=lambda v: v.backward(), args=[loss(model, rank, step)])
        thread.start()
        thread.join()
        optimizer.step()
    return model


def converted(rank: int, spec: Any) -> nn.Module:
    """Gradients take the parameters' new dtype, as DDP's new buckets do."""
    model = wrap(spec, network().double())
    model.module.float()
    model = DistributedDataParallel(model.module, bucket_cap_mb=0.02)
    if spec is not None:
        pycomm.compress(model, spec)
    return trained(model, rank, 3)


LOOPS: dict[str, Callable[[int, Any], nn.Module]] = {
    "zeroed": lambda r, s: plain(r, s, none=False),
    "views, zeroed": lambda r, s: plain(r, s, none=False, gradient_as_bucket_view=True),
    "static, views": lambda r, s: plain(r, s, gradient_as_bucket_view=True, static_graph=True),
    "penalised": penalised,
    "interrupted": interrupted,
    "two models": two_models,
    "tied": tied,
    "checkpointed": lambda r, s: checkpointed(r, s, False),
    "checkpointed, reentrant": lambda r, s: checkpointed(r, s, True),
    "in threads": in_threads,
    "converted": converted,
}


BACKENDS = ["pycomm", "gloo"]


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, b) for place, name in enumerate(LOOPS) for b in extent.part(BACKENDS, 2, place)],
)
def test_loops(rank, size, name):
    want, exact, coded = (values(LOOPS[name](rank, spec)) for spec in (None, "fp32", "int8"))
    assert equal(want, exact)
    for a, b in zip(want, coded, strict=True):
        # int8 is off by 0.01 of a gradient, and steps move parameters by less than their size.
        assert (a - b).norm() <= 0.03 * a.norm()
    return [*exact, *coded]
