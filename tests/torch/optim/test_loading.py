"""States of coded optimizers are loaded at any point of a step, in any order, and training goes on
as if it had not been interrupted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error
from tests.extent import pairs
from tests.torch.harness import all_equal, equal, near
from tests.torch.optim.test_owned_parameters import batch, net
from tests.torch.pool import on_ranks

# The squares between two exchanges are not a part of a state: refresh=1 has none. Without rebuilt
# buckets after the first step a loaded state has the layout of the saved one.
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda m: pycomm.CodedAdamW(m.parameters(), 1e-3, model=m, refresh=1),
    "sgd": lambda m: pycomm.CodedSGD(m.parameters(), 1e-2, model=m),
}
every = pytest.mark.parametrize("which", OPTIMIZERS)


def fresh(which: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    if which == "sharded":
        model: Any = fully_shard(net().to(dtype))
        return model, OPTIMIZERS["adamw"](model)
    model = DistributedDataParallel(net().to(dtype), find_unused_parameters=True)
    return model, OPTIMIZERS[which](model)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]


def backward(model: nn.Module, rank: int, step: int) -> None:
    x = batch(rank, step).to(next(model.parameters()).dtype)
    (model(x) - x).square().mean().backward()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def nothing(model: Any, optimizer: Any, rank: int) -> None:
    pass


def after_steps(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, rank, range(70, 73))


def after_a_backward(model: Any, optimizer: Any, rank: int) -> None:
    backward(model, rank, 80)


def after_zero_grad(model: Any, optimizer: Any, rank: int) -> None:
    backward(model, rank, 80)
    optimizer.zero_grad()


def after_zeros(model: Any, optimizer: Any, rank: int) -> None:
    backward(model, rank, 80)
    optimizer.zero_grad(set_to_none=False)


def in_an_accumulation(model: Any, optimizer: Any, rank: int) -> None:
    after_steps(model, optimizer, rank)
    backward(model, rank, 80)
    backward(model, rank, 81)


def under_no_sync(model: Any, optimizer: Any, rank: int) -> None:
    after_steps(model, optimizer, rank)
    with model.no_sync():
        backward(model, rank, 80)


def after_a_template(model: Any, optimizer: Any, rank: int) -> None:
    """What examples/resume.py does before it loads."""
    after_zero_grad(model, optimizer, rank)
    get_state_dict(model, optimizer)


POINTS = (
    *(nothing, after_steps, after_a_backward, after_zero_grad, after_zeros, in_an_accumulation),
    *(under_no_sync, after_a_template),
)
ORDERS = ("moc", "com", "ocm")  # model, optimizer, compression
BY = ("itself", "dcp")  # dcp loads model and optimizer together, and steps a new optimizer


def load(model: Any, optimizer: Any, saved: Any, order: Any, by: str) -> None:
    for what in order:
        if what == "c":
            optimizer.compression.load_state_dict(copy.deepcopy(saved["c"]))
        elif by == "itself":
            target = model if what == "m" else optimizer
            target.load_state_dict(copy.deepcopy(saved[what]))
        elif what == "o":
            weights, moments = copy.deepcopy(saved["dcp"])
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


PARTS = 3  # tests, since a case takes a second


@on_ranks(2)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("which", [*OPTIMIZERS, "sharded"])
def test_training_goes_on_wherever_a_state_is_loaded(rank, size, which, part):
    model, optimizer = fresh(which)
    train(model, optimizer, rank, range(4))
    saved: Any = {
        "m": model.state_dict(),
        "o": optimizer.state_dict(),
        "c": optimizer.compression.state_dict(),
        "dcp": get_state_dict(model, optimizer),
    }
    saved = copy.deepcopy(saved)
    train(model, optimizer, rank, range(4, 8))
    for point, order, by in CASES[part::PARTS]:
        if which == "sharded" and point is under_no_sync:
            continue
        again, loaded = fresh(which)
        point(again, loaded, rank)
        load(again, loaded, saved, order, by)
        train(again, loaded, rank, range(4, 8))
        assert equal(values(again), values(model)), (point.__name__, order, by)


CASES = pairs(list(POINTS), list(ORDERS), list(BY))


@on_ranks(2)
@pytest.mark.parametrize("which", [*OPTIMIZERS, "sharded"])
def test_states_of_a_16_bit_model_keep_their_dtypes(rank, size, which):
    model, optimizer = fresh(which, torch.bfloat16)
    train(model, optimizer, rank, range(4))
    saved = copy.deepcopy(
        (model.state_dict(), optimizer.state_dict(), optimizer.compression.state_dict())
    )
    again, loaded = fresh(which, torch.bfloat16)
    again.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    loaded.compression.load_state_dict(saved[2])
    for mine, other in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert (mine[key].dtype, mine[key].device) == (value.dtype, value.device), key
            assert torch.equal(mine[key], value), key
    train(model, optimizer, rank, range(4, 8))
    train(again, loaded, rank, range(4, 8))
    assert equal(values(model), values(again))


@on_ranks(2)
def test_hooks_of_a_load_are_heeded(rank, size):
    """A hook of the user's may change what is loaded."""
    model, optimizer = fresh("adamw", torch.bfloat16)
    train(model, optimizer, rank, range(2))
    saved = copy.deepcopy(optimizer.state_dict())

    def doubled(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        rows = {n: {**s, "row": 2 * s["row"]} for n, s in state["state"].items() if "row" in s}
        return {**state, "state": {**state["state"], **rows}}

    optimizer.register_load_state_dict_pre_hook(doubled)
    before = optimizer.state[model.module[0].weight]["row"].clone()
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[model.module[0].weight]["row"], 2 * before)


@on_ranks(2)
@every
def test_the_groups_stay_the_same_objects(rank, size, which):
    model, optimizer = fresh(which)
    held = optimizer.param_groups
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups is held
    assert held[0]["lr"] == 0.25
    assert held[0]["params"][0] is next(model.parameters())


def steps_too_early(rank: int, size: int) -> str:
    model, optimizer = fresh("adamw")
    train(model, optimizer, rank, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    backward(model, rank, 2)
    optimizer.load_state_dict(saved)
    try:
        optimizer.step()
    except Error as error:
        train(model, optimizer, rank, range(2, 3))
        return str(error)
    return ""


def test_a_step_by_momentum_before_a_load_is_refused(pool):
    assert all("a state was loaded after the last backward" in t for t in pool.run(steps_too_early))


@on_ranks(2, then=all_equal)
@every
def test_a_rate_that_begins_at_zero(rank, size, which):
    """A learning rate that begins at zero is no template for a checkpoint, even if a rank's
    gradients are zero."""
    model, optimizer = fresh(which)
    optimizer.param_groups[0]["lr"] = 0.0
    (model(batch(rank, 0)) * rank).square().mean().backward()
    optimizer.step()
    key = "exp_avg" if which == "adamw" else "momentum_buffer"
    assert all(state[key].any() for state in optimizer.state.values())
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, optimizer, rank, range(1, 4))
    return values(model)


# ----------------------------------------------------------------------------------- memory formats
# Parameters whose order in memory is not that of their indices, as those of channels_last models:
# every optimizer ends where it ends with contiguous ones.


SHAPES = {"filters": (64, 8, 3, 3), "turned": (96, 40), "bias": (7,)}


class Model(nn.Module):
    """A model whose gradients are given."""

    def __init__(self, *, strided: bool) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 0.1
            if strided and name == "filters":
                value = value.to(memory_format=torch.channels_last)
            if strided and name == "turned":
                value = value.t().contiguous().t()
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        return sum((p * torch.randn(p.shape, generator=generator)).sum() for p in self.parameters())


Make = Callable[[DistributedDataParallel], torch.optim.Optimizer]


def coded_adamw(codec: str) -> Make:
    # Squares between two exchanges are not a part of a checkpoint.
    return lambda model: pycomm.CodedAdamW(
        model.parameters(), 1e-2, model=model, codec=codec, refresh=1
    )


MAKERS: dict[str, Make] = {
    "AdamW, sign": coded_adamw("sign"),
    "AdamW, topk": coded_adamw("topk:0.05"),
    "AdamW, exact": coded_adamw("fp32"),
    "SGD": lambda model: pycomm.CodedSGD(
        model.parameters(), 1e-2, momentum=0.9, model=model, codec="sign"
    ),
}


def train_strided(
    rank: int, name: str, *, strided: bool, parts: int = 1, views: bool = False
) -> tuple[list[torch.Tensor], Any, Any]:
    """Return the parameters, the optimizer and its model after six steps of so many backwards."""
    model = DistributedDataParallel(Model(strided=strided), gradient_as_bucket_view=views)
    assert all(p.is_contiguous() for p in model.parameters()) != strided
    optimizer = MAKERS[name](model)
    advance(rank, model, optimizer, range(6), parts)
    return contiguous(model), optimizer, model


def advance(rank: int, model: Any, optimizer: Any, steps: range, parts: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(parts):
            model(rank, parts * step + part).backward()
        optimizer.step()


def contiguous(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone(memory_format=torch.contiguous_format) for p in model.parameters()]


def alike(rank: int, size: int, name: str, options: dict[str, Any]) -> list[torch.Tensor]:
    there, _, model = train_strided(rank, name, strided=True, **options)
    want, _, _ = train_strided(rank, name, strided=False, **options)
    # What is exact steps by torch where it is strided, whose roots can have another last bit.
    assert (equal if name == "SGD" else near)(there, want)
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()
    return there


@pytest.mark.parametrize("name", MAKERS)
def test_memory_formats_change_no_result(pool, name):
    found = pool.run(alike, name, {})
    assert equal(*found)


@pytest.mark.parametrize("options", [{"parts": 2}, {"views": True}])
def test_backwards_that_add_up_and_gradients_in_buckets(pool, options):
    found = pool.run(alike, "AdamW, sign", options)
    assert equal(*found)


@on_ranks(2)
def test_checkpoints_move_between_formats(rank, size):
    """A checkpoint of a channels_last model is that of a contiguous one, and the reverse."""
    for strided in (True, False):
        _, one, model = train_strided(rank, "AdamW, sign", strided=strided)
        saved = copy.deepcopy((model.state_dict(), one.state_dict(), one.compression.state_dict()))
        other = DistributedDataParallel(Model(strided=not strided))
        two: Any = MAKERS["AdamW, sign"](other)
        other.load_state_dict(saved[0])
        two.load_state_dict(saved[1])
        two.compression.load_state_dict(saved[2])
        for m, optimizer in ((model, one), (other, two)):
            advance(rank, m, optimizer, range(6, 9))
        assert near(contiguous(model), contiguous(other))
        assert other.module.filters.is_contiguous() == strided


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_compressed_gradients_are_those_of_contiguous_ones(rank, size, codec):
    """What is coded in the order of memory has other blocks, and the same sums."""
    models = [DistributedDataParallel(Model(strided=strided)) for strided in (True, False)]
    for model in models:
        pycomm.compress(model, codec)
        advance(rank, model, torch.optim.SGD(model.parameters(), 0.1), range(3))
    strided, plain = map(contiguous, models)
    for one, other in zip(strided, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if codec == "fp32" else 0.02)
    return strided
