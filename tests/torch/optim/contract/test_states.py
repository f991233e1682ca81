"""States of coded optimizers: loaded at any point of a step and in any order, on other ranks, by
other optimizers; training goes on as if it had not been interrupted."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error
from tests.extent import pairs
from tests.torch.harness import all_equal, equal, owed, values, whole
from tests.torch.optim.table import (
    CALM,
    KINDS,
    MOMENTUM,
    SHAPES,
    assert_alike,
    coded,
    gradients,
    in_ddp,
    make,
    named,
    net,
    plain,
    rows,
    step,
    train,
    without_reduction,
    wrap,
)
from tests.torch.pool import on_ranks


def fresh(which: str, module: nn.Module | None = None) -> tuple[Any, Any]:
    """The squares between two exchanges are not a part of a state: refresh=1 has none."""
    model = wrap(which, net() if module is None else module)
    return model, coded(which, model, **({} if which == "local" else {"refresh": 1}))


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return copies of all states, by the letters of `ORDERS`."""
    found = {
        "m": model.state_dict(),
        "o": optimizer.state_dict(),
        "c": getattr(optimizer, "local", None) or optimizer.compression,
    }
    return copy.deepcopy({**found, "c": found["c"].state_dict()})


# ---------------------------------------------------------------- any point of a step


def nothing(model: Any, optimizer: Any, rank: int) -> None:
    pass


def after_steps(model: Any, optimizer: Any, rank: int) -> None:
    train(model, optimizer, rank, range(70, 73))


def after_a_backward(model: Any, optimizer: Any, rank: int) -> None:
    model(gradients(rank, 80)).backward()


def after_zero_grad(model: Any, optimizer: Any, rank: int) -> None:
    after_a_backward(model, optimizer, rank)
    optimizer.zero_grad()


def after_zeros(model: Any, optimizer: Any, rank: int) -> None:
    after_a_backward(model, optimizer, rank)
    optimizer.zero_grad(set_to_none=False)


def under_no_sync(model: Any, optimizer: Any, rank: int) -> None:
    after_steps(model, optimizer, rank)
    without_reduction(model, gradients(rank, 80))


def after_a_template(model: Any, optimizer: Any, rank: int) -> None:
    """What examples/resume.py does before it loads."""
    after_zero_grad(model, optimizer, rank)
    get_state_dict(model, optimizer)


POINTS = (
    *(nothing, after_steps, after_a_backward, after_zero_grad, after_zeros),
    *(under_no_sync, after_a_template),
)
ORDERS = ("moc", "com", "ocm")  # model, optimizer, compression
BY = ("itself", "dcp")  # dcp loads model and optimizer together, and steps a new optimizer
PARTS = 3  # tests, since a case takes a second
CASES = pairs(list(POINTS), list(ORDERS), list(BY))


def load(model: Any, optimizer: Any, saved: Any, order: str = "moc", by: str = "itself") -> None:
    targets = {
        "m": model,
        "o": optimizer,
        "c": getattr(optimizer, "local", None) or optimizer.compression,
    }
    for what in order:
        if what == "c" or by == "itself":
            targets[what].load_state_dict(copy.deepcopy(saved[what]))
        elif what == "o":
            weights, moments = copy.deepcopy(saved["dcp"])
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


ROWS_OF_LOADS = [
    *((which, 2, part) for which in ("adamw", "sgd", "adamw on shards") for part in range(PARTS)),
    *(("adamw on replicas", 2, 0), ("adamw on replicas of shards", 4, 1)),
    *(("sgd on replicas", 2, 1), ("sgd on shards", 2, 2)),
]


@on_ranks()
@pytest.mark.parametrize(("which", "ranks", "part"), ROWS_OF_LOADS)
def test_training_goes_on_wherever_a_state_is_loaded(rank, size, which, part):
    model, optimizer = fresh(which)
    train(model, optimizer, rank, range(4))
    saved = states(model, optimizer)
    saved["dcp"] = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, rank, range(4, 8))
    for point, order, by in CASES[part::PARTS]:
        if " on " in which and point is under_no_sync:
            continue  # torch's FSDP2 keeps what zero_grad() should have dropped
        again, loaded = fresh(which)
        point(again, loaded, rank)
        load(again, loaded, saved, order, by)
        train(again, loaded, rank, range(4, 8))
        assert equal(values(again), values(model)), (point.__name__, order, by)


@on_ranks()
@rows()
def test_a_saved_state_has_no_more_memory_than_its_values(rank, size, which):
    model, optimizer = make(which)
    train(model, optimizer, rank, range(2))
    for state in optimizer.state_dict()["state"].values():
        for value in filter(torch.is_tensor, state.values()):
            mine = getattr(value, "_local_tensor", value)
            assert mine.untyped_storage().nbytes() == mine.nbytes


@on_ranks()
@rows(("local", 2))
def test_a_16_bit_model_before_and_after_a_load(rank, size, which):
    model, optimizer = fresh(which, net().bfloat16())
    train(model, optimizer, rank, range(4))
    assert all(p.dtype == torch.bfloat16 and whole(p).isfinite().all() for p in model.parameters())
    assert not any(map(torch.equal, values(net().bfloat16()), values(model)))
    again, loaded = fresh(which, net().bfloat16())
    load(again, loaded, states(model, optimizer))
    for mine, other in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert (mine[key].dtype, mine[key].device) == (value.dtype, value.device), key
            assert torch.equal(whole(mine[key]), whole(value)), key
    train(model, optimizer, rank, range(4, 8))
    train(again, loaded, rank, range(4, 8))
    assert equal(values(model), values(again))
    assert_alike(optimizer, loaded)


@on_ranks()
@rows()
def test_loading_heeds_hooks_and_keeps_the_groups(rank, size, which):
    """A hook of the user's may change what is loaded; schedulers hold the groups."""
    model, optimizer = fresh(which, net().bfloat16())
    train(model, optimizer, rank, range(2))
    held, saved = optimizer.param_groups, copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.25

    def doubled(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        errors = {n: {**s, key: 2 * s[key]} for n, s in state["state"].items() if key in s}
        return {**state, "state": {**state["state"], **errors}}

    key, big = "coding_error", named(model)["big"]
    optimizer.register_load_state_dict_pre_hook(doubled)
    before = optimizer.state[big][key].clone()
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[big][key], 2 * before)
    assert optimizer.param_groups is held
    assert held[0]["lr"] == 0.25
    assert held[0]["params"][0] is next(model.parameters())


@on_ranks()
@rows()
def test_momentum_of_before_a_load_is_refused(rank, size, which):
    """By a step, and by a backward that would add to it."""
    model, optimizer = fresh(which)
    train(model, optimizer, rank, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    after_a_backward(model, optimizer, rank)
    optimizer.load_state_dict(saved)
    with pytest.raises(Error, match="a state was loaded after the last backward"):
        optimizer.step()
    train(model, optimizer, rank, range(2, 3))
    after_a_backward(model, optimizer, rank)
    optimizer.load_state_dict(saved)
    with pytest.raises(Error, match=r"accumulate in no_sync\(\)"):
        model(gradients(rank, 3)).backward()


@on_ranks()
@rows()
def test_a_load_that_is_refused_changes_nothing(rank, size, which):
    """Not even the momentum of a backward that no step has used."""
    (model, optimizer), (calm, other) = fresh(which), fresh(which)
    for one, its in ((model, optimizer), (calm, other)):
        train(one, its, rank, range(2))
        after_a_backward(one, its, rank)
    saved = optimizer.compression.state_dict()
    kept = {key: entry for key, entry in saved.items() if not key.startswith("own")}
    exact = coded(which, wrap(which, net()), codec="fp32")
    for target, state, words in (
        (optimizer, {**optimizer.state_dict(), "param_groups": []}, "parameter groups"),
        (optimizer.compression, kept, f"needs what own{rank} has"),
        (exact, optimizer.state_dict(), "coded one, and here it is exact"),
    ):
        with pytest.raises(ValueError, match=words):
            target.load_state_dict(state)
    assert not exact.state
    optimizer.step()
    other.step()
    assert equal(values(model), values(calm))
    assert_alike(optimizer, other)


@on_ranks(2)
@in_ddp
def test_gradients_may_have_another_dtype(rank, size, which):
    """As `grad_dtype` of a parameter asks for since torch 2.10."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        model, optimizer = fresh(which, net().bfloat16())
        model(gradients(rank, 0)).backward()
        for name in ("big", "small"):
            parameter = named(model)[name]
            gradient = parameter.grad.to(dtype)
            parameter.grad_dtype, parameter.grad = None, gradient
        optimizer.step()
        found.append(values(model))
    assert equal(*found)


@on_ranks(then=all_equal)
@rows()
def test_a_rate_that_begins_at_zero(rank, size, which):
    """A learning rate that begins at zero is no template for a checkpoint, even if a rank's
    gradients are zero."""
    model, optimizer = fresh(which)
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, gradients(rank, 0, scale=rank))
    key = MOMENTUM[which.split()[0]]
    assert all(whole(state[key]).any() for state in optimizer.state.values())
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, optimizer, rank, range(1, 4))
    return values(model)


# ---------------------------------------------------------------- other ranks


def totals(optimizer: Any) -> dict[str, Any]:
    """The momentum, the ranks' mean of what was sent, and what they owe, of whole parameters."""
    state = optimizer.compression
    found: dict[str, Any] = {f"{n}.owed": t for n, t in owed(state, SHAPES).items()}
    shared = ("row", "column", "heard", "moment_weight")
    shared += ("coding_error", "mean_energy", "own_energy")
    for (name, shape), kept_ in zip(SHAPES.items(), optimizer.state.values(), strict=True):
        key = next(key for key in MOMENTUM.values() if key in kept_)
        found[f"{name}.momentum"] = whole(kept_[key]).clone()
        found |= {f"{name}.{k}": kept_[k].clone() for k in shared if k in kept_}
        sent = torch.zeros(torch.Size(shape).numel())
        if name in optimizer.momenta.own:
            own = optimizer.momenta.own[name].current("worker")
            sent += own.flatten()[: sent.numel()] / dist.get_world_size()
        dist.all_reduce(sent)
        found[f"{name}.sent"] = sent.view(shape)
    return found


def saves(rank: int, size: int, which: str, path: str) -> dict[str, Any]:
    """Train, save, and train on from the checkpoint beside the original."""
    model, optimizer = fresh(which)
    train(model, optimizer, rank, range(3))
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "pycomm": optimizer.compression.state_dict()}
    dcp.save(state, checkpoint_id=path)
    before = {} if "replicas" in which else copy.deepcopy(totals(optimizer))
    again, loaded = from_files(which, path)
    for one, other in ((model, optimizer), (again, loaded)):
        train(one, other, rank, range(3, 5))
    assert equal(values(model), values(again))
    assert_alike(optimizer, loaded)
    return before


def from_files(which: str, path: str) -> tuple[Any, Any]:
    model, optimizer = fresh(which)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    optimizer.compression.load_checkpoint(Path(path))
    return model, optimizer


def goes_on(rank: int, size: int, which: str, path: str) -> tuple[dict[str, Any], list[Any]]:
    model, optimizer = from_files(which, path)
    found = copy.deepcopy(totals(optimizer))
    train(model, optimizer, rank, range(3, 5))
    return found, values(model)


@rows()
def test_a_checkpoint_goes_on_with_the_same_bits(pool, tmp_path, which, ranks):
    """And on other numbers of ranks with what the former ranks owed and had sent in sum."""
    before = pool.run(saves, which, str(tmp_path), ranks=ranks)[0]
    if "replicas" in which:  # of shards on another number of ranks docs/combine.md tells
        return
    for name in ("big", "small"):
        # The ranks' mean of what they have sent is the momentum; owners may err in between.
        torch.testing.assert_close(before[f"{name}.sent"], before[f"{name}.momentum"])
        assert float(before[f"{name}.owed"].norm()) > 0
    for other in (1, 3):
        results = pool.run(goes_on, which, str(tmp_path), ranks=other)
        all_equal([trained_on for _, trained_on in results])
        for found, _ in results:
            assert found.keys() == before.keys()
            for key, value in found.items():
                # One rounding of each addition.
                torch.testing.assert_close(value, before[key], rtol=1e-5, atol=1e-6, msg=key)


def adopts(rank: int, size: int, which: str) -> list[torch.Tensor]:
    model, optimizer = make(which)
    train(model, optimizer, rank, range(4))
    before = {p: optimizer.state[p][MOMENTUM[which]].clone() for p in model.parameters()}
    group = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    if group is None:
        return []
    smaller = DistributedDataParallel(model.module, process_group=group, **CALM)
    adopted = coded(which, smaller)
    adopted.adopt_state(optimizer)
    assert len(before) == len(SHAPES)
    for parameter, momentum in before.items():
        assert torch.equal(adopted.state[parameter][MOMENTUM[which]], momentum)
    assert adopted.compression.residual_norms()["big"][0] > 0
    train(smaller, adopted, rank, range(4, 6))
    return values(smaller)


@in_ddp
def test_remaining_ranks_adopt_the_state(pool, which):
    first, lost, other = pool.run(adopts, which, ranks=3)
    assert lost == []
    assert equal(first, other)


@on_ranks()
@rows(of="adamw on")
def test_fsdp2_adopts_no_state(rank, size, which):
    (model, optimizer), (_, other) = make(which), make(which)
    train(model, optimizer, rank, range(2))
    with pytest.raises(ValueError, match="go on from a checkpoint, with load_checkpoint"):
        other.adopt_state(optimizer)
    assert not other.state


# ---------------------------------------------------------------- other optimizers


@on_ranks()
@rows(of="adamw")
def test_states_convert_to_those_of_adamw_and_back(rank, size, which):
    model = wrap(which, net())
    torchs = plain(which, model.parameters())
    train(model, torchs, rank, range(3))
    before = {n: whole(torchs.state[p]["exp_avg"]).clone() for n, p in named(model).items()}
    big, bias = (named(model)[name] for name in ("big", "bias"))
    full = whole(torchs.state[big]["exp_avg_sq"])
    optimizer = pycomm.code_optimizer(torchs, model, "sign")
    state = optimizer.state[big]
    assert equal(whole(state["exp_avg"]), before["big"])
    # Sums of float32 numbers in another order.
    torch.testing.assert_close(state["row"], full.sum(1))
    torch.testing.assert_close(state["column"], full.sum(0))
    assert equal(whole(optimizer.state[bias]["exp_avg"]), before["bias"])
    back = optimizer.to_adamw()
    again = whole(back.state[big]["exp_avg_sq"])
    # Sums and products of float32 numbers.
    torch.testing.assert_close(again.sum(1), state["row"], rtol=1e-4, atol=0)
    torch.testing.assert_close(again.sum(0), state["column"], rtol=1e-4, atol=0)
    assert equal(whole(back.state[big]["exp_avg"]), before["big"])
    train(model, optimizer, rank, range(3, 6))
    other = wrap(which, net())
    other.load_state_dict(model.state_dict())
    torchs = plain(which, other.parameters())
    torchs.load_state_dict(optimizer.to_adamw().state_dict())
    train(other, torchs, rank, range(6, 8))
    assert all(one.isfinite().all() for one in values(other))


@on_ranks()
@rows()
def test_an_exact_codec_hands_over_to_the_bit(rank, size, which):
    """From torch's optimizer, in the middle of training, and back."""
    a, b = (wrap(which, net()) for _ in range(2))
    one, two = (plain(which, model.parameters()) for model in (a, b))
    train(a, one, rank, range(9))
    train(b, two, rank, range(3))
    new: Any = pycomm.code_optimizer(two, b, "fp32")
    assert isinstance(new, KINDS[which.split()[0]][0])
    train(b, new, rank, range(3, 6))
    if isinstance(b, DistributedDataParallel):
        b = wrap(which, b.module)
    train(b, new.to_sgd() if which.startswith("sgd") else new.to_adamw(), rank, range(6, 9))
    assert equal(values(a), values(b))


@on_ranks()
@rows()
def test_a_coded_state_survives_torchs_optimizer(rank, size, which):
    """As a script may load it before it calls `code_optimizer`: torch gives states the model's
    dtype."""
    model = wrap(which, net().bfloat16())
    new = pycomm.code_optimizer(plain(which, model.parameters()), model, "sign")
    train(model, new, rank, range(1))
    loaded = wrap(which, net().bfloat16())
    other = plain(which, loaded.parameters())
    other.load_state_dict(copy.deepcopy(new.state_dict()))
    again = pycomm.code_optimizer(other, loaded, "sign")
    for name in ("big", "bias"):
        state, before = again.state[named(loaded)[name]], new.state[named(model)[name]]
        assert state.keys() == before.keys()
        for key, value in state.items():
            assert value.dtype == before[key].dtype
            assert torch.equal(whole(value), whole(before[key]).bfloat16().to(value.dtype))
