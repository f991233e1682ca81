"""LocalSGD: models that change, dtypes that float32 does not hold or that hold less; its state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.local_sgd import Blocking, Streamed
from tests.extent import each_value
from tests.torch.harness import alike, batch, equal, everywhere, inputs, network, values
from tests.torch.pool import on_ranks

PLAIN = {"codec": "fp32", "lr": 1.0, "momentum": 0.0}
BACKENDS = ["pycomm", "gloo"]


# --------------------------------------------------------------------------- dtypes


def moves_of_an_ulp(
    rank: int, size: int, dtype: torch.dtype, options: dict[str, Any]
) -> list[float]:
    """Rank 0 moves its weights by one ulp of 1 in each step of 20 rounds."""
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    model = model.to(dtype)
    local = pycomm.LocalSGD(model, codec="fp32", **{"every": 1, **options})
    for _ in range(20 * local.every):
        with torch.no_grad():
            model.weight += torch.finfo(dtype).eps * (rank == 0)
        local.step()
    local.finish()
    outer = local.state_dict()["fragments"][0]["start"]
    assert torch.equal(model.weight.view(-1), outer.to(dtype))
    return outer.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_add_up_with_momentum(pool, dtype):
    """Updates below the precision of the model's dtype accumulate in the outer optimizer."""
    stream = Streamed(overlap=1, mixing=0.0)  # drops the first of two steps, but in the first round
    options = {"every": 2, "lr": 0.5, "momentum": 0.5, "exchange": stream}
    got, other = pool.run(moves_of_an_ulp, dtype, options)
    assert got == other
    eps, velocity, start = torch.finfo(dtype).eps, 0.0, 1.0
    for gradient in [-eps, *[-eps / 2] * 19, 0.0]:  # the last one is `finish`
        velocity = 0.5 * velocity + gradient
        start -= 0.5 * (gradient + 0.5 * velocity)
    assert got == pytest.approx([start] * 64, rel=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("spec", ["fp32", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_and_complex_parameters_are_averaged_exactly(rank, size, spec):
    """64-bit and complex numbers are moved to their exact average."""
    generator = torch.Generator().manual_seed(rank)
    dtypes = (torch.float32, torch.float64, torch.complex64, torch.complex128)

    def numbers(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(40, 70, generator=generator, dtype=dtype)

    model = nn.ParameterList([nn.Parameter(numbers(dtype)) for dtype in dtypes])
    before = [p.detach().clone() for p in model]
    local = pycomm.LocalSGD(model, every=1, **PLAIN | {"codec": spec})
    for parameter, was in zip(model, before, strict=True):
        assert torch.equal(parameter.detach(), everywhere(was)[0])  # all its bits
    with torch.no_grad():
        for parameter in model:
            parameter += numbers(parameter.dtype)
    ends = [everywhere(p) for p in model]
    local.step()
    for parameter, end, dtype in zip(model, ends, dtypes, strict=True):
        assert alike(parameter)
        if dtype == torch.float32 and spec != "fp32":
            continue
        # start - mean(start - end) rounds twice where mean(end) rounds once.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(parameter.detach(), sum(end) / size, rtol=0, atol=16 * eps)
    lines = local.state.summary()
    assert "complex numbers travel exactly" in lines
    assert "no codec takes float64" in lines


# --------------------------------------------------------------------------- models


class Net(nn.Module):
    """A body, which is frozen at first, statistics, and a head; ranks begin differently."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.body = nn.Linear(48, 48).requires_grad_(False)
        self.norm = nn.BatchNorm1d(48, affine=False)
        self.norm.running_mean += rank
        self.head = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


def train(
    model: nn.Module, local: Any, rank: int, steps: range, momentum: float = 0.0
) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.05, momentum=momentum)
    for step in steps:
        optimizer.zero_grad()
        model(inputs(rank, step, width=48)).square().mean().backward()
        optimizer.step()
        local.step()
    return optimizer


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_start_with_equal_buffers(rank, size):
    model = Net(rank)
    model.register_buffer("turns", torch.tensor([rank, 7]), persistent=False)
    model.register_buffer("phase", torch.full((3,), complex(rank, 1)))
    pycomm.LocalSGD(model, every=4)
    assert alike(*model.parameters(), *model.buffers())
    assert model.turns.tolist() == [0, 7]
    assert model.phase[0].item() == complex(0, 1)


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_other_trained_parameters_are_refused(rank, size, who):
    """On all ranks, also where one alone has them."""

    def added(model: Net) -> None:
        model.head = nn.Sequential(model.head, nn.Linear(48, 10))

    def replaced(model: Net) -> None:
        model.head = nn.Linear(48, 64)

    changes = [
        ("body.weight", lambda model: model.body.requires_grad_(True)),
        ("head.bias", lambda model: model.head.bias.requires_grad_(False)),
        ("head.weight", added),
        ("head.weight", replaced),
    ]
    for name, change in changes:
        model = Net(rank)
        local = pycomm.LocalSGD(model, every=2, codec="int4")
        train(model, local, rank, range(3))
        if rank in who:
            change(model)
        named = name if rank in who else "its error names them"
        told = (
            rf"on rank {', '.join(map(str, who))} others are trained now \({named}.*: call finish"
        )
        with pytest.raises(pycomm.Error, match=told):
            local.step()
        with pytest.raises(pycomm.Error, match="make a new LocalSGD after it"):
            local.finish()


@on_ranks(2)
def test_states_of_other_models_are_refused(rank, size):
    saved = pycomm.LocalSGD(Net(rank), every=2).state_dict()
    resumed = pycomm.LocalSGD(Net(rank).requires_grad_(True), every=2)
    with pytest.raises(ValueError, match=r"only one of them has body\.bias"):
        resumed.load_state_dict(saved)


class Ordered(nn.Module):
    """Layers in the order of their names here."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))


@on_ranks(2)
def test_a_state_loads_whatever_the_order_of_parameters(rank, size):
    model, other = Ordered("first", "last"), Ordered("last", "first")
    nn.init.constant_(model.first.weight, 1.0)
    nn.init.constant_(model.last.weight, 2.0)
    saved = pycomm.LocalSGD(model, every=1, **PLAIN).state_dict()
    local = pycomm.LocalSGD(other, every=1, **PLAIN)
    local.load_state_dict(saved)
    local.step()
    assert torch.equal(other.first.weight, torch.ones(4, 4))
    assert torch.equal(other.last.weight, torch.full((4, 4), 2.0))


@on_ranks(2)
def test_a_wrapper_over_the_same_ranks_is_refused(rank, size):
    with pytest.raises(pycomm.Error, match=r"DistributedDataParallel over ranks \[0, 1\]"):
        pycomm.LocalSGD(DistributedDataParallel(Net(rank)), every=4)
    inside = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(nn.Linear(4, 4)))
    with pytest.raises(pycomm.Error, match="would meet in every step"):
        pycomm.LocalSGD(inside, every=4)
    # Different ranks hold different shards: averaging them would mix up rows.
    sharded = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (size,)))
    with pytest.raises(pycomm.Error, match="parameters are distributed over ranks"):
        pycomm.LocalSGD(sharded, every=4)
    alone = dist.new_group([rank], use_local_synchronization=True)
    pycomm.LocalSGD(DistributedDataParallel(nn.Linear(4, 4), process_group=alone), every=4)


# ------------------------------------------------------------------------------------------ loading
# A state of LocalSGD that is loaded at any point of a step, with exchanges in flight.


FORMS = {
    "blocking": {"exchange": Blocking()},
    "stream": {"exchange": Streamed(2, overlap=2)},
    "on a thread": {"exchange": Streamed(overlap=4), "weighted": True},
}
SAVED, LOADED, END = 8, 11, 15
POINTS = ("made", "forward", "backward", "optimizer", "step", "zero_grad")


class Run:
    """A model in training, of which one can load a state at a point of a step."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        self.rank, self.model = rank, network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.local = pycomm.LocalSGD(self.model, every=4, codec="int4", **options)

    def saved(self) -> tuple[Any, ...]:
        parts = self.model, self.optimizer, self.local
        return copy.deepcopy(tuple(part.state_dict() for part in parts))

    def load(self, saved: tuple[Any, ...]) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch's keeps the tensors
        self.local.load_state_dict(saved[2])

    def points(self, steps: range) -> Iterator[tuple[int, str]]:
        """Train, and stop behind each part of a step."""
        for step in steps:
            x, y = batch(self.rank, step)
            loss = nn.functional.cross_entropy(self.model(x), y)
            yield step, "forward"
            loss.backward()
            yield step, "backward"
            self.optimizer.step()
            yield step, "optimizer"
            self.local.step(*(len(x),) if self.local.weighted else ())
            yield step, "step"
            self.optimizer.zero_grad()
            yield step, "zero_grad"

    def train(self, steps: range, load: tuple[str, tuple[Any, ...]] | None = None) -> None:
        """Train; load a state at the named point of the last step, and end there."""
        for step, point in self.points(steps):
            if load is not None and (step + 1, point) == (steps.stop, load[0]):
                self.load(load[1])
                return


@on_ranks(2)
@each_value
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_state_may_be_loaded_at_any_point_of_a_step(rank, size, options):
    run = Run(rank, options)
    run.train(range(SAVED))
    saved = run.saved()
    run.train(range(SAVED, END))
    run.local.finish()
    want, rounds = values(run.model), run.local.rounds
    for point in POINTS:
        other = Run(rank, options)
        if point == "made":
            other.load(saved)
        else:
            other.train(range(LOADED), (point, saved))
        other.optimizer.zero_grad()
        other.train(range(SAVED, END))
        other.local.finish()
        assert equal(values(other.model), want), point
        assert other.local.rounds == rounds, point


@on_ranks(2)
def test_states_of_other_options_are_refused(rank, size):
    saved = pycomm.LocalSGD(network(), every=4, exchange=Streamed(2, overlap=2)).state_dict()
    with pytest.raises(ValueError, match="has 2 fragments, not 1"):
        pycomm.LocalSGD(network(), every=4).load_state_dict(saved)
    with pytest.raises(ValueError, match="with momentum or without"):
        pycomm.LocalSGD(
            network(), every=4, exchange=Streamed(2, overlap=2), momentum=0.0
        ).load_state_dict(saved)
    with pytest.raises(ValueError, match="has version 1, not 2: load it with the pycomm that"):
        pycomm.LocalSGD(network(), every=4).load_state_dict({**saved, "version": 1})
