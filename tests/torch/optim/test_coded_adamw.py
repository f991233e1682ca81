"""CodedAdamW: AdamW whose momentum travels coded, against the formula in plain torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.reduction.momentum import agreement, scaled
from tests.extent import each_value
from tests.torch import harness as ddp
from tests.torch.harness import SHAPES, Chosen, equal, gradients, values
from tests.torch.optim import test_sharded_adamw as sharded
from tests.torch.optim.plain_agreement import SIZES
from tests.torch.pool import on_ranks

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


# ---------------------------------------------------------------- the formula


@on_ranks(2)
def test_a_graph_of_before_a_step_is_refused(rank, size):
    """Its backward would take the parameters of after the step for those of before."""
    for codec in ("sign", "fp32"):
        model, optimizer = make(codec)
        big = model.module.big
        kept = (big * big).sum() if codec == "sign" else (model.module.bias**3).sum()
        train(model, optimizer, rank, range(2))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


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


def test_few_ranks_gather_payloads_and_many_ask_owners(pool):
    """Two payloads of 3.5 bits are less than one and an answer of 4.25; four are not."""
    for ranks, gathers in ((2, True), (4, False)):
        results = pool.run(forms, ranks=ranks, backend="gloo")
        for modes, _ in results:
            assert set(modes) == {gathers}
        assert all(equal(result[1], results[0][1]) for result in results)


# ---------------------------------------------------------------- training loops


@on_ranks(2)
def test_groups_schedules_and_clipping(rank, size):
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


def distances(rank: int, size: int, codec: str, most: float) -> tuple[float, float]:
    """Clip each step's gradients; return how far a matrix moves with AdamW and CodedAdamW."""
    found = []
    for coded in (False, True):
        model = DistributedDataParallel(Chosen(unit=0.01), **CALM)
        options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.0}
        if coded:
            options |= {"model": model, "codec": codec, **SIZES}
        kind = pycomm.CodedAdamW if coded else torch.optim.AdamW
        optimizer = kind(model.parameters(), **options)
        before = model.module.big.detach().clone()
        drift = gradients(0, 99)
        for step in range(20):
            optimizer.zero_grad()
            own = gradients(rank, step)
            model({name: 0.02 * (g + drift[name]) for name, g in own.items()}).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), most)
            assert most > 1 or norm > 3 * most
            optimizer.step()
        found.append(float((model.module.big - before).norm()))
    return found[0], found[1]


@pytest.mark.parametrize(("codec", "ranks"), [("sign", 1), ("sign", 2), ("int4", 2)])
def test_clipping_costs_no_more_distance_than_adamw(pool, codec, ranks):
    for exact, coded in pool.run(distances, codec, 1e-2, ranks=ranks, backend="pycomm"):
        free = pool.run(distances, codec, 1e9, ranks=ranks, backend="pycomm")[0]
        assert coded / free[1] == pytest.approx(exact / free[0], rel=0.05)


# ---------------------------------------------------------------- state


@on_ranks(2)
def test_second_moments_decay_by_the_betas_of_each_step(rank, size):
    model, optimizer = make("sign", refresh=4)
    left = 1.0
    for step in range(9):  # exchanges in the first steps, and in the last one that of four
        beta = (0.99, 0.5, 0.999)[step % 3]
        optimizer.param_groups[0]["betas"] = (0.9, beta)
        train(model, optimizer, rank, range(step, step + 1))
        left *= beta
    moments = optimizer.compression.moments.values()
    weights = [float(moment.state["moment_weight"]) for moment in moments]
    assert weights == pytest.approx([1 - left] * len(weights), rel=1e-5)


@on_ranks(2)
def test_states_convert_to_those_of_adamw_and_back(rank, size):
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


# --------------------------------------------------------------------------- what ranks have sent
# What each rank has sent of the momentum, from which it goes on.


@on_ranks(3)
def test_momentum_is_the_mean_of_what_ranks_have_sent(rank, size):
    """The mean of what ranks have sent is the momentum, also where the bucket is another one, as
    after the first step of DDP and after a checkpoint."""
    for codec in ("sign", "topk:0.02", "int4"):
        model, optimizer = make(codec, feedback="residual:storage=float32")
        for step in range(4):
            for name in ("big", "small") if step in (1, 2) else ():
                optimizer.compression.residuals[name].layouts = ["another", "another"]
            train(model, optimizer, rank, range(step, step + 1))
            own = optimizer.compression.own
            for name in ("big", "small"):
                mean = own[name].current("worker")
                dist.all_reduce(mean)
                momentum = optimizer.state[getattr(model.module, name)]["exp_avg"].reshape(-1)
                if codec != "int4":  # whose owner codes the mean once more
                    # Round-off of sums and of the residual that is taken out again.
                    torch.testing.assert_close(mean / size, momentum, rtol=1e-4, atol=1e-6)
                assert float((mean / size - momentum).norm() / momentum.norm()) < 0.3


@on_ranks(2)
def test_without_sent_values_ranks_use_the_momentum(rank, size):
    """After a state without what was sent, such as that of torch's AdamW, ranks go on from m."""
    (a, one), (b, two) = make("topk:1.0"), make("topk:1.0")
    train(a, one, rank, range(3))
    b.load_state_dict(a.state_dict())
    two.load_state_dict(deepcopy(one.state_dict()))
    before = two.state[b.module.big]["exp_avg"].clone()
    moment = two.compression.moments["big"]
    b({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
    # Round-off of a division and a multiplication.
    torch.testing.assert_close(b.module.big.grad, moment.beta * before, rtol=1e-5, atol=1e-7)
    two.zero_grad()
    b({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
    torch.testing.assert_close(b.module.big.grad, moment.beta * before, rtol=1e-5, atol=1e-7)


# -------------------------------------------------------------------------------------- agreement
# The share of the ranks' squares that belongs to their mean.


def project(matrix: torch.Tensor, begin: int, rows: int, step: int, to: torch.Tensor) -> None:
    """Add the random numbers of some rows of a matrix, as `CodedMoment` does."""
    first, stride, at = agreement.turn(begin, rows, step)
    size = matrix.shape[1]
    signs = agreement.signs_of(size, step, matrix.device)
    ones = torch.ones(len(matrix)), torch.ones(size)
    projections = signs, first, stride, to[at:]
    scaled.encode([scaled.Encoding(matrix, len(matrix), *ones, projections=projections)])


def measured(ranks: int, noise: float, steps: int, rows: int = 200, columns: int = 48) -> float:
    """Return the share over some steps of gradients with a common part of square 1."""
    generator = torch.Generator().manual_seed(ranks)
    of_mean = own = 0.0
    for step in range(steps):
        common = torch.randn(rows, columns, generator=generator)
        found = []
        for _ in range(ranks):
            gradient = common + noise * torch.randn(rows, columns, generator=generator)
            one = torch.zeros(agreement.ROWS)
            project(gradient, 0, rows, step, one)
            found.append(one)
        of_mean += float((sum(found) / ranks).square().sum())
        own += float(sum(one.square().sum() for one in found)) / ranks
    return agreement.share(of_mean, own, ranks)


@each_value
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.0, 1.0, 10.0])
def test_agreement_is_the_share_of_the_mean(ranks, noise):
    wanted = (1 + noise**2 / ranks) / (1 + noise**2)
    found = measured(ranks, noise, steps=60)
    if noise == 0:
        assert found == 1  # equal gradients have equal projections
    else:  # 60 steps of 50 rows or more: the standard deviation of a mean of squares is 0.026
        assert found == pytest.approx(wanted, rel=0.12)


def test_shards_have_the_projections_of_the_whole():
    whole, parts = torch.zeros(agreement.ROWS), torch.zeros(agreement.ROWS)
    gradient = torch.randint(-9, 10, (150, 30)).float()
    for step in range(4):
        project(gradient, 0, 150, step, whole)
        for begin in range(0, 150, 52):
            rows = gradient[begin : begin + 52]
            project(rows, begin, 150, step, parts)
    assert torch.equal(whole, parts)
    assert int(whole.count_nonzero()) >= 48


def test_every_row_has_its_turn():
    seen = torch.zeros(200)
    for step in range(4):  # 200 rows, 64 at most at once
        for row in range(200):
            gradient = torch.zeros(200, 8)
            gradient[row] = torch.arange(1.0, 9.0)
            found = torch.zeros(agreement.ROWS)
            project(gradient, 0, 200, step, found)
            seen[row] += float(found.abs().sum() > 0)
    assert bool((seen == 1).all())


def test_bounds():
    assert agreement.share(0.0, 0.0, 4) == 1  # nothing was measured yet
    assert agreement.share(1e-9, 1.0, 4) == 0.25
    assert agreement.share(2.0, 1.0, 4) == 1


# --------------------------------------------------------------------------------- steps stay small
# How far coded optimizers move values where gradients fade in some rows, or jump in one step.


def moves(optimizer: Any, model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Take a step, and return by how many learning rates the values of a matrix have moved."""
    parameter = model.module.big
    before = parameter.detach().clone()
    optimizer.zero_grad()
    model(given).backward()
    optimizer.step()
    kept = before * (1 - SIZES["lr"] * SIZES["weight_decay"])
    return (parameter.detach() - kept) / SIZES["lr"]


def with_faint_rows(rank: int, size: int, codec: str) -> float:
    """Return the most that a value moves in a step, while rows fade."""
    model, optimizer = make(codec, betas=(0.9, 0.8))
    most = 0.0
    for step in range(60):
        faint = gradients(rank, step)
        faint["big"][3:9] *= 0.5**step
        most = max(most, float(moves(optimizer, model, faint).abs().max()))
    return most


@pytest.mark.parametrize("codec", ["sign", EDEN])
def test_coding_errors_do_not_move_rows_of_faint_gradients(pool, codec):
    # Adam's coordinates move by a learning rate or two, and codes of one bit add some.
    assert max(pool.run(with_faint_rows, codec)) < 6


def with_a_jump(rank: int, size: int, codec: str, refresh: int) -> float:
    """Return how far the values move in all after a step whose gradients were 1000 times larger."""
    model, optimizer = make(codec, refresh=refresh)
    moved = []
    for step in range(30):
        given = gradients(rank, step)
        if step == 10:
            given = {name: 1000 * gradient for name, gradient in given.items()}
        moved.append(moves(optimizer, model, given))
    return float(sum(moved[10:]).square().mean().sqrt())


@pytest.mark.parametrize("codec", ["sign", "topk:0.05", "int4"])
def test_a_jump_of_the_gradients_moves_values_little(pool, codec):
    # Without a bound it is hundreds of learning rates.
    for refresh in (1, 16):
        assert max(pool.run(with_a_jump, codec, refresh)) < 6


def with_a_jump_in_shards(rank: int, size: int) -> float:
    """The same for shards of rows, of which the last rank's has padding."""
    model, optimizer = sharded.make(size)
    moved = []
    for step in range(30):
        given = sharded.gradients(rank, step)
        if step == 10:
            given = {name: 1000 * gradient for name, gradient in given.items()}
        before = sharded.values(model)[0]
        sharded.step(model, optimizer, given)
        kept = before * (1 - SIZES["lr"] * SIZES["weight_decay"])
        moved.append((sharded.values(model)[0] - kept) / SIZES["lr"])
    return float(sum(moved[10:]).square().mean().sqrt())


def test_a_jump_in_shards_moves_values_little(pool):
    assert max(pool.run(with_a_jump_in_shards, ranks=3)) < 6


def of_all_ranks(rank: int, size: int, which: str, refresh: int) -> list[list[torch.Tensor]]:
    """Finite gradients whose squares overflow, on one rank: in the first steps, and later."""
    found = []
    for bad in (0, 1, 9):
        if which == "sharded":
            model, optimizer = sharded.make(size, refresh=refresh)
        elif which == "adamw":
            model, optimizer = make(refresh=refresh)
        else:
            model = DistributedDataParallel(ddp.Chosen())
            optimizer = pycomm.CodedSGD(model.parameters(), 1e-3, model=model)
        for step in range(24):
            given = (sharded if which == "sharded" else ddp).gradients(rank, step)
            if step == bad and rank == 1:
                given["big"][3, 4] = 1e20
            optimizer.zero_grad()
            model(given).backward()
            optimizer.step()
        shared = ("row", "column", "moment_weight", "coding_error", "momentum_buffer")
        kept = [s[key] for s in optimizer.state.values() for key in shared if key in s]
        assert all(one.isfinite().all() for one in kept)
        found.append([*kept, *([] if which == "sharded" else values(model))])
        if which != "sgd":
            steps = [moment._steps for moment in optimizer.compression.moments.values()]
            found.append([torch.tensor(steps)])
    return found


@pytest.mark.parametrize("refresh", [1, 4])
@pytest.mark.parametrize("which", ["adamw", "sharded", "sgd"])
def test_overflowing_squares_leave_ranks_alike(pool, which, refresh):
    first, second = pool.run(of_all_ranks, which, refresh)
    for one, other in zip(first, second, strict=True):
        assert equal(one, other)
