"""Passes over moments on the CPU: the bits of their definition in torch, and float64's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pycomm  # noqa: E402
from pycomm.feedback import Feedback, Residual, storage  # noqa: E402
from pycomm.momentum.job import Job  # noqa: E402
from pycomm.momentum.kernels import Kernels  # noqa: E402
from pycomm.momentum.moment import BOUND, LIMIT, AdamWMoment  # noqa: E402
from pycomm.momentum.passes import DTYPES, Passes  # noqa: E402
from pycomm.momentum.table import Table  # noqa: E402
from pycomm.reduction.bucket import BucketPiece  # noqa: E402
from tests.extent import each_value  # noqa: E402
from tests.torch.optim.followed import KINDS, ByDefinition, ByPasses, differing  # noqa: E402
from tests.torch.optim.plain_moment import column_sums  # noqa: E402

SHAPES = [(1, 1), (3, 5), (64, 16), (65, 33), (7, 1000), (700, 31), (129, 1100)]
FORMS = ("float32", "bf16", "int8")
CPU = Kernels(torch.device("cpu"))
STEPS, DECAY = 4, slice(8, 10)  # of Numbers


def given(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    made = {n: torch.randn(rows, columns, generator=generator) for n in ("x", "g", "m", "e")}
    made["row"] = torch.rand(rows, generator=generator) + 0.5
    made["column"] = torch.rand(columns, generator=generator) + 0.5
    made["column"] *= made["row"].sum() / made["column"].sum()
    return made


def near(found: torch.Tensor, want: torch.Tensor) -> bool:
    # A few roundings of float32; sums have at most a thousand terms of the same sign.
    return torch.allclose(found.double(), want, rtol=1e-5, atol=1e-6)


def stored(values: torch.Tensor, form: str) -> torch.Tensor:
    to = storage.zeros(form, values.numel(), values.device)
    storage.store(values.reshape(-1), to)
    return to


class One:
    """A matrix with second moments, alone in a bucket, before a step.

    Args:
        a: what `given` returns.
        weight: of the second moments.
        eps: of the optimizer.
        betas: likewise.
    """

    def __init__(
        self, a: dict[str, torch.Tensor], weight: float = 0.5, *, eps: float = 1e-3, **group: Any
    ) -> None:
        self.a = a
        settings = {"betas": (0.75, 0.9), "eps": eps} | group
        parameter = torch.nn.Parameter(a["x"].clone())
        self.moment = AdamWMoment(parameter, settings, {}, pycomm.codec("sign"))
        self.moment.start()
        state = self.moment.state
        for key, value in (("exp_avg", a["m"]), ("row", a["row"]), ("column", a["column"])):
            state[key].copy_(value)
        state["moment_weight"].fill_(weight)
        state["coding_error"].fill_(0.0)
        state["mean_energy"].fill_(1.0)
        state["own_energy"].fill_(1.0)
        self.passes = Passes(CPU)
        numel, rule = a["g"].numel(), Feedback("residual", storage="float32")
        self.e, self.o = (Residual(rule, numel, torch.device("cpu")) for _ in "eo")
        storage.store(a["e"].view(-1), self.e.stored_worker())
        self.bucket = a["g"].reshape(-1).clone()
        self.moment.begin()
        self.passes.refresh([self.moment])

    def job(self, unit: float = 1.0, **options: Any) -> Job:
        moment = self.moment
        piece = BucketPiece("", 0, self.bucket.numel(), moment.codec, 0, self.e)
        table = Table(CPU, [(moment, piece)], [self.o])
        how = {"looks": True, "divides": True} | options
        return Job(self.passes, table, self.bucket, unit=unit, ranks=1, **how)

    def d(self, eps: float = 0.0) -> torch.Tensor:
        """The roots of the second moments, float64; no floor is reached."""
        row, column = (self.a[key].double() for key in ("row", "column"))
        weight, (rows, columns) = float(self.moment.state["moment_weight"]), self.a["g"].shape
        least = weight * max(eps, 1e-12 if eps else 0.0) ** 2
        row, column = row + least * columns, column + least * rows
        return (torch.outer(row, column) / column.sum() / weight).sqrt()

    def factors(self) -> torch.Tensor:
        """Those of the next coding."""
        rows, columns = self.a["g"].shape
        begin = len(self.moment.numbers) + 2 * self.moment.sums_numel
        row, column = torch.split(self.moment.room[begin : begin + rows + columns], [rows, columns])
        return torch.outer(row, column)

    def fold(self, sums: torch.Tensor, waiting: int = 0) -> None:
        """Take a step with sums of `waiting` more steps."""
        self.moment.numbers[STEPS] = waiting
        decay = self.moment.settings["betas"][1] ** waiting
        self.moment.numbers[DECAY].view(torch.float64).fill_(decay)
        self.passes.commit([self.moment], sums, 1, lambda one: True)

    def step(self, gradient: torch.Tensor, lr: float = 0.1, weight_decay: float = 0.5) -> None:
        self.moment.parameter.grad = gradient.clone()
        self.passes.move([self.moment], [self.moment], lr, weight_decay)


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shards", "scatters"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_have_the_bits_of_their_definition(form, dtype, shards, scatters, kind):
    how = form, dtype, shards, scatters, kind
    assert not differing(ByPasses(CPU, *how), ByDefinition(*how))


@torch.no_grad()
def test_threads_change_no_bits():
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        one = One(given(1037, 1031))
        job = one.job()
        job.encode()
        found.append([one.bucket.clone(), one.moment.room.clone()])
        job.sent()
        job.land()
        one.step(one.bucket.view(1037, 1031))
        found[-1] += [one.bucket, one.o.fresh_worker(), one.moment.parameter]
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@torch.no_grad()
def test_shards_add_to_the_same_sums_in_order():
    """Threads take shards of one matrix, all of which add to its columns' sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    rows, columns, shards = 4096, 512, 4
    moment = AdamWMoment(
        torch.nn.Parameter(torch.zeros(rows, columns)),
        {"betas": (0.75, 0.9), "eps": 1e-8},
        {},
        pycomm.codec("sign"),
        shards=shards,
    )
    gradient = torch.randn(shards, rows // shards, columns)
    bucket = gradient.view(shards, -1).clone()
    piece = BucketPiece("", 0, bucket.shape[1], moment.codec, 0, None)
    for _ in range(5):
        moment.begin()
        table = Table(CPU, [(moment, piece)], None, *bucket.shape)
        how: dict[str, Any] = {"unit": 1.0, "ranks": 1, "looks": True, "divides": True}
        Job(Passes(CPU), table, bucket, **how).encode(scale=lambda new: None)
        found = moment.room[len(moment.numbers) + rows :][:columns]
        want = torch.zeros(columns)
        for shard in gradient:
            want += column_sums(shard * shard)
        assert torch.equal(found, want)
        bucket.copy_(gradient.view(shards, -1))
    torch.set_num_threads(before)


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@torch.no_grad()
def test_passes_are_their_formulas(rows, columns):
    a = given(rows, columns)
    wide = {key: value.double() for key, value in a.items()}
    # Second moments so large that no gradient is above the bound.
    one = One({**a, "row": a["row"] * 1e6, "column": a["column"] * 1e6})
    d = one.d()
    assert near(one.factors() / d.float(), torch.ones(rows, columns).double())
    job = one.job(unit=2.0)
    job.encode()
    coded = one.bucket.view(rows, columns).clone()
    want = (0.75 * wide["m"] + 0.25 * 0.5 * wide["g"]) / d
    assert torch.allclose(coded.double() * d, want * d, rtol=1e-5, atol=1e-6)
    fresh = one.moment.room[len(one.moment.numbers) :][: one.moment.sums_numel]
    squares = 0.25 * wide["g"].square()
    assert near(fresh[:rows], squares.sum(1))
    assert near(fresh[rows : rows + columns], squares.sum(0))
    e = wide["e"]
    errors = torch.stack([e.square().sum(), (coded.double() + e).square().sum()])
    assert near(fresh[rows + columns :][:2], errors)
    left = torch.randn(rows * columns)
    storage.store(left, one.e.fresh_worker())
    job.sent()
    sent = (coded.double() + e - left.view(rows, columns).double()) * d
    assert torch.allclose(one.o.fresh_worker().double(), sent.view(-1), rtol=1e-4, atol=1e-2)
    job.land()
    landed = one.bucket.view(rows, columns).clone()
    assert torch.allclose(landed.double(), 2 * coded.double() * d, rtol=1e-5, atol=1e-5)
    for waiting in (0, 1):
        one.moment.numbers[STEPS] = waiting
        one.moment.parameter.copy_(a["x"])
        count = float(one.moment.state["step"]) + 1
        one.step(a["g"] * 1e6, lr=0.1, weight_decay=0.5)
        correction = 1 - 0.75**count
        moved = wide["g"] * 1e6 / one.d(1e-3)
        if waiting:
            moved = moved.clamp(-LIMIT * correction, LIMIT * correction)
        want = (1 - 0.1 * 0.5) * wide["x"] - 0.1 / correction * moved
        assert torch.allclose(one.moment.parameter.double(), want, rtol=1e-5, atol=1e-4)
        assert torch.equal(one.moment.state["exp_avg"], a["g"] * 1e6)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@torch.no_grad()
def test_factors_are_roots_of_the_second_moments(rows, columns):
    squares = given(rows, columns)["x"].double().square()
    row, column = (squares.sum(i).float() for i in (1, 0))
    row[0] = 0  # of no gradient: it gets the least factor
    one = One({**given(rows, columns), "row": row, "column": column}, eps=0.03)
    whole = column.double().sum() * 0.5
    wants = (row.double() / whole).sqrt(), column.double().sqrt()
    leasts = (
        0.1 * (column.double().sum() / whole / rows).sqrt(),
        0.1 * wants[1].square().mean().sqrt(),
    )
    by_row, by_column = (w.clamp_min(least) for w, least in zip(wants, leasts, strict=True))
    assert near(one.factors(), torch.outer(by_row, by_column))
    begin = len(one.moment.numbers) + 2 * one.moment.sums_numel + rows + columns
    reciprocals = one.moment.room[begin : begin + rows + columns]
    least = 0.5 * 0.03**2
    r, c = row.double() + least * columns, column.double() + least * rows
    whole = c.sum()
    r, c = r.clamp_min(0.01 * whole / rows), c.clamp_min(0.01 * whole / columns)
    found = torch.outer(reciprocals[:rows], reciprocals[rows:])
    assert near(found, (torch.outer(r, c) / whole / 0.5).rsqrt())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@torch.no_grad()
def test_sums_decay_and_new_ones_are_added(rows, columns):
    a = given(rows, columns)
    one = One(a, weight=0.25)
    fresh = torch.rand(one.moment.sums_numel)
    fresh[-64:] = 0
    fresh[-64], fresh[-65] = 0.5, 0.25  # all of the ranks' squares are those of their mean
    one.fold(fresh)
    state = one.moment.state
    assert near(state["row"], 0.9 * a["row"].double() + 0.1 * fresh[:rows])
    want = 0.9 * a["column"].double() + 0.1 * fresh[rows : rows + columns]
    assert torch.allclose(state["column"].double(), want, rtol=1e-5, atol=1e-6 * want.abs().max())
    assert float(state["moment_weight"]) == pytest.approx(0.9 * 0.25 + 0.1)


@pytest.mark.parametrize("each", [1, 16])
@torch.no_grad()
def test_what_is_heard_in_most_steps_has_a_lower_floor(each):
    """Rows as small as each other: one is heard in all steps, one in few of them, one in none."""
    columns, steps = 8, 1600
    a = {key: torch.zeros_like(value) for key, value in given(4, columns).items()}
    one = One(a, weight=0.0, betas=(0.75, 0.99))
    marks = torch.zeros(steps, 4)
    now_and_then = torch.rand(steps, generator=torch.Generator().manual_seed(1)) < 0.05
    marks[:, 0], marks[:, 1], marks[now_and_then, 2] = 1.0, 1e-4, 20e-4
    for k, row in enumerate(marks.view(-1, each, 4).sum(1)):
        sums = torch.zeros(one.moment.sums_numel)
        sums[:4], sums[4 : 4 + columns] = row, row.sum() / columns
        one.fold(sums, each - 1)
        if k * each < 6:  # it is too early to say
            early = one.factors()[:, 0].clone()
    late = one.factors()[:, 0]
    row = one.moment.state["row"]
    whole = late[0] * 0.1 * (row.sum() / 4 / row[0]).sqrt()
    young = 1.0 if each == 1 else (1 - (1 - 0.99**each) / 0.5) ** 0.5
    assert torch.allclose(early[1:3], 0.1 * early[0] / 2 * young, rtol=0.1)
    assert torch.allclose(late[2:], whole.expand(2), rtol=0.1)
    assert float(late[1]) == pytest.approx(0.01 * float(late[0]), rel=0.01)


@each_value
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@torch.no_grad()
def test_a_gradient_above_the_bound_is_scaled_down_to_it(rows, columns):
    a = given(rows, columns)
    wide = {key: value.double() for key, value in a.items()}
    energy = 0.25 * wide["g"].square().sum()
    for most, share in ((energy / 9, 1 / 3), (2 * energy, 1.0)):
        by = float(most) / BOUND**2 * 0.5 / float(a["row"].sum())
        one = One({**a, "row": a["row"] * by, "column": a["column"] * by})
        one.job(unit=2.0).encode()
        want = 0.75 * wide["m"] + 0.25 * 0.5 * share * wide["g"]
        found = one.bucket.view(rows, columns).double() * one.d()
        assert torch.allclose(found, want, rtol=1e-5, atol=1e-6)
        fresh = one.moment.room[len(one.moment.numbers) :]
        squares = 0.25 * wide["g"].square()  # the whole gradient's
        assert near(fresh[:rows], squares.sum(1))
        assert near(fresh[rows : rows + columns], squares.sum(0))


@pytest.mark.parametrize(("rows", "columns"), SHAPES[1:])
@torch.no_grad()
def test_a_step_takes_back_a_number_alone(rows, columns):
    """It is what clipping by norm has multiplied a gradient by; other changes stay."""
    one = One(given(rows, columns))
    one.job(unit=4.0).land()
    landed = one.bucket.view(rows, columns) / 4
    changes: list[tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = [
        (lambda x: x * 0.125, True),
        (lambda x: x * 3, True),
        (lambda x: x.clone(), True),
        (lambda x: x.clamp(-0.1, 0.1), False),
        (lambda x: x * 0, False),
        (lambda x: x + 1, False),
    ]
    for change, back in changes:
        changed = change(landed)
        one.step(changed)
        want = landed if back else changed
        torch.testing.assert_close(one.moment.state["exp_avg"], want, rtol=1e-6, atol=0)


@torch.no_grad()
def test_what_is_not_finite_stays_so():
    a = given(1, 20)
    for waiting in (0, 1):
        one = One(a)
        one.moment.numbers[STEPS] = waiting
        g = torch.zeros(1, 20)
        g[0, 0], g[0, 17] = float("nan"), float("nan")
        one.step(g)
        assert one.moment.parameter.isnan().tolist() == g.isnan().tolist()
