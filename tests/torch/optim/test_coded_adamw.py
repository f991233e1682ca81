"""CodedAdamW: AdamW whose momentum travels coded, against the formula in plain torch."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.errors import Error
from tests.torch.harness import SHAPES, Chosen, equal, gradients, near, values, whole
from tests.torch.optim.plain_agreement import SIZES, PlainAdamW

EDEN = "eden:bits=1,scale=mmse"
# Without rebuilt buckets after the first step, so that a reference can follow the layout.
CALM = {"find_unused_parameters": True}


def make(
    codec: Any = "sign", *, bucket_mb: float = 0.02, **options: Any
) -> tuple[DistributedDataParallel, pycomm.CodedAdamW]:
    model = DistributedDataParallel(Chosen(unit=0.01), bucket_cap_mb=bucket_mb, **CALM)
    made = pycomm.CodedAdamW(model.parameters(), model=model, codec=codec, **{**SIZES, **options})
    return model, made


def train(model: nn.Module, optimizer: Any, rank: int, steps: range, unit: float = 1.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        model({name: g * unit for name, g in gradients(rank, step).items()}).backward()
        optimizer.step()


def alike(a: pycomm.CodedAdamW, b: pycomm.CodedAdamW) -> bool:
    """Whether momentum, second moments, residuals and what was sent have the same bits."""
    for one, other in zip(a.state.values(), b.state.values(), strict=True):
        if not equal(*({k: whole(v) for k, v in state.items()} for state in (one, other))):
            return False
    states = [optimizer.compression.state_dict() for optimizer in (a, b)]
    for kind in ("rank", "own"):
        sent = [state.get(f"{kind}{dist.get_rank()}", (0, {}))[1] for state in states]
        if not equal(*({name: entry["worker"] for name, entry in kept.items()} for kept in sent)):
            return False
    return True


# ---------------------------------------------------------------- the formula


def against_the_formula(rank: int, size: int, codec: str) -> None:
    model, optimizer = make(codec, refresh=1)
    plain = {
        n: PlainAdamW(getattr(model.module, n).detach(), size, codec) for n in ("big", "small")
    }
    for step in range(6):
        train(model, optimizer, rank, range(step, step + 1))
        for name, reference in plain.items():
            reference.step([gradients(r, step)[name] for r in range(size)])
            here = getattr(model.module, name)
            # Round-off of float32 in another order, times the steps. A sign that round-off turns
            # would be an error of a thousand times that.
            torch.testing.assert_close(here, reference.x, rtol=1e-4, atol=2e-6)
            torch.testing.assert_close(here.grad, reference.m, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["sign", "topk:0.02"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_is_that_of_the_formula(pool, codec, ranks):
    pool.run(against_the_formula, codec, ranks=ranks)


def exactly(rank: int, size: int) -> None:
    model, optimizer = make("fp32")
    plain = DistributedDataParallel(Chosen(), **CALM)
    plain.load_state_dict(model.state_dict())
    torchs = torch.optim.AdamW(plain.parameters(), **SIZES)
    for m, o in ((model, optimizer), (plain, torchs)):
        train(m, o, rank, range(4))
    assert near(values(model), values(plain))


def test_exact_parameters_move_as_with_adamw(pool):
    pool.run(exactly)


def keeps_a_graph(rank: int, size: int) -> None:
    for codec in ("sign", "fp32"):
        model, optimizer = make(codec)
        big = model.module.big
        kept = (big * big).sum() if codec == "sign" else (model.module.bias**3).sum()
        train(model, optimizer, rank, range(2))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


def test_a_graph_of_before_a_step_is_refused(pool):
    """Its backward would take the parameters of after the step for those of before."""
    pool.run(keeps_a_graph)


# ---------------------------------------------------------------- the same bits everywhere


def trained(rank: int, size: int, codec: Any, steps: int = 4) -> list[torch.Tensor]:
    model, optimizer = make(codec)
    train(model, optimizer, rank, range(steps))
    singles = [b.single for b in optimizer.compression._buckets.values() if b.single]
    modes = {single.gathers for single in singles}
    return [*values(model), torch.tensor(sorted(modes))]


@pytest.mark.parametrize(
    ("codec", "ranks"),
    [
        ("sign", 1),
        ("sign", 3),
        ("topk:0.05", 4),
        ("eden:bits=1,scale=mmse", 2),
        ("int2", 4),
        ("int4", 2),
    ],
)
def test_ranks_have_the_same_bits(pool, codec, ranks):
    results = [pool.run(trained, codec, ranks=ranks, backend=b) for b in ("pycomm", "gloo")]
    for backend in results:
        assert all(equal(result, backend[0]) for result in backend)
    if ranks <= 2:  # the sum of more numbers depends on the order in which a backend adds them
        assert equal(results[0][0], results[1][0])


def in_16_bits(rank: int, size: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(Chosen().to(torch.bfloat16), **CALM)
    optimizer = pycomm.CodedAdamW(model.parameters(), model=model, **SIZES)
    for step in range(3):
        optimizer.zero_grad()
        model({n: g.to(torch.bfloat16) for n, g in gradients(rank, step).items()}).backward()
        optimizer.step()
    assert float(model.module.big.abs().max()) > SIZES["lr"]
    return values(model)


def test_parameters_of_16_bits(pool):
    first, second = pool.run(in_16_bits)
    assert equal(first, second)
    assert all(p.dtype == torch.bfloat16 and p.isfinite().all() for p in first)


def in_python(rank: int, size: int, codec: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Code by C++ a bucket at a time, then through the tensor interface."""
    from pycomm.reduction.batched import Batched

    native = trained(rank, size, codec)
    found, Batched.find = Batched.find, staticmethod(lambda *_: None)  # type: ignore[method-assign]
    try:
        return native, trained(rank, size, codec)
    finally:
        Batched.find = found  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_ways_of_coding_a_bucket_write_the_same_bits(pool, ranks):
    for codec in ("int2", "sign"):
        for native, python in pool.run(in_python, codec, ranks=ranks, backend="gloo"):
            assert equal(native, python)


def forms(rank: int, size: int) -> tuple[list[bool], list[torch.Tensor]]:
    model, optimizer = make("quant:bits=3")
    train(model, optimizer, rank, range(3))
    singles = [b.single for b in optimizer.compression._buckets.values() if b.single]
    return [single.gathers for single in singles], values(model)


def test_many_ranks_get_answers_from_owners_and_few_get_all_payloads(pool):
    """Two payloads of 3.5 bits are less than one and an answer of 4.25; four are not."""
    for ranks, gathers in ((2, True), (4, False)):
        results = pool.run(forms, ranks=ranks, backend="gloo")
        for modes, _ in results:
            assert set(modes) == {gathers}
        assert all(equal(result[1], results[0][1]) for result in results)


# ---------------------------------------------------------------- training loops


def accumulates(rank: int, size: int) -> None:
    (a, one), (b, two) = make(), make()
    for step in range(3):
        first, second = gradients(rank, step), gradients(rank, step + 100)
        for optimizer in (one, two):
            optimizer.zero_grad()
        a({name: first[name] + second[name] for name in first}).backward()
        with b.no_sync():
            b(first).backward()
        b(second).backward()
        for optimizer in (one, two):
            optimizer.step()
    assert equal(values(a), values(b))
    assert alike(one, two)


def test_gradients_accumulate_under_no_sync(pool):
    pool.run(accumulates)


def two_backwards(rank: int, size: int) -> None:
    """The momentum of two reductions: b m + (1 - b) (g1 + g2), with what coding has left."""
    model, optimizer = make("topk:1.0")
    for step in range(2):
        optimizer.zero_grad()
        before = {n: optimizer.state[getattr(model.module, n)] for n in ("big", "small")}
        momentum = {n: s["exp_avg"].clone() for n, s in before.items() if s}
        for part in range(2):
            model(gradients(rank, 10 * step + part)).backward()
        for name, moment in optimizer.compression.moments.items():
            total = sum(gradients(r, 10 * step + p)[name] for r in range(size) for p in range(2))
            b = moment.beta
            want = (1 - b) * total / size + b * momentum.get(name, torch.zeros_like(total))
            # Round-off of a dozen operations on values of about 1.
            torch.testing.assert_close(moment.parameter.grad, want, rtol=1e-4, atol=1e-5)
        optimizer.step()


def test_two_backwards_before_a_step_add_up(pool):
    pool.run(two_backwards)


def thrown_away(rank: int, size: int, to_none: bool) -> None:
    (a, one), (b, two) = make(), make()
    for step in range(4):
        train(a, one, rank, range(step, step + 1))
        two.zero_grad(set_to_none=to_none)
        b(gradients(rank, step + 50)).backward()
        train(b, two, rank, range(step, step + 1))
    assert equal(values(a), values(b))
    one.compression.settle()
    assert alike(one, two)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_thrown_away_leave_nothing(pool, to_none):
    pool.run(thrown_away, to_none)


def overflows(rank: int, size: int, manual: bool) -> None:
    (a, one) = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    (b, two) = make(scaler=scaler)
    for step in range(5):
        if step != 2:
            train(a, one, rank, range(step, step + 1))
        two.zero_grad()
        given = gradients(rank, step)
        if step == 2 and rank == size - 1:
            given["big"][3, 4] = float("inf")
        scaler.scale(b(given)).backward()
        if manual:
            scaler.unscale_(two)
        scaler.step(two)
        scaler.update()
    assert scaler.get_scale() == 512
    assert two.compression.overflows == 1
    # The loss scale is a power of two, so it changes no bit.
    assert equal(values(a), values(b))
    assert alike(one, two)


@pytest.mark.parametrize("manual", [False, True])
def test_a_step_that_overflows_leaves_no_trace(pool, manual):
    pool.run(overflows, manual)


def without_scaler(rank: int, size: int) -> str:
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(gradients(rank, 0))).backward()
    try:
        scaler.step(optimizer)
    except Error as error:
        return str(error)
    return ""


def test_an_unknown_scaler_is_an_error(pool):
    assert all("scaler=" in text for text in pool.run(without_scaler))


def groups(rank: int, size: int) -> None:
    model = DistributedDataParallel(Chosen(), **CALM)
    with torch.no_grad():
        model.module.big.fill_(1.0)
    parts = [
        {"params": [model.module.big], "lr": 0.0, "weight_decay": 0.5},
        {"params": [model.module.small], "lr": 0.25, "weight_decay": 0.0},
        {"params": [model.module.bias]},
    ]
    optimizer = pycomm.CodedAdamW(parts, model=model, **SIZES)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**-step)
    train(model, optimizer, rank, range(1))
    scheduler.step()
    assert torch.equal(model.module.big, torch.ones(SHAPES["big"]))
    assert float(model.module.small.abs().max()) > 0.1
    assert optimizer.param_groups[1]["lr"] == 0.125
    assert nn.utils.clip_grad_norm_(model.parameters(), 1e-3) > 1e-3
    optimizer.step()  # by the clipped momentum, which is the new one
    coded = [state["exp_avg"] for state in optimizer.state.values() if "row" in state]
    assert len(coded) == 2
    # The sum of their squares has the round-off of float32.
    assert sum(float(m.square().sum()) for m in coded) <= 1.001e-6


def test_groups_schedules_and_clipping(pool):
    pool.run(groups)


# ---------------------------------------------------------------- state


def resumes(rank: int, size: int) -> None:
    (a, one) = make()
    train(a, one, rank, range(3))
    # A copy: torch's load_state_dict shares the tensors of a state in memory.
    saved = deepcopy((one.state_dict(), one.compression.state_dict(), a.state_dict()))
    (b, two) = make()
    two.load_state_dict(saved[0])
    two.compression.load_state_dict(saved[1])
    b.load_state_dict(saved[2])
    for model, optimizer in ((a, one), (b, two)):
        train(model, optimizer, rank, range(3, 6))
    assert equal(values(a), values(b))
    assert alike(one, two)


def test_a_checkpoint_goes_on_with_the_same_bits(pool):
    pool.run(resumes)


def saved(rank: int, size: int) -> Any:
    model, optimizer = make()
    train(model, optimizer, rank, range(3))
    return optimizer.state_dict(), optimizer.compression.state_dict()


def resharded(rank: int, size: int, states: list[Any]) -> dict[str, torch.Tensor]:
    model, optimizer = make()
    optimizer.load_state_dict(states[0][0])
    optimizer.compression.load_state_dict(*(state for _, state in states))
    residuals = optimizer.compression.residuals
    assert residuals is not None
    owed = {}
    for name in ("big", "small"):
        numel = torch.Size(SHAPES[name]).numel()
        added = residuals.added(name, 0, numel)
        owed[name] = torch.zeros(numel) if added is None else added  # a rank may have none
        dist.all_reduce(owed[name])
    train(model, optimizer, rank, range(1))
    return owed


def test_residuals_are_resharded_for_other_ranks(pool):
    states = pool.run(saved, ranks=2)
    before = {
        name: sum(state[f"rank{r}"][1][name]["worker"] for r, (_, state) in enumerate(states)) / 2
        for name in ("big", "small")
    }
    for owed in pool.run(resharded, states, ranks=3):
        for name, value in owed.items():
            # One rounding of each addition.
            torch.testing.assert_close(value, before[name], rtol=1e-5, atol=1e-6)


def adopts(rank: int, size: int) -> list[torch.Tensor]:
    model, optimizer = make()
    train(model, optimizer, rank, range(3))
    group = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    if group is None:
        return []
    smaller = DistributedDataParallel(model.module, process_group=group, **CALM)
    adopted = pycomm.CodedAdamW(smaller.parameters(), model=smaller, **SIZES)
    momentum = optimizer.state[model.module.big]["exp_avg"].clone()
    adopted.adopt_state(optimizer)
    assert torch.equal(adopted.state[model.module.big]["exp_avg"], momentum)
    assert adopted.compression.residual_norms()["big"][0] > 0
    train(smaller, adopted, rank, range(3, 5))
    return values(smaller)


def test_remaining_ranks_adopt_the_state(pool):
    first, lost, other = pool.run(adopts, ranks=3)
    assert lost == []
    assert equal(first, other)


def converts(rank: int, size: int) -> None:
    model = DistributedDataParallel(Chosen(), **CALM)
    torchs = torch.optim.AdamW(model.parameters(), **SIZES)
    train(model, torchs, rank, range(3))
    big = torchs.state[model.module.big]
    optimizer = pycomm.code_optimizer(torchs, model, "sign")
    state = optimizer.state[model.module.big]
    assert torch.equal(state["exp_avg"], big["exp_avg"])
    assert torch.equal(state["row"], big["exp_avg_sq"].sum(1))
    assert torch.equal(state["column"], big["exp_avg_sq"].sum(0))
    bias = optimizer.state[model.module.bias]
    assert torch.equal(bias["exp_avg_sq"], torchs.state[model.module.bias]["exp_avg_sq"])
    back = optimizer.to_adamw()
    again = back.state[model.module.big]
    # Sums and products of float32 numbers.
    torch.testing.assert_close(again["exp_avg_sq"].sum(1), state["row"], rtol=1e-4, atol=0)
    torch.testing.assert_close(again["exp_avg_sq"].sum(0), state["column"], rtol=1e-4, atol=0)
    assert torch.equal(again["exp_avg"], big["exp_avg"])
    train(model, optimizer, rank, range(3, 6))
    assert back.param_groups[0]["lr"] == SIZES["lr"]
    plain = DistributedDataParallel(Chosen(), **CALM)
    plain.load_state_dict(model.state_dict())
    fresh = torch.optim.AdamW(plain.parameters(), **SIZES)
    fresh.load_state_dict(optimizer.to_adamw().state_dict())
    train(plain, fresh, rank, range(6, 8))


def test_states_convert_to_those_of_adamw_and_back(pool):
    pool.run(converts)


def test_saved_state_can_be_written_to_a_file(pool, tmp_path: Path):
    optimizer, compression = pool.run(saved, ranks=1)[0]
    torch.save((optimizer, compression), tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=False)
    assert loaded[0]["state"].keys() == optimizer["state"].keys()
