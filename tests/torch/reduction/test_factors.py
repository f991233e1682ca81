"""Factors of rows and columns: each keeps its precision, and nothing that is owed is lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.feedback.storage import powers
from pycomm.reduction.factors import Factors, Matrix
from tests.torch import harness
from tests.torch.elastic.member import on_members
from tests.torch.harness import Chosen, alike, all_equal, equal, gradients, on_both, reduced
from tests.torch.pool import on_ranks

SHAPES: Mapping[str, tuple[int, ...]] = {"big": (48, 96), "kernel": (32, 16, 3, 3), "bias": (50,)}
CODED = ("big", "kernel")
OFF = " factors=off"


def heights(name: str) -> torch.Tensor:
    """Return the sizes of a parameter's rows, over two decimal powers."""
    return 10.0 ** torch.linspace(1, -1, SHAPES[name][0])[:, None]


def sizes(name: str, turned: bool = False) -> torch.Tensor:
    """Return the sizes of a parameter's columns, over five decimal powers."""
    exponents = torch.linspace(-3, 2, torch.Size(SHAPES[name][1:]).numel())
    return 10.0 ** (exponents.flip(0) if turned else exponents)


def unequal(rank: int, step: int, *, turned: bool = False) -> dict[str, torch.Tensor]:
    """Return gradients whose rows and columns differ in size."""
    found = gradients(rank, step, shapes=SHAPES)
    for name in CODED:
        flat = found[name].view(len(found[name]), -1)
        found[name] = (flat * sizes(name, turned) * heights(name)).view_as(found[name])
    return found


def mean(size: int, step: int, **how: bool) -> dict[str, torch.Tensor]:
    """Return the mean of all ranks' gradients."""
    given = [unequal(rank, step, **how) for rank in range(size)]
    return {name: sum(one[name] for one in given) / size for name in SHAPES}


def wrapped(codec: str, feedback: Any = True, **options: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(Chosen(SHAPES), **{"bucket_cap_mb": 0.02, **options})
    return model, pycomm.compress(model, codec, feedback=feedback)


def worst(got: dict[str, torch.Tensor], step: int, ranks: int) -> float:
    """Return the largest relative error of a row or column of the average."""
    errors, want = [], mean(ranks, step)
    for name in CODED:
        exact, found = (x.view(len(x), -1) for x in (want[name], got[name]))
        exact, found = (x / sizes(name) / heights(name) for x in (exact, found))
        for dim in (0, 1):
            errors.append(((found - exact).norm(dim=dim) / exact.norm(dim=dim)).max())
    return float(max(errors))


@on_ranks(2)
@pytest.mark.parametrize(
    ("codec", "bound"), [("int8", 0.03), ("int4", 0.45), ("eden:bits=4", 0.35), ("sign", 1.4)]
)
def test_rows_and_columns_keep_their_precision(rank, size, codec, bound):
    model, state = wrapped(codec, feedback=False)
    plain, _ = wrapped(codec + OFF, feedback=False)
    for step in range(3):
        got, without = (reduced(m, unequal(rank, step)) for m in (model, plain))
    assert worst(got, 2, size) < bound
    assert worst(without, 2, size) > 2 * bound
    assert "rows or columns differ" in state.summary()
    assert "big" in state.summary()


def steps(rank: int, size: int, codec: str, feedback: str) -> list[Any]:
    """Return results, residuals and factors of steps in which the columns change their sizes."""
    model, state = wrapped(codec, feedback)
    found: list[Any] = []
    for step in range(10):
        got = reduced(model, unequal(rank, step, turned=step in (2, 3, 4)))
        state.settle()
        found += [got, {name: one.clone() for name, one in state.reducer.factors.current.items()}]
    assert not equal(found[5], found[-1])
    return [found, state.residual_norms(), state.reducer.factors.current]


def same_but_for_residuals(results: list[Any]) -> None:
    all_equal([[found, factors] for found, _, factors in results])


@on_both(2, then=same_but_for_residuals)
@pytest.mark.parametrize("feedback", ["residual:storage=float32", "decay:0.8,storage=int8"])
@pytest.mark.parametrize("codec", ["int8", "nvfp4", "topk:0.1", "multiples"])
def test_all_carriers_have_the_same_bits(rank, size, codec, feedback):
    return steps(rank, size, codec, feedback)


@on_ranks(3, then=same_but_for_residuals)
@pytest.mark.parametrize("codec", ["int4", "mxfp4"])
def test_three_ranks_have_the_same_factors(rank, size, codec):
    return steps(rank, size, codec, "residual")


def factor(state: Any, name: str) -> torch.Tensor:
    """Return the factor of each value of a parameter, [rows, columns]."""
    rows = SHAPES[name][0]
    exponents = state.reducer.factors.current[name]
    return powers(exponents[:rows])[:, None] * powers(exponents[rows:])


def owed(state: Any, name: str) -> torch.Tensor:
    """Return what all ranks' residuals are as a part of the average, in units of the gradients."""
    state.settle()
    mine = state.residuals.added(name, 0, torch.Size(SHAPES[name]).numel()).double()
    if name in state.reducer.factors.current:
        mine = (mine.view(len(factor(state, name)), -1) * factor(state, name)).view(-1)
    dist.all_reduce(mine)
    return mine


@on_ranks(2)
@pytest.mark.parametrize(
    "codec",
    [
        "int8",
        "int4",
        "int4:rounding=stochastic",
        "mxfp4",
        "nvfp4",
        "sign",
        "eden:bits=2",
        "topk:0.05",
    ],
)
def test_no_step_is_spoilt_when_factors_come(rank, size, codec):
    """What was left over before them is not of the size of many gradients."""
    assert max(errors(rank, size, codec, codec)) < 1.5


@on_ranks(2)
@pytest.mark.parametrize("codec", ["sign", "int4:rounding=stochastic"])
def test_a_codec_is_not_spoilt_by_what_another_one_left(rank, size, codec):
    assert max(errors(rank, size, codec, "int8")[2:]) < 0.1


def errors(rank: int, size: int, codec: str, later: str) -> list[float]:
    """Return the relative error of each of four steps, of which the first has its own codec."""
    model, state = wrapped(codec)
    shape = SHAPES["big"]
    columns = 2.0 ** torch.linspace(-10, 10, torch.Size(shape[1:]).numel()).view(shape[1:])
    found = []
    for step in range(4):
        ours = gradients(rank, step, shapes=SHAPES)
        want = harness.mean(size, step, shapes=SHAPES)["big"] * columns
        got = reduced(model, ours | {"big": ours["big"] * columns})["big"]
        found.append(float((got - want).norm() / want.norm()))
        if later != codec:
            state.set_policy(later)
    return found


@on_ranks(2)
@pytest.mark.parametrize(("storage", "tolerance"), [("float32", 1e-5), ("int8", 2.0)])
def test_a_change_of_factors_loses_nothing(rank, size, storage, tolerance):
    """Residuals in int8 lose small columns while the factors are still those of other sizes; in
    wrong units a residual would be off by a hundred."""
    model, state = wrapped("int4", f"residual:storage={storage}")
    missing = {name: torch.zeros(SHAPES[name]).double() for name in CODED}
    seen = []
    for step in range(10):
        turned = step in (2, 3, 4)
        got = reduced(model, unequal(rank, step, turned=turned))
        seen.append(state.reducer.factors.current.get("big"))
        want = mean(size, step, turned=turned)
        for name in CODED:
            missing[name] += want[name].double() - got[name]
    assert seen[0] is None
    assert not torch.equal(seen[1], seen[-1])
    for name in CODED:
        off = (owed(state, name) - missing[name].view(-1)).view(-1, len(sizes(name)))
        off /= heights(name)
        # Against the largest that each column has had.
        most = torch.maximum(sizes(name), sizes(name, turned=True))
        lost = float((off.abs().amax(0) / most).max())
        assert lost < tolerance, lost


@on_ranks(2)
def test_residual_norms_are_in_units_of_gradients(rank, size):
    model, state = wrapped("int4", "residual:storage=float32")
    for step in range(3):
        reduced(model, unequal(rank, step))
    state.settle()
    residual = state.residuals["big"]
    real = residual.current("worker").view(-1, 96) * factor(state, "big")
    assert state.residual_norms()["big"][0] == float(real.norm())
    assert float(real.norm()) != float(residual.current("worker").norm())


@on_ranks(2)
@pytest.mark.parametrize("codec", ["int8", "topk:0.1"])
def test_what_is_even_is_coded_as_it_is(rank, size, codec):
    (model, state), (plain, _) = wrapped(codec), wrapped(codec + OFF)
    for step in range(5):
        given = gradients(rank, step, shapes=SHAPES)
        assert equal(reduced(model, given), reduced(plain, given))
    assert not state.reducer.factors.current


@on_ranks(2)
def test_sparse_codecs_get_no_factors_of_rows(rank, size):
    model, state = wrapped("topk:0.1 4:int8")
    for step in range(3):
        reduced(model, unequal(rank, step))
    rows = SHAPES["big"][0]
    exponents = state.reducer.factors.current["big"]
    assert exponents[rows:].any()
    assert not exponents[:rows].any()
    reduced(model, unequal(rank, 3))
    assert torch.equal(state.reducer.factors.current["big"][rows:], exponents[rows:])
    assert state.reducer.factors.current["big"][:rows].any()


@on_ranks(2)
def test_an_overflow_leaves_factors_as_they_were(rank, size):
    model, state = wrapped("int8")
    bad = unequal(rank, 0)
    if rank == 1:
        bad["big"][0, 0] = float("inf")
    reduced(model, bad)  # step 1, a look
    reduced(model, unequal(rank, 1))
    assert set(state.reducer.factors.current) == {"kernel"}
    reduced(model, unequal(rank, 2))
    before = dict(state.reducer.factors.current)
    assert set(before) == set(CODED)
    for _ in range(6):  # the steps 4 to 9, in which are two looks
        reduced(model, bad)
    assert equal(before["big"], state.reducer.factors.current["big"])
    state.settle()
    assert state.overflows == 7


@on_ranks(2)
@pytest.mark.parametrize("feedback", ["residual:storage=int8", "residual:storage=float32"])
@pytest.mark.parametrize("saved_after", [1, 3, 4])
def test_a_loaded_state_goes_on_to_the_bit(rank, size, feedback, saved_after):
    calm = {"find_unused_parameters": True}  # without rebuilt buckets after the first step
    model, state = wrapped("int4", feedback, **calm)
    for step in range(saved_after):
        reduced(model, unequal(rank, step))
    saved = state.state_dict()
    again, loaded = wrapped("int4", feedback, **calm)
    loaded.load_state_dict(saved)
    for step in range(saved_after, 9):
        given = unequal(rank, step, turned=step < 5)
        assert equal(reduced(model, given), reduced(again, given)), step
    assert equal(state.reducer.factors.current, loaded.reducer.factors.current)


def saved_by(rank: int, size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model, state = wrapped("int4", "residual:storage=float32")
    for step in range(3):
        reduced(model, unequal(rank, step))
    return state.state_dict(), {name: owed(state, name) for name in CODED}


def load_of_three(rank: int, size: int, states: list[Any], debts: dict[str, torch.Tensor]) -> None:
    _, state = wrapped("int4", "residual:storage=float32")
    state.load_state_dict(*states)
    for name, debt in debts.items():
        torch.testing.assert_close(owed(state, name), debt, rtol=1e-4, atol=1e-7)


def test_other_numbers_of_ranks_owe_the_same(pool):
    saved = pool.run(saved_by, ranks=3)
    pool.run(load_of_three, [state for state, _ in saved], saved[0][1], ranks=2)


@on_ranks(2)
def test_a_parameter_that_thaws_gets_factors(rank, size):
    model, state = wrapped("int8", feedback=False, find_unused_parameters=True)
    model.module.kernel.requires_grad_(False)
    for step in range(3):
        reduced(model, unequal(rank, step))
    assert set(state.reducer.factors.current) == {"big"}
    model.module.kernel.requires_grad_(True)
    for step in range(3, 5):
        got = reduced(model, unequal(rank, step))
    assert set(state.reducer.factors.current) == set(CODED)
    assert worst(got, 4, size) < 0.1


@on_ranks(2)
def test_an_exact_codec_takes_real_units(rank, size):
    model, state = wrapped("int4", "residual:storage=float32")
    for step in range(3):
        reduced(model, unequal(rank, step))
    debt = {name: owed(state, name) for name in CODED}
    state.set_policy("fp32")
    got = reduced(model, unequal(rank, 3))
    assert not state.reducer.factors.current
    exact = mean(size, 3)
    for name in CODED:
        want = exact[name].view(-1) + debt[name]
        torch.testing.assert_close(got[name].view(-1).double(), want, rtol=1e-5, atol=1e-5)
    state.set_policy("int4")
    reduced(model, unequal(rank, 4))
    assert set(state.reducer.factors.current) == set(CODED)


@on_ranks()
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_have_the_factors_of_ddp(rank, size, backend):
    """Those of FSDP2; on four ranks two replicas have the same ones."""
    model, state = wrapped("int8", feedback=False)
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = fully_shard(Chosen(SHAPES), mesh=mesh if size > 2 else mesh["shard"])
    there = pycomm.compress(sharded, "int8", feedback=False)
    for step in range(3):
        reduced(model, unequal(rank, step))
        got = reduced(sharded, unequal(rank, step))
    assert set(there.reducer.factors.current) == set(CODED)
    if size == 2:
        assert equal(state.reducer.factors.current, there.reducer.factors.current)
    assert alike(*there.reducer.factors.current.values())
    assert worst(got, 2, size) < (0.03 if size == 2 else 0.05)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float16_gradients_get_no_factors(rank, size, dtype):
    model = DistributedDataParallel(Chosen(SHAPES).to(dtype))
    state = pycomm.compress(model, "int8")
    for step in range(3):
        reduced(model, {name: g.to(dtype) for name, g in unequal(rank, step).items()})
    assert set(state.reducer.factors.current) == (set(CODED) if dtype == torch.bfloat16 else set())


@on_ranks(2)
def test_float16_has_no_factors_not_even_loaded_ones(rank, size):
    model, state = wrapped("int4", "residual:storage=float32")
    for step in range(3):
        reduced(model, unequal(rank, step))
    owing = {name: owed(state, name) for name in CODED}
    half = DistributedDataParallel(Chosen(SHAPES).half(), bucket_cap_mb=0.02)
    fresh = pycomm.compress(half, "int4", feedback="residual:storage=float32")
    fresh.load_state_dict(state.state_dict())
    assert set(fresh.reducer.factors.current) == set(CODED)
    sent = {name: g.half() for name, g in gradients(rank, 3, shapes=SHAPES).items()}
    got = reduced(half, sent)
    assert fresh.reducer.factors.current == {}
    exact = harness.mean(size, 3, shapes=SHAPES)
    for name in CODED:
        total = got[name].view(-1).double() + owed(fresh, name)
        want = exact[name].view(-1) + owing[name]
        torch.testing.assert_close(total, want, rtol=2e-2, atol=2e-2)


@on_members(3)
def test_a_new_member_has_the_factors_of_the_others(rank, member, handles):
    """Three train; the second leaves, and the columns change; it comes back as a new one."""
    model, state = wrapped("int4", "residual:storage=float32")
    for step in range(3):
        reduced(model, unequal(rank, step))
    before = dict(state.reducer.factors.current)
    if rank != 1:
        member.form(2, [handles[0], handles[2]])
        for step in (3, 4):
            reduced(model, unequal(rank, step, turned=True))
        state.settle()
        reduced(model, unequal(rank, 5, turned=True))
        assert not equal(before, state.reducer.factors.current)
        debts = {name: owed(state, name) for name in CODED}
    member.form(3, [handles[2], handles[1], handles[0]])
    model, fresh = wrapped("int4", "residual:storage=float32")
    fresh.adopt_state(None if rank == 1 else state)
    assert alike(*fresh.reducer.factors.current.values())
    assert set(fresh.reducer.factors.current) == set(CODED)
    now = {}
    for name in CODED:
        fresh.residuals.get(name, torch.Size(SHAPES[name]).numel(), torch.device("cpu"))
        now[name] = owed(fresh, name)
    if rank != 1:
        for name, debt in debts.items():
            torch.testing.assert_close(now[name], debt, rtol=1e-4, atol=1e-6)
    got = reduced(model, unequal(rank, 6))
    assert alike(*got.values(), *fresh.reducer.factors.current.values())


# ------------------------------------------------------------------- without ranks


def test_powers_of_two_are_exact():
    exponents = torch.arange(-100, 101)
    assert torch.equal(powers(exponents).double(), 2.0 ** exponents.double())


MATRIX = Matrix(4, 10, slice(0, 4), slice(0, 4))


def decided(factors: Factors, *columns: float) -> list[int]:
    """Return the exponents of ten columns, of which the last have these mean squares."""
    rest = [1.0] * (10 - len(columns))
    factors._means["w"] = torch.tensor([1.0] * 4 + rest + list(columns), dtype=torch.double)
    factors._decided["w"] = factors._decide("w", MATRIX)
    assert not factors._decided["w"][: 4 + len(rest)].any()
    return factors._decided["w"][4 + len(rest) :].tolist()


def test_a_column_near_a_border_keeps_its_factor():
    factors = Factors()
    for size, want in ((0.8, 1), (0.4, 1), (0.3, 1), (0.2, 0), (0.7, 0), (0.8, 1)):
        assert decided(factors, 4.0**4, 4.0**size) == [4, want], size


def test_columns_within_a_factor_of_four_are_alike():
    assert decided(Factors(), 4.0**2, 4.0**-2) == [2, -2]
    assert decided(Factors(), 4.0**2) == [0]
    assert decided(Factors(), 4.0**5, 0.0) == [5, 0]  # and so are those without gradients
