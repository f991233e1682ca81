"""Ways to train with pycomm, on any model: for tests of what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
import pycomm.horovod as hvd
from pycomm.local_sgd import Streamed

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
Make = Callable[..., torch.optim.Optimizer]
Way = Callable[[nn.Module], "Training"]


class Training:
    """A model in its wrapper, and its optimizer.

    Args:
        state: of pycomm, if the user holds one.
        after: what the user calls after a step.
        end: what the user calls after the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        state: Any = None,
        *,
        after: Callable[[], object] = lambda: None,
        end: Callable[[], object] = lambda: None,
    ) -> None:
        self.model, self.optimizer, self.state = model, optimizer, state
        self.after, self.end = after, end

    def step(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.model).backward()
        self.optimizer.step()
        self.after()


def plain(net: nn.Module, **options: Any) -> Training:
    model = DistributedDataParallel(net, **options)
    return Training(model, SGD(model.parameters()))


def gradients(net: nn.Module, codec: str = "int4", *, make: Make = SGD, **options: Any) -> Training:
    model = DistributedDataParallel(net)
    state = pycomm.compress(model, codec, **options)
    return Training(model, make(model.parameters()), state)


def shards(net: nn.Module, codec: str = "int4", **options: Any) -> Training:
    model = fully_shard(net)
    state = pycomm.compress(model, codec, **options)
    return Training(model, SGD(model.parameters()), state)


def momentum(
    net: nn.Module,
    make: Make = ADAMW,
    codec: str = "sign",
    *,
    wrap: Callable[[nn.Module], Any] = DistributedDataParallel,
) -> Training:
    model = wrap(net)
    return Training(model, pycomm.code_optimizer(make(model.parameters()), model, codec))


def local(net: nn.Module, *, make: Make = SGD, weighted: bool = False, **options: Any) -> Training:
    outer = pycomm.LocalSGD(net, weighted=weighted, **{"every": 1, "codec": "int4", **options})
    step = partial(outer.step, 1.0) if weighted else outer.step
    return Training(net, make(net.parameters()), outer, after=step, end=outer.finish)


def horovod(net: nn.Module, *, make: Make = SGD) -> Training:
    hvd.init()
    optimizer = make(net.parameters())
    return Training(net, hvd.DistributedOptimizer(optimizer, net.named_parameters()))


WAYS: dict[str, Way] = {
    "DDP": plain,
    "DDP that finds unused": partial(plain, find_unused_parameters=True),
    "int4": gradients,
    "int4 without feedback": partial(gradients, feedback=None),
    "int4 with decay": partial(gradients, feedback="decay:0.9,storage=int8"),
    "topk with momentum": partial(gradients, codec="topk:0.1", feedback="momentum:0.9"),
    "FSDP2": shards,
    "CodedAdamW": momentum,
    "CodedAdamW of shards": partial(momentum, wrap=fully_shard),
    "CodedSGD": partial(momentum, make=SGD, codec="int4"),
    "LocalSGD": local,
    "LocalSGD, weighted": partial(local, weighted=True),
    "LocalSGD in streams": partial(local, exchange=Streamed(overlap=1)),
    "LocalSGD on a thread": partial(local, every=2, exchange=Streamed(overlap=2), weighted=True),
    "Horovod": horovod,
}
CODECS: dict[str, Way] = {
    codec: partial(gradients, codec=codec)
    for codec in ("auto", "sign", "topk:0.01", "lossless", "nvfp4", "eden:bits=2,size=128")
}
