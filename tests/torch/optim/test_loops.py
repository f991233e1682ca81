"""Coded optimizers in training loops, on any wrapper: overflows, accumulation, lost ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error, PeerLost, WireMismatch
from tests.extent import FULL
from tests.torch.harness import SHAPES, Chosen, all_equal, equal, gradients, values, whole
from tests.torch.pool import on_ranks

# Without rebuilt buckets after the first step, so that two models have the same layout.
CALM = {"find_unused_parameters": True}
RATES = {"adamw": 1e-2, "sgd": 2.0**-7}
# Model and optimizer, and how many ranks; of two replicas of two shards each, four.
LOOPS = [("adamw", 2), ("sgd", 2), ("adamw on shards", 2), ("adamw on replicas of shards", 4)]
loops = pytest.mark.parametrize(("which", "ranks"), LOOPS)
in_ddp = pytest.mark.parametrize("which", RATES)


def wrapped(which: str, net: nn.Module) -> nn.Module:
    size = dist.get_world_size()
    if which.endswith("replicas of shards"):
        names = ("replicate", "shard")
        return fully_shard(net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names))
    if which.endswith("shards"):
        return fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    return DistributedDataParallel(net, bucket_cap_mb=0.005, **CALM)


def coded(which: str, model: nn.Module, **options: Any) -> Any:
    make = pycomm.CodedSGD if which == "sgd" else pycomm.CodedAdamW
    rate = RATES[which.split()[0]]
    return make(model.parameters(), rate, weight_decay=0.125, model=model, **options)


def make(which: str, **options: Any) -> tuple[nn.Module, Any]:
    model = wrapped(which, Chosen(unit=0.01))
    return model, coded(which, model, **options)


def step(model: nn.Module, optimizer: Any, *given: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    for one in given:
        model(one).backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for number in steps:
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


def integers(rank: int, number: int) -> dict[str, torch.Tensor]:
    """Gradients whose squares add up to the same in any order."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    return {n: torch.randint(-9, 10, s, generator=generator).float() for n, s in SHAPES.items()}


def kept(optimizer: Any) -> dict[str, Any]:
    """Return all that an optimizer keeps on this rank, by name."""
    found = {
        f"{i}.{key}": whole(value)
        for i, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    state = optimizer.compression.state_dict()
    for kind in ("rank", "own", "sent"):
        for name, entry in state.get(f"{kind}{dist.get_rank()}", (0, {}))[1].items():
            tensors = entry if isinstance(entry, dict) else {"own": entry}
            found |= {f"{name}.{k}": t for k, t in tensors.items() if isinstance(t, torch.Tensor)}
    return found


def assert_alike(one: Any, two: Any) -> None:
    a, b = kept(one), kept(two)
    assert a.keys() == b.keys()
    assert [name for name in a if not equal(a[name], b[name])] == []


# ---------------------------------------------------------------- the same bits everywhere


def trained(rank: int, size: int, which: str) -> list[torch.Tensor]:
    model, optimizer = make(which)
    train(model, optimizer, rank, range(5))
    assert len(optimizer.state) == len(SHAPES)
    return values(model)


@in_ddp
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_same_bits_on_any_backend(pool, which, ranks):
    # The sum of more than two numbers depends on the order in which a backend adds them.
    backends = ["pycomm", "gloo"] if ranks == 2 or FULL else ["pycomm"]
    native, *others = (pool.run(trained, which, ranks=ranks, backend=b) for b in backends)
    for results in (native, *others):
        all_equal(results)
    if ranks == 2:
        assert equal(native[0], others[0][0])


@on_ranks(2, then=all_equal)
@in_ddp
def test_parameters_of_16_bits_are_trained(rank, size, which):
    model = wrapped(which, Chosen().to(torch.bfloat16))
    optimizer = coded(which, model)
    for number in range(4):
        step(model, optimizer, {n: g.bfloat16() for n, g in gradients(rank, number).items()})
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in model.parameters())
    assert float(model.module.big.abs().max()) > RATES[which]
    return values(model)


# ---------------------------------------------------------------- which gradients count


@on_ranks()
@loops
def test_gradients_add_up_until_a_step_uses_them(rank, size, which):
    (a, one), (b, two) = make(which), make(which)
    for number in range(4):
        first, second = integers(rank, number), integers(rank, number + 50)
        step(a, one, {name: first[name] + second[name] for name in first})
        two.zero_grad()
        if number % 2 or which != "sgd":  # of AdamW a second reduction changes the momentum
            without_reduction(b, first)
        else:
            b(first).backward()
        b(second).backward()
        two.step()
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks()
@pytest.mark.parametrize(("which", "ranks"), [loop for loop in LOOPS if loop[0] != "sgd"])
def test_two_backwards_before_a_step_add_up(rank, size, which):
    """The momentum of two reductions: b m + (1 - b) (g1 + g2), since nothing is left over."""
    model, optimizer = make(which, codec="topk:1.0", feedback="residual:storage=float32")
    named = dict(getattr(model, "module", model).named_parameters())
    betas: dict[str, float] = {}
    for number in range(3):
        before = {
            n: whole(optimizer.state[named[n]]["exp_avg"]).clone() if number else 0.0
            for n in ("big", "small")
        }
        step(model, optimizer, *(gradients(rank, 10 * number + part) for part in range(2)))
        for name, moment in optimizer.compression.moments.items():
            given = [gradients(r, 10 * number + p)[name] for r in range(size) for p in range(2)]
            b = betas.get(name, 0.0)
            want = (1 - b) * sum(given) / size + b * before[name]
            if number:
                # Round-off of a dozen operations on values of about 1.
                torch.testing.assert_close(whole(named[name].grad), want, rtol=1e-4, atol=2e-5)
            betas[name] = moment.beta


@on_ranks()
@loops
@pytest.mark.parametrize("to_none", [True, False])
def test_discarded_gradients_leave_nothing(rank, size, which, to_none):
    (a, one), (b, two) = make(which), make(which)
    for number in range(4):
        step(a, one, gradients(rank, number))
        two.zero_grad(set_to_none=to_none)
        b(gradients(rank, number + 50)).backward()
        two.zero_grad(set_to_none=to_none)
        b(gradients(rank, number)).backward()
        two.step()
    assert equal(values(a), values(b))
    one.compression.settle()
    assert_alike(one, two)


@on_ranks()
@loops
def test_a_closure_may_do_the_backward_in_the_step(rank, size, which):
    (a, one), (b, two) = make(which), make(which)
    losses = []
    for number in range(3):
        given = gradients(rank, number)
        step(a, one, given)

        def backward(given: dict[str, torch.Tensor] = given) -> torch.Tensor:
            two.zero_grad()
            loss = b(given)
            loss.backward()
            losses.append(loss)
            return loss

        assert two.step(backward) is losses[number]
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks(2)
@in_ddp
def test_compiled_models_and_steps_do_the_same(rank, size, which):
    # Buckets of the usual size: torch compiles no model with a smaller second one.
    a, b = (DistributedDataParallel(Chosen(unit=0.01), **CALM) for _ in range(2))
    b = torch.compile(b, backend="eager")
    one, two = coded(which, a), coded(which, b)
    take = torch.compile(two.step, backend="eager")
    for number in range(4):
        step(a, one, gradients(rank, number))
        two.zero_grad()
        b(gradients(rank, number)).backward()
        take()
    assert equal(values(a), values(b))
    assert_alike(one, two)


# Without a scaler torch's AdamW takes what is not finite of an exact parameter, and so does ours.
OVERFLOWS = [(*loop, True, "big") for loop in LOOPS] + [("sgd", 2, False, "bias")]


@on_ranks()
@pytest.mark.parametrize(("which", "ranks", "scaled", "where"), OVERFLOWS)
@pytest.mark.parametrize("what", [float("inf"), float("nan")])
def test_a_step_that_overflows_leaves_no_trace(rank, size, which, scaled, where, what):
    (a, one) = make(which)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    (b, two) = make(which, scaler=scaler if scaled else None)
    for number in range(7):
        bad = number in (1, 5)
        if not bad:
            step(a, one, gradients(rank, number))
        two.zero_grad()
        given = gradients(rank, number)
        if bad and rank == size - 1:
            given["big" if number == 1 else where].view(-1)[7] = what
        loss = b(given)
        if scaled:
            scaler.scale(loss).backward()
            if number == 5 and isinstance(b, DistributedDataParallel):
                scaler.unscale_(two)
            scaler.step(two)
            scaler.update()
        else:
            loss.backward()
            two.step()
    assert scaler.get_scale() == (256 if scaled else 1024)
    # The loss scale is a power of two, so it changes no bit.
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks(2)
def test_an_overflow_that_no_backward_shares_is_skipped(rank, size):
    """Of CodedSGD no gradient travels in a backward: the ranks' scalers agree in the step."""
    (a, one) = make("sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    (b, two) = make("sgd", scaler=scaler)
    for number in range(5):
        given, bad = gradients(rank, number), number in (1, 3)
        one.zero_grad()
        two.zero_grad()
        if not bad:
            without_reduction(a, given)
            one.step()
        elif rank == 1:
            given["big"].view(-1)[7] = torch.inf
        with b.no_sync():
            scaler.scale(b(given)).backward()
        if number == 3:
            scaler.unscale_(two)
        scaler.step(two)
        scaler.update()
    assert scaler.get_scale() == 256
    assert equal(values(a), values(b))
    assert_alike(one, two)


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("reduced", [True, False])
def test_a_gradient_that_a_rank_lacks_counts_as_zero(rank, size, reduced):
    (a, one), (b, two) = make("sgd"), make("sgd")
    for number in range(4):
        for model, optimizer in ((a, one), (b, two)):
            optimizer.zero_grad()
            given = gradients(rank, number)
            model(given).backward() if reduced else without_reduction(model, given)
            if number % 2 == 1 and rank == 1:
                big = model.module.big
                big.grad = None if model is a else torch.zeros_like(big)
            optimizer.step()
    assert equal(values(a), values(b))
    assert_alike(one, two)
    return values(a)


@on_ranks(2)
@in_ddp
def test_an_unknown_scaler_is_an_error(rank, size, which):
    model, optimizer = make(which)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(gradients(rank, 0))).backward()
    with pytest.raises(Error, match="scaler="):
        scaler.step(optimizer)


@on_ranks(2, then=all_equal)
def test_parameters_that_get_no_gradient(rank, size):
    """A parameter that no rank uses at first, and one that only one rank uses."""
    model, optimizer = make("sgd")
    before = dict(zip(SHAPES, values(model), strict=True))
    for number in range(6):
        given = gradients(rank, number)
        if number < 3:
            del given["small"]
        if rank == 1:
            del given["big"]
        step(model, optimizer, given)
        now = dict(zip(SHAPES, values(model), strict=True))
        assert torch.equal(now["small"], before["small"]) == (number < 3)
        assert not torch.equal(now["big"], before["big"])
    # One that joins late moves as far as learning rates allow, not by a second moment of zero.
    assert float((now["small"] - before["small"]).abs().max()) < 0.2
    return values(model)


@on_ranks(2, timeout=60)
def test_join_is_refused(rank, size):
    model, optimizer = make("sgd")
    # The other rank hears that this one has left.
    match = "left the group" if rank else "equally many batches"
    with pytest.raises(Error, match=match), Join([model]):
        train(model, optimizer, rank, range(1 + rank))


# ---------------------------------------------------------------- other ranks


def adopts(rank: int, size: int, which: str) -> list[torch.Tensor]:
    model, optimizer = make(which)
    train(model, optimizer, rank, range(4))
    momentum = "momentum_buffer" if which == "sgd" else "exp_avg"
    before = {p: optimizer.state[p][momentum].clone() for p in model.parameters()}
    group = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    if group is None:
        return []
    smaller = DistributedDataParallel(model.module, process_group=group, **CALM)
    adopted = coded(which, smaller)
    adopted.adopt_state(optimizer)
    assert len(before) == len(SHAPES)
    for parameter, kept_one in before.items():
        assert torch.equal(adopted.state[parameter][momentum], kept_one)
    assert adopted.compression.residual_norms()["big"][0] > 0
    if which == "sgd":  # goes on from the momentum: what each has sent is the former group's
        assert adopted.compression.own == {}
    train(smaller, adopted, rank, range(4, 6))
    if which == "sgd":
        assert adopted.compression.own.keys() == optimizer.compression.own.keys()
    return values(smaller)


@in_ddp
def test_remaining_ranks_adopt_the_state(pool, which):
    first, lost, other = pool.run(adopts, which, ranks=3)
    assert lost == []
    assert equal(first, other)


class OfLostRank:
    """An operation with a lost rank; a second wait says less."""

    def __init__(self) -> None:
        self.errors: list[Exception] = [RuntimeError("failed"), PeerLost("rank 7 died", 7, [7])]

    def wait(self) -> None:
        raise self.errors.pop()


@on_ranks()
@pytest.mark.parametrize(("which", "ranks"), [loop for loop in LOOPS if loop[0] != "sgd"])
def test_the_backward_after_a_loss_raises_the_first_error(rank, size, which):
    model, optimizer = make(which)
    train(model, optimizer, rank, range(2))
    optimizer.zero_grad()
    model(gradients(rank, 2)).backward()
    optimizer.compression._sent.wait()
    optimizer.compression._sent = OfLostRank()
    with pytest.raises(PeerLost, match="rank 7 died"):
        optimizer.step()
    with pytest.raises(PeerLost, match="rank 7 died"):
        model(gradients(rank, 3)).backward()


@on_ranks(2)
def test_other_members_of_the_same_group_are_refused(rank, size):
    model, optimizer = make("sgd")
    train(model, optimizer, rank, range(1))
    optimizer.compression._formed = lambda: 1  # as after pycomm.elastic.reconfigure
    with pytest.raises(Error, match="adopt_state"):
        train(model, optimizer, rank, range(1, 2))


def saves(rank: int, size: int, which: str) -> Any:
    model, optimizer = make(which)
    train(model, optimizer, rank, range(3))
    return optimizer.state_dict(), optimizer.compression.state_dict()


def loads(rank: int, size: int, which: str, states: list[Any]) -> Any:
    """Return what a rank has of states of fewer ranks, and where training goes on to."""
    model, optimizer = make(which)
    optimizer.load_state_dict(deepcopy(states[0][0]))  # the ranks' processes share its tensors
    optimizer.compression.load_state_dict(*(state for _, state in states))
    loaded, owed = kept(optimizer), {}
    for name in ("big", "small"):
        added = optimizer.compression.residuals.added(name, 0, SHAPES_OF[name])
        owed[name] = (
            torch.zeros(SHAPES_OF[name]) if added is None else added
        )  # a rank may have none
        dist.all_reduce(owed[name])
    train(model, optimizer, rank, range(3, 5))
    return owed, loaded, values(model)


SHAPES_OF = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}


@in_ddp
def test_a_checkpoint_goes_on_with_more_ranks(pool, which):
    """They owe what the former ranks owed, and go on from the mean of what these have sent."""
    states = pool.run(saves, which, ranks=2)
    found = pool.run(loads, which, states, ranks=3)
    all_equal([trained_on for _, _, trained_on in found])
    for owed, loaded, _ in found:
        for name, value in owed.items():
            before = [state[f"rank{r}"][1][name]["worker"] for r, (_, state) in enumerate(states)]
            # One rounding of each addition.
            torch.testing.assert_close(value, sum(before) / 2, rtol=1e-5, atol=1e-6)
        for name in SHAPES if which == "sgd" else ():
            both = [state[f"sent{r}"][1][name] for r, (_, state) in enumerate(states)]
            torch.testing.assert_close(loaded[f"{name}.own"], sum(both) / 2, rtol=1e-6, atol=1e-7)


# ------------------------------------------------------------------------------- refused optimizers
# What coded optimizers cannot do is refused by all ranks, before anything is sent.


ADAMW, SGD = pycomm.CodedAdamW, pycomm.CodedSGD


def ddp() -> DistributedDataParallel:
    return DistributedDataParallel(Chosen())


def compressed(model: nn.Module) -> nn.Module:
    pycomm.compress(model, "int8")
    return model


def sparse() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4, sparse=True)))


def columns() -> nn.Module:
    return fully_shard(nn.Linear(64, 64), shard_placement_fn=lambda p: Shard(p.ndim - 1))


def divided() -> nn.Module:
    model = fully_shard(Chosen())
    model.set_gradient_divide_factor(3.0)
    return model


def partly_sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model[0])
    return model


def made(kind: Any, model: nn.Module, **options: Any) -> Any:
    return kind(**{"params": model.parameters(), "model": model, **options})


def replaced(kind: Any, **options: Any) -> Any:
    model = ddp()
    return pycomm.code_optimizer(kind(model.parameters(), lr=0.1, **options), model)


def of_group(kind: Any, **options: Any) -> Any:
    model = ddp()
    return kind(params=[{"params": [*model.parameters()], **options}], model=model)


def foreign(kind: Any) -> Any:
    return made(kind, ddp(), params=nn.Linear(4, 4).parameters())


# What is tried, and a part of the error.
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: made(ADAMW, ddp(), betas=(1.0, 0.9)), "ValueError: CodedAdamW: betas=(1.0, 0.9)"),
    (lambda: made(ADAMW, ddp(), betas=(0.9,)), "give two numbers"),
    (lambda: made(ADAMW, ddp(), betas=0.9), "give two numbers"),
    (lambda: made(ADAMW, ddp(), lr=-1.0), "ValueError: CodedAdamW: lr=-1.0"),
    (lambda: made(ADAMW, ddp(), eps=float("nan")), "eps=nan is not a finite number"),
    (lambda: made(ADAMW, ddp(), refresh=-1), "refresh=-1"),
    (lambda: of_group(ADAMW, betas=(0.9, 1.0)), "ValueError: CodedAdamW: betas=(0.9, 1.0)"),
    (lambda: made(ADAMW, sparse()), "ValueError: CodedAdamW: 0 has sparse gradients"),
    (lambda: made(ADAMW, ddp(), codec="eden:bits=1"), "scale=mmse"),
    (lambda: made(ADAMW, ddp(), codec="powersgd:4"), "factors"),
    (lambda: made(ADAMW, ddp(), codec="auto"), "name a codec"),
    (lambda: made(ADAMW, ddp(), feedback="decay"), "kind residual"),
    (lambda: made(ADAMW, nn.Linear(4, 4)), "TypeError: CodedAdamW takes a model wrapped"),
    (lambda: foreign(ADAMW), "does not belong"),
    (lambda: made(ADAMW, compressed(ddp())), "Error: this model is compressed already"),
    (lambda: made(ADAMW, columns()), "ValueError: CodedAdamW: weight is sharded by dimension 1"),
    (lambda: made(ADAMW, divided()), "Error: torch sums the gradients"),
    (
        lambda: made(ADAMW, compressed(fully_shard(Chosen()))),
        "Error: this model, or a part of it, is compressed already",
    ),
    (lambda: made(SGD, ddp(), momentum=1.0), "CodedSGD: momentum=1.0 must be from 0 to below 1"),
    (lambda: made(SGD, ddp(), momentum="much"), "TypeError: momentum"),
    (lambda: made(SGD, ddp(), lr=-1.0), "ValueError: CodedSGD: lr=-1.0"),
    (lambda: made(SGD, ddp(), weight_decay=float("nan")), "weight_decay=nan"),
    (lambda: of_group(SGD, lr=-1.0), "lr=-1.0"),
    (lambda: made(SGD, sparse()), "sparse gradients"),
    (lambda: made(SGD, ddp(), codec="eden:bits=1"), "scale=mmse"),
    (lambda: made(SGD, ddp(), codec="powersgd:4"), "factors"),
    (lambda: made(SGD, ddp(), codec="auto"), "name a codec"),
    (lambda: made(SGD, ddp(), feedback="momentum"), "kind residual"),
    (lambda: made(SGD, Chosen()), "TypeError: CodedSGD takes a model wrapped"),
    (lambda: made(SGD, partly_sharded()), "CodedAdamW"),
    (lambda: foreign(SGD), "does not belong"),
    (lambda: made(SGD, compressed(ddp())), "compressed already"),
    (
        lambda: replaced(torch.optim.RMSprop),
        "TypeError: code_optimizer takes torch.optim.AdamW, Adam or SGD, not RMSprop",
    ),
    (
        lambda: replaced(torch.optim.AdamW, amsgrad=True),
        "ValueError: code_optimizer: CodedAdamW has no amsgrad",
    ),
    (
        lambda: replaced(torch.optim.Adam, weight_decay=0.1),
        "ValueError: code_optimizer: Adam adds its weight decay to the gradients",
    ),
    (
        lambda: replaced(torch.optim.SGD, momentum=0.9, nesterov=True),
        "CodedSGD has no nesterov",
    ),
    (
        lambda: replaced(torch.optim.SGD, momentum=0.9, dampening=0.5),
        "CodedSGD has no dampening",
    ),
    (lambda: replaced(torch.optim.SGD), "no momentum that could travel"),
]


@on_ranks(2)
def test_what_cannot_work_is_refused(rank, size):
    for act, words in REFUSED:
        with pytest.raises((Error, TypeError, ValueError)) as caught:
            act()
        assert words in f"{type(caught.value).__name__}: {caught.value}"


@on_ranks(2)
def test_shards_that_fail_later_are_refused(rank, size):
    """What only a step shows: parameters without gradients, and a divisor that is set later."""
    partly, later = fully_shard(Chosen(unit=0.01)), fully_shard(Chosen(unit=0.01))
    optimizer, _ = (made(ADAMW, model) for model in (partly, later))
    partly(gradients(rank, 0)).backward()
    optimizer.step()
    with pytest.raises(Error, match=r"set_reduce_scatter_unused_params\(True\)"):
        partly(gradients(rank, 1, ["big"])).backward()
    later.set_gradient_divide_factor(3.0)
    with pytest.raises(Error, match="torch sums the gradients"):
        later(gradients(rank, 1)).backward()


def another_parameter(group: dict[str, Any]) -> None:
    group["params"][0] = nn.Parameter(group["params"][0].detach().clone())


# What becomes of a group before a step, and a part of the error.
LATER: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda group: group.update(lr=-1.0), "lr=-1.0"),
    (lambda group: group.update(lr=float("nan")), "lr=nan"),
    (lambda group: group.update(weight_decay=-1.0), "weight_decay=-1.0"),
    (lambda group: group.update(betas=(1.5, 0.9)), "betas=(1.5, 0.9)"),
    (lambda group: group.update(momentum=1.0), "momentum=1.0"),
    (lambda group: group.update(maximize=True), "has no maximize"),
    (lambda group: group.update(amsgrad=True), "has no amsgrad"),
    (lambda group: group.update(nesterov=True), "has no nesterov"),
    (another_parameter, "does not belong"),
]


@on_ranks(2)
@pytest.mark.parametrize("kind", [ADAMW, SGD])
def test_what_cannot_work_is_refused_in_every_step(rank, size, kind):
    model = ddp()
    optimizer = made(kind, model)
    (group,) = optimizer.param_groups
    before = [p.detach().clone() for p in model.parameters()]
    for change, words in LATER:
        settings = {**group, "params": [*group["params"]]}
        change(group)
        model(gradients(rank, 0)).backward()
        with pytest.raises(ValueError, match=re.escape(words)):
            optimizer.step()
        group.clear()
        group.update(settings)
    assert equal(before, [p.detach() for p in model.parameters()])
    optimizer.step()


DIFFERENT: list[tuple[Any, dict[str, Any]]] = [
    (kind, what)
    for kind in (ADAMW, SGD)
    for what in (
        {"lr": (0.1, 0.2)},
        {"codec": ("sign", "int4")},
        {"seed": (1, 2)},
        {"scaler": (None, torch.amp.GradScaler("cpu"))},
        {"refresh": (1, 2)} if kind is ADAMW else {"momentum": (0.9, 0.8)},
    )
]


@on_ranks(2)
def test_ranks_that_differ_get_an_error_each(rank, size):
    for kind, what in DIFFERENT:
        options = {key: value[rank] for key, value in what.items()}
        with pytest.raises(WireMismatch, match="rank"):
            made(kind, ddp(), **options)
