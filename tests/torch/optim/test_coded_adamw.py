"""CodedAdamW, in DDP and FSDP2, against the formula in plain torch; what bounds its steps."""

from __future__ import annotations

import ctypes
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import _C
from pycomm.feedback import storage
from tests.torch.harness import Chosen, all_equal, equal, values, whole
from tests.torch.optim import table
from tests.torch.optim.plain_moment import PlainRanks, shortened
from tests.torch.optim.table import CALM, SHAPES, gradients, integers, named, train
from tests.torch.pool import on_ranks

SIZES: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SIZES_OF_SGD: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
EDEN = "eden:bits=1,scale=mmse"
UNIT = 0.01  # so that no parameter is 0
EXACTLY = "residual:storage=float32"
# Shards of two ranks end where a block or chunk of 4096 values ends.
EVEN = {"big": (64, 128), "wide": (32, 256), "bias": (50,)}
SENT_AS_IT_IS = "topk:0.05,indices=int12"


def make(codec: Any = "sign", which: str = "adamw", **options: Any) -> tuple[Any, Any]:
    model = table.wrap(which, table.net(), bucket_cap_mb=0.02)
    sizes = SIZES_OF_SGD if which.startswith("sgd") else SIZES
    return model, table.coded(which, model, codec=codec, **{**sizes, **options})


# ---------------------------------------------------------------- the formula


@on_ranks(then=all_equal)
@pytest.mark.parametrize(
    ("which", "ranks"),
    [(which, n) for which in ("adamw", "adamw on shards", "sgd", "sgd on shards") for n in (2, 3)],
)
@pytest.mark.parametrize("codec", ["sign", "topk:0.02"])
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_step_is_that_of_the_formula(rank, size, which, codec):
    model, optimizer = make(codec, which, refresh=1, feedback=EXACTLY)
    shards = size if which.endswith("on shards") else 1
    settings = dict(SIZES_OF_SGD if which.startswith("sgd") else {**SIZES, "eps": 1e-8})
    plain = {
        n: PlainRanks(whole(named(model)[n]).detach(), size, codec, settings, shards)
        for n in ("big", "small")
    }
    for number in range(6):
        if "momentum" in settings and number == 3:  # as a schedule changes it
            optimizer.param_groups[0]["momentum"] = settings["momentum"] = 0.5
        table.step(model, optimizer, gradients(rank, number))
        for name, reference in plain.items():
            reference.step([gradients(r, number)[name] for r in range(size)])
            here = named(model)[name]
            # Round-off of float32 in another order, times the steps. A sign that round-off turns
            # would be an error of a thousand times that.
            torch.testing.assert_close(whole(here), reference.x, rtol=1e-4, atol=2e-6)
            torch.testing.assert_close(whole(here.grad), reference.m, rtol=1e-4, atol=1e-5)
    return values(model)


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


@on_ranks(2)
@pytest.mark.parametrize(
    ("which", "codec", "alike"),
    [
        ("adamw on replicas", "sign", False),
        # Of a codec that sends values as they are: else what was sent is known to round-off.
        ("adamw on shards", SENT_AS_IT_IS, True),
    ],
)
def test_replicas_and_shards_of_equal_gradients_have_the_bits_of_ddp(
    rank, size, which, codec, alike
):
    models = [table.wrap(row, Chosen(EVEN, UNIT)) for row in ("adamw", which)]
    options = {**SIZES, "codec": codec, "feedback": EXACTLY, "refresh": 2}
    one, two = (table.coded(which, model, **options) for model in models)
    a, b = models
    for number in range(5):
        given = integers(0 if alike else rank, number, EVEN)
        table.step(a, one, given)
        table.step(b, two, given)
    assert equal(values(a), values(b))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        for key, value in one.state[p].items():
            there = whole(two.state[q][key])
            # The errors are added up in another order.
            assert torch.equal(value, there) or key == "coding_error", key


@on_ranks(4)
def test_replicas_of_shards_have_the_bits_of_ddp(rank, size):
    """Two replicas with one gradient each are DDP on two ranks."""
    group = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    model = table.wrap("adamw on replicas of shards", Chosen(EVEN, UNIT))
    plain = DistributedDataParallel(Chosen(EVEN, UNIT), process_group=group, **CALM)
    options = {**SIZES, "feedback": EXACTLY, "refresh": 2}
    optimizers = [table.coded("adamw", one, **options) for one in (model, plain)]
    for number in range(4):
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            table.step(one, optimizer, integers(rank // 2, number, EVEN))
    assert equal(values(model), values(plain))


def trained(rank: int, size: int, codec: Any, steps: int = 4) -> list[torch.Tensor]:
    model, optimizer = make(codec)
    train(model, optimizer, rank, range(steps))
    singles = [b.single for b in optimizer.compression.reducer.buckets.values() if b.single]
    modes = {single.gathers for single in singles}
    return [*values(model), torch.tensor(sorted(modes))]


@pytest.mark.parametrize(
    ("codec", "ranks", "gathers"),
    [
        ("sign", 1, []),
        ("sign", 3, [True]),
        ("topk:0.05", 4, [False]),
        ("eden:bits=1,scale=mmse", 2, [True]),
        # Two payloads of 3.5 bits are less than one and an answer of 4.25; four are not.
        ("quant:bits=3", 2, [True]),
        ("quant:bits=3", 4, [False]),
        ("int4", 2, []),
    ],
)
def test_ranks_have_the_same_bits(pool, codec, ranks, gathers):
    """Also where few ranks gather the payloads that are coded once, or many ask their owners."""
    results = [pool.run(trained, codec, ranks=ranks, backend=b) for b in ("pycomm", "gloo")]
    for backend in results:
        assert all(equal(result, backend[0]) for result in backend)
        assert backend[0][-1].tolist() == gathers
    if ranks <= 2:  # the sum of more numbers depends on the order in which a backend adds them
        assert equal(results[0][0], results[1][0])


def in_python(rank: int, size: int, codec: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Code by C++ a bucket at a time, then through the tensor interface."""
    from pycomm.reduction import two_shot

    native = trained(rank, size, codec)
    with patch.object(two_shot, "find", lambda op, plan, *_, **__: plan()):
        return native, trained(rank, size, codec)


@pytest.mark.parametrize("ranks", [2, 4])
def test_both_ways_of_coding_a_bucket_write_the_same_bits(pool, ranks):
    for codec in ("int2", "sign"):
        for native, python in pool.run(in_python, codec, ranks=ranks, backend="gloo"):
            assert equal(native, python)


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
    moments = optimizer.momenta.moments.values()
    weights = [float(moment.state["moment_weight"]) for moment in moments]
    assert weights == pytest.approx([1 - left] * len(weights), rel=1e-5)


@on_ranks(2)
def test_sent_values_of_large_parameters_use_8_bits(rank, size):
    model = fully_shard(Chosen({"big": (512, 256), "bias": (9,)}))
    optimizer = pycomm.CodedAdamW(model.parameters(), model=model, **SIZES)
    generator = torch.Generator().manual_seed(rank)
    given = {"big": torch.randn(512, 256, generator=generator), "bias": torch.zeros(9)}
    for _ in range(2):
        table.step(model, optimizer, given)
    sent = optimizer.momenta.own["big"].worker[0]
    assert torch.equal(whole(model.big).isfinite(), torch.ones(512, 256, dtype=torch.bool))
    assert optimizer.compression.residual_bytes == 4 * sent.numel() * sent.element_size()
    assert sent.nbytes == storage.count("int8", 256 * 256, 2)


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
            own = optimizer.momenta.own
            for name in ("big", "small"):
                mean = own[name].current("worker")
                dist.all_reduce(mean)
                momentum = optimizer.state[named(model)[name]]["exp_avg"].reshape(-1)
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
    moment = two.momenta.moments["big"]
    beta = shortened(moment.momentum, float(moment.state["coding_error"]))
    b({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
    # Round-off of a division and a multiplication.
    torch.testing.assert_close(b.module.big.grad, beta * before, rtol=1e-5, atol=1e-7)
    two.zero_grad()
    b({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
    torch.testing.assert_close(b.module.big.grad, beta * before, rtol=1e-5, atol=1e-7)


# --------------------------------------------------------------------------------- steps stay small
# How far coded optimizers move values where gradients fade in some rows, or jump in one step.


def moves(optimizer: Any, model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Take a step, and return by how many learning rates the values of a matrix have moved."""
    before = values(model)[0]
    table.step(model, optimizer, given)
    kept = before * (1 - SIZES["lr"] * SIZES["weight_decay"])
    return (values(model)[0] - kept) / SIZES["lr"]


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


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("which", ["adamw", "adamw on shards"])
def test_columns_that_are_small_in_all_steps_move(rank, size, which):
    """As those of features in small units. Columns with a gradient now and then move less."""
    model, optimizer = make("sign", which)
    before = whole(named(model)["big"]).clone()
    for step in range(200):
        given = {name: torch.ones(shape) for name, shape in SHAPES.items()}
        given["big"][:, 5] = 1e-3
        given["big"][:, 6] = 1e-2 * (step % 100 == 0)
        table.step(model, optimizer, given)
    moved = (whole(named(model)["big"]) - before).abs().mean(0)
    assert moved[5] > 0.5 * moved[0]
    assert moved[6] < 0.1 * moved[0]
    return values(model)


def with_a_jump(rank: int, size: int, codec: str, which: str, refresh: int) -> float:
    """Return how far the values move in all after a step whose gradients were 1000 times larger."""
    model, optimizer = make(codec, which, refresh=refresh)
    moved = [
        moves(optimizer, model, gradients(rank, number, scale=1000 if number == 10 else 1))
        for number in range(30)
    ]
    return float(sum(moved[10:]).square().mean().sqrt())


@pytest.mark.parametrize("codec", ["sign", "topk:0.05", "int4"])
def test_a_jump_of_the_gradients_moves_values_little(pool, codec):
    # Without a bound it is hundreds of learning rates.
    for refresh in (1, 16):
        assert max(pool.run(with_a_jump, codec, "adamw", refresh)) < 6


def test_a_jump_in_shards_moves_values_little(pool):
    """Of shards of rows, of which the last rank's has padding."""
    assert max(pool.run(with_a_jump, "sign", "adamw on shards", 0, ranks=3)) < 6


def of_all_ranks(rank: int, size: int, which: str, refresh: int) -> list[list[torch.Tensor]]:
    """Finite gradients whose squares overflow, on one rank: in the first steps, and later."""
    found = []
    for bad in (0, 1, 9):
        model, optimizer = table.make(which, lr=1e-2, refresh=refresh)
        for number in range(24):
            given = gradients(rank, number)
            if number == bad and rank == 1:
                given["big"][3, 4] = 1e20
            table.step(model, optimizer, given)
        shared = ("row", "column", "moment_weight", "coding_error", "momentum_buffer")
        kept = [whole(s[key]) for s in optimizer.state.values() for key in shared if key in s]
        assert all(one.isfinite().all() for one in kept)
        found.append([*kept, *values(model)])
        found.append([moment.numbers[4] for moment in optimizer.momenta.moments.values()])
    return found


@pytest.mark.parametrize("refresh", [1, 4])
@pytest.mark.parametrize("which", ["adamw", "adamw on shards", "sgd", "sgd on shards"])
def test_overflowing_squares_leave_ranks_alike(pool, which, refresh):
    first, second = pool.run(of_all_ranks, which, refresh)
    for one, other in zip(first, second, strict=True):
        assert equal(one, other)


# ---------------------------------------------------------------- threads


def stepped(threads: int) -> list[torch.Tensor]:
    arrays = [torch.linspace(0.1, 1, 1 << 20) for _ in range(4)] + [torch.zeros(1)]
    tensor = (*(array.data_ptr() for array in arrays), 1 << 20)
    _C.adamw_step(True, [tensor], 0.1, 0.9, 0.99, 1e-8, 0.01, threads)
    return arrays


def test_a_step_takes_as_many_threads_as_there_are():
    """The stack of a thread takes half of all addresses, so that there is no second one."""
    libc, want = ctypes.CDLL(None), stepped(1)
    usual, half = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
    for attributes in (usual, half):
        libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_setstacksize(half, ctypes.c_size_t(1 << 46))
    libc.pthread_setattr_default_np(half)
    try:
        got = stepped(4)
    finally:
        libc.pthread_setattr_default_np(usual)
    assert all(map(torch.equal, got, want))
