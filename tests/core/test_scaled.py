"""Matrices with a factor for each row and column: C++ against float64, and every level of SIMD."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from pycomm.reduction.momentum import scaled  # noqa: E402
from tests.extent import each_value  # noqa: E402

SHAPES = [(1, 1), (3, 5), (64, 16), (65, 33), (7, 1000), (700, 31), (0, 4)]


def given(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    made = {n: torch.randn(rows, columns, generator=generator) for n in ("x", "g", "m")}
    made["row"] = torch.rand(rows, generator=generator) + 0.5
    made["column"] = torch.rand(columns, generator=generator) + 0.5
    return made


def near(found: torch.Tensor, want: torch.Tensor) -> bool:
    # A few roundings of float32; sums have at most a thousand terms of the same sign.
    return torch.allclose(found.double(), want, rtol=1e-5, atol=1e-6)


@pytest.fixture(params=["C++", "torch"], autouse=True)
def implementation(request, monkeypatch):
    """Run each test in C++, and in torch as on other devices."""
    if request.param == "torch":
        monkeypatch.setattr(scaled, "native", lambda *_: False)
    return request.param


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_operations_are_those_of_their_formulas(rows, columns):
    a = given(rows, columns)
    wide = {key: value.double() for key, value in a.items()}
    d = torch.outer(wide["row"], wide["column"])

    row, column = torch.ones(rows), torch.ones(columns)
    scaled.add_squares(a["x"], row, column, 0.25)
    squares = wide["x"].square()
    assert near(row, 1 + 0.25 * squares.sum(1))
    assert near(column, 1 + 0.25 * squares.sum(0))

    for add, known in itertools.product((True, False), (rows, rows // 2)):
        values = a["g"].clone()
        again, again_column = torch.zeros(rows), torch.zeros(columns)
        scaled.divide(
            *(values, a["m"][:known], a["row"], a["column"], 0.75, 2.0),
            add=add,
            squares=(again, again_column, 1.0),
        )
        m = wide["m"].clone()
        m[known:] = 0
        assert near(values, (0.75 * m * add + 0.25 * 2 * wide["g"]) / d)
        assert near(again, wide["g"].square().sum(1))
        assert near(again_column, wide["g"].square().sum(0))

    values = a["x"].clone()
    scaled.multiply(values, a["row"], a["column"], 3.0)
    assert near(values, 3 * wide["x"] * d)

    for limit in (0.0, 0.5):
        x, m = a["x"].clone(), a["m"].clone()
        scaled.move(x, a["g"], m, a["row"], a["column"], lr=0.1, keep=0.9, limit=limit)
        moved = wide["g"] * d
        moved = moved.clamp(-limit, limit) if limit else moved
        assert near(x, 0.9 * wide["x"] - 0.1 * moved)
        assert torch.equal(m, a["g"])


@pytest.mark.parametrize(("rows", "columns"), [s for s in SHAPES if s[0]])
def test_factors_are_roots_of_the_second_moments(rows, columns):
    squares = given(rows, columns)["x"].double().square()
    row, column = (squares.sum(i).float() for i in (1, 0))
    row[0] = 0  # of no gradient: it gets the least factor
    by_row, by_column = scaled.factors(row, column, 0.5, 0.1, rows + 2)
    total = column.double().sum() * 0.5
    wants = (row.double() / total).sqrt(), column.double().sqrt()
    leasts = (
        0.1 * (column.double().sum() / total / rows).sqrt(),
        0.1 * wants[1].square().mean().sqrt(),
    )
    for found, want, least in zip((by_row[:rows], by_column), wants, leasts, strict=True):
        assert near(found, want.clamp_min(least))
    assert torch.equal(by_row[rows:], torch.ones(2))
    by_row, by_column = scaled.reciprocal_factors(row, column, 0.5, rows, 1e-3, 0.1)
    r, c = row.double() + 1e-3 * columns, column.double() + 1e-3 * rows
    total = c.sum()
    r, c = r.clamp_min(0.01 * total / rows), c.clamp_min(0.01 * total / columns)
    assert near(torch.outer(by_row, by_column), (torch.outer(r, c) / total / 0.5).rsqrt())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sums_decay_and_new_ones_are_added(rows, columns):
    a = given(rows, columns)
    row, column = a["row"].clone(), a["column"].clone()
    sums = torch.rand(rows + columns + 3)
    scaled.fold(row, column, sums, 0.75, 0.5)
    assert near(row, 0.75 * a["row"].double() + 0.5 * sums[:rows])
    assert near(column, 0.75 * a["column"].double() + 0.5 * sums[rows : rows + columns])


def test_an_earlier_result_is_written_over():
    row, column = torch.rand(3), torch.rand(5)
    first = scaled.reciprocal_factors(row, column, 0.5, 3, 1e-3, 0.1)
    again = scaled.reciprocal_factors(2 * row, column, 0.5, 3, 1e-3, 0.1)
    written = scaled.reciprocal_factors(2 * row, column, 0.5, 3, 1e-3, 0.1, out=first)
    assert all(map(torch.equal, written, again))


@each_value
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("known", [0, 2, 1000])
def test_a_gradient_above_the_bound_is_scaled_down_to_it(rows, columns, known):
    a = given(rows, columns)
    wide = {key: value.double() for key, value in a.items()}
    energy = 0.25 * wide["g"].square().sum()
    m = wide["m"].clone()
    m[known:] = 0
    for most, share in ((energy / 9, 1 / 3), (2 * energy, 1.0)):
        values, row, column = a["g"].clone(), torch.zeros(rows), torch.zeros(columns)
        scaled.divide(
            *(values, a["m"][:known], a["row"], a["column"], 0.75, 2.0),
            add=True,
            squares=(row, column, 0.25),
            most=most.float().clamp_min(1e-30),
        )
        d = torch.outer(wide["row"], wide["column"])
        assert near(values, (0.75 * m + 0.25 * 2 * share * wide["g"]) / d)
        assert near(row, 0.25 * wide["g"].square().sum(1))  # the whole gradient's
        assert near(column, 0.25 * wide["g"].square().sum(0))


def test_errors_are_those_of_the_stored_residual():
    x, e = torch.randn(5003), torch.randn(5003)
    for stored in (e, e.bfloat16()):
        left, coded = scaled.error_sums(x, stored)
        want = stored.double()
        assert left == pytest.approx(float(want.square().sum()), rel=1e-5)
        assert coded == pytest.approx(float((x + want).square().sum()), rel=1e-5)


def test_what_is_not_finite_stays_so():
    x, m = torch.zeros(1, 20), torch.zeros(1, 20)
    g = torch.zeros(1, 20)
    g[0, 0], g[0, 17] = float("nan"), float("nan")
    scaled.move(x, g, m, torch.ones(1), torch.ones(20), lr=1.0, keep=1.0, limit=5.0)
    assert x.isnan().tolist() == g.isnan().tolist()


def test_threads_do_not_change_what_a_row_gets():
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(1)
        g, m = (torch.randn(1037, 1031, generator=generator) for _ in range(2))
        row, column = torch.linspace(1, 2, 1037), torch.linspace(2, 3, 1031)
        sums, column_sums = torch.zeros(1037), torch.zeros(1031)
        scaled.divide(g, m, row, column, 0.7, 1.0, add=True, squares=(sums, column_sums, 1.0))
        found.append((g, sums, column_sums))
    torch.set_num_threads(before)
    (g, sums, column_sums), (again, other, other_column) = found
    assert torch.equal(g, again)
    assert torch.equal(sums, other)
    # Added up in another order.
    torch.testing.assert_close(column_sums, other_column, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (3, 2500)])
def test_what_was_sent_has_the_same_bits_in_both(monkeypatch, rows, columns):
    a = given(rows, columns)
    x, numel = a["x"] * 3, rows * columns
    x.view(-1)[: numel // 7] *= 1e38  # and what is too large for bfloat16
    for form, kept in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        before, after = (a[n].reshape(-1).to(form) for n in ("g", "m"))
        found = []
        for native in (False, True):
            with monkeypatch.context() as patch:
                if not native:
                    patch.setattr(scaled, "native", lambda *_: False)
                to = torch.zeros(numel, dtype=kept)
                scaled.store_sent(x, a["row"], a["column"], before, after, to)
                found.append(to)
        assert torch.equal(*found)
        wide = [t.double().view(rows, columns) for t in (before, after)]
        want = (x.double() + wide[0] - wide[1]) * torch.outer(a["row"], a["column"]).double()
        finite = want.abs() < 1e38
        near_enough = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[kept]  # a rounding each
        torch.testing.assert_close(
            found[0].double().view(rows, columns)[finite],
            want[finite],
            rtol=near_enough,
            atol=1e-5,
        )
        again = found[0].clone()
        scaled.store_sent(torch.zeros_like(x), a["row"], a["column"], None, None, again, add=True)
        assert torch.equal(again, found[0])
