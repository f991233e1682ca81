"""Operations of a training loop on a compressed model, against plain DDP and FSDP2."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import pycomm
import pycomm.horovod as hvd
from pycomm.reduction.state import DetachedState
from tests import extent
from tests.extent import each_value
from tests.torch.harness import (
    alike,
    all_equal,
    batch,
    equal,
    inputs,
    network,
    train,
    values,
)
from tests.torch.pool import on_ranks

BACKENDS = ["pycomm", "gloo"]


# ----------------------------------------------------------------------------- Join


class Layers(nn.Module):
    """Layers, of which a forward uses those that it is told."""

    def __init__(self, count: int, width: int = 64, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ModuleList(nn.Linear(width, width, bias) for _ in range(count))

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        for number in used:
            x = self.all[number](x)
        return x


# --------------------------------------------------------------------------- sparse


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(300, 64, sparse=True)
        self.bags = nn.EmbeddingBag(200, 64, sparse=True, mode="sum")
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(x).mean(1) + self.bags(x % 200))


def words(rank: int, spec: Any, mb: float) -> list[torch.Tensor]:
    model = DistributedDataParallel(Words(), bucket_cap_mb=mb)
    if spec is not None:
        state = pycomm.compress(model, spec)
        assert "its gradient is sparse" in state.summary()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        x = torch.randint(300, (4 + rank, 8), generator=generator)  # more rows on one rank
        model(x).square().mean().backward()
        assert model.module.words.weight.grad.is_sparse
        optimizer.step()
    assert alike(*model.parameters())
    return values(model)


@on_ranks(2)
@each_value
@pytest.mark.parametrize("mb", [25, 0.01])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_gradients_travel_exactly(rank, size, mb):
    plain, exact, coded = (words(rank, spec, mb) for spec in (None, "fp32", "int8"))
    assert equal(plain, exact)
    assert not equal(plain, coded)  # the last layer's gradients are compressed
    for a, b in zip(plain, coded, strict=True):
        assert (a - b).norm() < 0.01 * a.norm()


# --------------------------------------------------------------------------- copies


@on_ranks(2)
def test_copies_and_whole_models_in_files(rank, size):
    model = DistributedDataParallel(network())
    state = pycomm.compress(model, "int8")
    train(model, rank, range(3))
    owed = state.residual_norms()
    average = AveragedModel(model)
    average.update_parameters(model)
    assert equal(values(average), values(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    twin = copy.deepcopy(model)
    assert state.residual_norms() == owed

    # The original is unaffected; a copy is exact until it is compressed itself.
    reference = DistributedDataParallel(network())
    pycomm.compress(reference, "int8")
    for part in (range(3), range(3, 5)):
        train(reference, rank, part)
    train(model, rank, range(3, 5))
    assert equal(values(model), values(reference))
    exact = DistributedDataParallel(copy.deepcopy(twin.module))
    for other in (twin, loaded, exact):
        train(other, rank, range(3, 4))
    assert equal(values(twin), values(exact))
    assert equal(values(loaded), values(exact))
    for other in (twin, loaded):
        again = pycomm.compress(other, "int8")
        train(other, rank, range(4, 6))
        assert alike(*other.parameters())
        assert again.step == 2
    with pytest.raises(pycomm.Error, match="compressed already"):
        pycomm.compress(model, "int8")

    # A state that was pickled by itself keeps its residuals.
    kept = pickle.loads(pickle.dumps(state))
    assert isinstance(kept, DetachedState)
    fresh = DistributedDataParallel(copy.deepcopy(model.module))
    resumed = pycomm.compress(fresh, "int8")
    resumed.load_state_dict(kept.state_dict())
    assert resumed.residual_norms() == state.residual_norms()
    with pytest.raises(pycomm.Error, match="a copy of a model has no residuals"):
        copy.deepcopy(state).state_dict()


@on_ranks(2)
def test_copies_of_a_model_that_chooses_its_codecs(rank, size):
    model = DistributedDataParallel(network())
    pycomm.compress(model, "auto")
    train(model, rank, range(3))
    torch.save(model, io.BytesIO())
    copy.deepcopy(model)


def in_ddp(make: Any) -> Any:
    model = DistributedDataParallel(network())
    return make(model.parameters(), model=model)


BOUND = {
    "CodedAdamW": lambda: in_ddp(pycomm.CodedAdamW),
    "CodedSGD": lambda: in_ddp(pycomm.CodedSGD),
    "LocalSGD": lambda: pycomm.LocalSGD(network(), every=2),
    "DistributedOptimizer": lambda: hvd.DistributedOptimizer(
        torch.optim.SGD(network().parameters(), lr=0.1)
    ),
}
SETTINGS = (
    pycomm.codec("int4"),
    pycomm.Policy("int4", guard=pycomm.policy.Guard(every=3)),
    pycomm.feedback.Feedback.of("decay:0.9"),
)


@on_ranks(2)
@pytest.mark.parametrize("what", BOUND)
def test_what_belongs_to_one_model_refuses_a_copy(rank, size, what):
    hvd.init()
    made = BOUND[what]()
    for copying in (copy.deepcopy, copy.copy, pickle.dumps, partial(torch.save, f=io.BytesIO())):
        with pytest.raises(pycomm.Error, match=r"cannot be copied or pickled.*state_dict\(\)"):
            copying(made)
    for one in SETTINGS:
        assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


# ------------------------------------------------------------- reports about FSDP2's units


@on_ranks(2)
def test_a_unit_that_travels_exactly_is_told_of(rank, size):
    logging.getLogger("pycomm").setLevel(logging.ERROR)
    model = fully_shard(Layers(2), mesh=init_device_mesh("cpu", (size,)))
    state = pycomm.compress(model, "int8")
    assert "int8 (default)" in state.summary()
    x = batch(rank, 0)[0]
    model(x, 0).sum().backward()
    assert "int8 (default)" not in state.summary()
    assert "some of its unit have no gradients" in state.summary()
    assert state.plan.report().payload_bytes == state.plan.report().plain_bytes
    model.zero_grad()
    model(x, 0, 1).sum().backward()
    assert "int8 (default)" in state.summary()
    assert "no gradients" not in state.summary()

    wide = fully_shard(nn.Linear(64, 64).double(), mesh=init_device_mesh("cpu", (size,)))
    state = pycomm.compress(wide, "int8")
    assert "float64 (no codec takes float64): 2 parameters, 4160 values in 33280" in state.summary()


@on_ranks(2)
def test_the_python_reducer_is_refused_before_training(rank, size):
    import torch._dynamo

    mode = torch._dynamo.config.optimize_ddp
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        with pytest.raises(pycomm.Error, match=r"optimize_ddp = \"ddp_optimizer\""):
            pycomm.compress(DistributedDataParallel(network()), "int8")
    finally:  # DDP has set more, for all models of the process
        torch._dynamo.config.optimize_ddp = mode
        torch._inductor.config._fuse_ddp_communication = False
        rules = torch._dynamo.trace_rules
        rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
        rules.get_legacy_mod_inlinelist.cache_clear()


# ------------------------------------------------------------------------------ frozen parameters
# Parameters that get no gradients cost nothing: no bytes, no memory, no checks.


SIDE = 128


def layers(trained: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)])
    for i, layer in enumerate(model):
        layer.weight.requires_grad_(i == trained)
    return model


def few_steps(model: nn.Module, rank: int, count: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(count):
        optimizer.zero_grad()
        model(inputs(rank, step, width=SIDE)).square().mean().backward()
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("kind", ["ddp", "ignored", "fsdp2"])
def test_frozen_parameters_take_no_bits(rank, size, kind):
    model: Any = layers(trained=3)
    if kind == "ignored":
        for layer in model:
            layer.weight.requires_grad_(True)
        names = [f"{i}.weight" for i in range(3)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    model = fully_shard(model) if kind == "fsdp2" else DistributedDataParallel(model)
    state = pycomm.compress(model, "int4")
    few_steps(model, rank, 4)
    report = state.plan.report()
    assert report.plain_bytes == 4 * SIDE**2
    assert report.payload_bytes == pycomm.codec("int4").encoded_bytes(SIDE**2)
    rows = size if kind == "fsdp2" else 1
    worker = 2 * 4 * SIDE**2
    assert state.residual_bytes == worker + (worker // size if rows == 1 else 0)
    if kind == "fsdp2":  # unfrozen at any time
        model[1].weight.requires_grad_(True)
        few_steps(model, rank, 2)
        assert state.decisions.keys() == {"1.weight", "3.weight"}
        assert state.residual_norms()["1.weight"][0] > 0


@on_ranks(2)
def test_unused_parameters_beside_ignored_ones(rank, size):
    """What an unused parameter owes stays owed, also where DDP ignores others."""
    model = Layers(3, SIDE, bias=False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["all.2.weight"])
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    state = pycomm.compress(wrapped, "int4")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = {}
    for step in range(6):
        wrapped(inputs(rank, step, width=SIDE), step % 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        unused = f"all.{1 - step % 2}.weight"
        norms = state.residual_norms()
        if unused in before:
            assert norms[unused] == before[unused]
            assert norms[unused][0] > 0
        before = norms


@on_ranks(2)
def test_frozen_between_wrapping_and_compressing(rank, size):
    """Frozen behind DDP's back, before compression: its buckets hold it all the same."""
    model = layers(trained=3)
    model[2].weight.requires_grad_(True)
    wrapped = DistributedDataParallel(model)
    model[2].weight.requires_grad_(False)
    state = pycomm.compress(wrapped, "int8")
    model[2].weight.requires_grad_(True)
    few_steps(wrapped, rank, 3)
    assert state.decisions.keys() == {"2.weight", "3.weight"}
    assert state.residual_norms()["2.weight"][0] > 0


# -------------------------------------------------------------------------------------------- loops
# Training loops of many forms: exact compression has the bits of plain DDP, int8 stays close.


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


def trained(
    rank: int, spec: Any, module: nn.Module | None = None, none: bool = True, **options: Any
) -> nn.Module:
    model = wrap(spec, module, **options)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad(set_to_none=none)
        loss(model, rank, step).backward()
        optimizer.step()
    return model


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


class Again(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = network(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


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
    return trained(rank, spec, wrap(spec, network().double()).module.float())


LOOPS: dict[str, Callable[[int, Any], nn.Module]] = {
    "zeroed": partial(trained, none=False),
    "views, zeroed": partial(trained, none=False, gradient_as_bucket_view=True),
    "static, views": partial(trained, gradient_as_bucket_view=True, static_graph=True),
    "penalised": penalised,
    "two models": two_models,
    "tied": lambda r, s: trained(r, s, Tied()),
    "checkpointed": lambda r, s: trained(r, s, Again(False)),
    "checkpointed, reentrant": lambda r, s: trained(r, s, Again(True), static_graph=True),
    "in threads": in_threads,
    "converted": converted,
}


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
