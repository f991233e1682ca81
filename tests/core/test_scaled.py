"""Matrices with a factor for each row and column: C++ against torch, bit by bit, and float64."""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pycomm.feedback import storage  # noqa: E402
from pycomm.momentum import scaled  # noqa: E402
from pycomm.momentum.scaled import Encoding, Move, Sent, Sums  # noqa: E402
from tests.extent import each_value  # noqa: E402

SHAPES = [(1, 1), (3, 5), (64, 16), (65, 33), (7, 1000), (700, 31), (129, 1100), (0, 4)]
FORMS = ("float32", "bf16", "int8")


def given(rows: int, columns: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    made = {n: torch.randn(rows, columns, generator=generator) for n in ("x", "g", "m")}
    made["row"] = torch.rand(rows, generator=generator) + 0.5
    made["column"] = torch.rand(columns, generator=generator) + 0.5
    made["signs"] = torch.randn(columns, generator=generator).sign()
    return made


def listened(rows: int, columns: int, make: Any = torch.rand) -> list[tuple[torch.Tensor, ...]]:
    """Return how rows and columns are heard; see `scaled.Heard`."""
    return [(make(count), make(count)) for count in (rows, columns)]


def near(found: torch.Tensor, want: torch.Tensor) -> bool:
    # A few roundings of float32; sums have at most a thousand terms of the same sign.
    return torch.allclose(found.double(), want, rtol=1e-5, atol=1e-6)


def stored(values: torch.Tensor, form: str) -> torch.Tensor:
    to = storage.zeros(form, values.numel(), values.device)
    storage.store(values.reshape(-1), to)
    return to


def tensors_of(found: Any) -> list[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        return [found]
    if is_dataclass(found):
        found = [getattr(found, field.name) for field in fields(found)]
    return (
        [t for each in found for t in tensors_of(each)] if isinstance(found, (tuple, list)) else []
    )


def both(monkeypatch: pytest.MonkeyPatch, call: Any, *args: Any) -> list[torch.Tensor]:
    """Call C++ and torch; return the tensors of arguments and result, which have the same bits."""
    found = []
    for native in (True, False):
        with monkeypatch.context() as patch:
            if not native:
                patch.setattr(scaled, "native", lambda *_: False)
            own = deepcopy(args)
            found.append(tensors_of([own, call(*own)]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    return found[0]


@pytest.fixture(params=["C++", "torch"])
def implementation(request, monkeypatch):
    """Run each test in C++, and in torch as on other devices."""
    if request.param == "torch":
        monkeypatch.setattr(scaled, "native", lambda *_: False)
    return request.param


# ---------------------------------------------------------------- bits


def encodings(rows: int, columns: int, form: str) -> list[Encoding]:
    """Two matrices: one with all there is to be done, and one with nothing besides."""
    a = given(rows, columns)
    torch.manual_seed(rows)
    real, numel = rows * 2 // 3, rows * columns
    full = Encoding(
        *(a["g"] * 1e-2, real, a["row"], a["column"], stored(a["m"], form), rows // 2),
        beta=0.75,
        unit=1 / 3,
        sums=(torch.rand(real), torch.rand(columns)),
        bound=(torch.rand(real), 1e-4),
        projections=(a["signs"], 1, 3, torch.rand(max(1, -(-real // 3)))),
        residual=stored(a["x"], form),
        errors=torch.rand(2),
        copy=torch.zeros(numel),
    )
    return [full, Encoding(a["x"].clone(), rows, a["row"], a["column"])]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_encode_has_the_bits_of_the_reference(monkeypatch, rows, columns, form):
    both(monkeypatch, scaled.encode, encodings(rows, columns, form))
    loose = encodings(rows, columns, form)
    loose[0].bound = None
    both(monkeypatch, scaled.encode, loose)


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (3, 2500)])
@pytest.mark.parametrize(("form", "kept"), list(itertools.product(FORMS, repeat=2)))
def test_what_was_sent_has_the_bits_of_the_reference(monkeypatch, rows, columns, form, kept):
    a = given(rows, columns)
    x = a["x"] * 3
    x.view(-1)[: x.numel() // 7] *= 1e38  # and what is too large for bfloat16
    before, after, to = (stored(a[n], f) for n, f in (("g", form), ("m", form), ("g", kept)))
    parts = [
        Sent(x, a["row"], a["column"], *residual, to.clone())
        for residual in ((before, after), (None, None))
    ]
    found = both(monkeypatch, scaled.store_sent, parts)
    wide = [storage.load(t, x.numel()).double().view(x.shape) for t in (before, after)]
    want = (x.double() + wide[0] - wide[1]) * torch.outer(a["row"], a["column"]).double()
    if kept == "float32":
        finite = want.abs() < 1e38
        sent = found[5].double().view(x.shape)[finite]
        torch.testing.assert_close(sent, want[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_steps_have_the_bits_of_the_reference(monkeypatch, rows, columns, limit):
    a = given(rows, columns)
    both(monkeypatch, scaled.land, [(a["x"], a["row"], a["column"])] * 2, 3.0)
    moves = [Move(a["x"], a["g"], a["m"], a["row"], a["column"], 0.1, 0.9, limit) for _ in "12"]
    both(monkeypatch, scaled.move, moves)
    if rows:
        (probe,) = scaled.land([(a["g"].clone(), None, None)], 1.0)
        clipped = replace(moves[0], gradient=a["g"] * 0.3, probe=probe)
        both(monkeypatch, scaled.move, [clipped, moves[1]])
    fresh = torch.rand(rows + columns + 3)
    heard = listened(rows, columns)
    both(monkeypatch, scaled.fold, Sums(a["row"], a["column"], 1.0, *heard), fresh, 0.75, 0.5, 3)
    both(monkeypatch, scaled.fold, Sums(a["row"], a["column"]), fresh, 0.75, 0.5, 1)


def plain_passes(rows: int, columns: int, form: str) -> tuple[list[Any], ...]:
    """The passes of an optimizer that divides by nothing, with and without what may be left out."""
    a = given(rows, columns)
    numel = rows * columns
    full = Encoding(
        *(torch.full((rows, columns), torch.nan), rows),
        momentum=stored(a["m"], form),
        known=rows,
        beta=0.75,
        unit=10.0,
        residual=stored(a["x"], form),
        errors=torch.tensor([0.5, 0.25, 0.0]),
        copy=torch.zeros(numel),
        gradient=a["g"],
        parameter=a["x"],
        decay=0.1,
    )
    alone = Encoding(torch.zeros(rows, columns), rows, gradient=a["g"])
    before, after = stored(a["g"], form), stored(a["m"], form)
    own = a["x"].clone()
    stores = [
        Sent(own, None, None, before, after, own.view(-1)),  # in place
        Sent(a["x"], None, None, None, None, stored(a["m"], "float32")),
    ]
    moves = [
        Move(a["x"].clone(), a["g"], m, None, None, 0.1, 1.0, 0.0) for m in (a["m"].clone(), None)
    ]
    return [full, alone], stores, moves


@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (3, 2500)])
@pytest.mark.parametrize("form", FORMS)
def test_passes_without_factors_have_the_same_bits(monkeypatch, rows, columns, form):
    for call, args in zip(
        (scaled.encode, scaled.store_sent, scaled.move),
        plain_passes(rows, columns, form),
        strict=True,
    ):
        both(monkeypatch, call, args)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_passes_without_factors_are_their_formulas(implementation, rows, columns):
    a = {key: value.double() for key, value in given(rows, columns).items()}
    (full, alone), stores, moves = plain_passes(rows, columns, "float32")
    scaled.encode([full, alone])
    want = 0.75 * a["m"] + 0.25 * 10 * (a["g"] + 0.1 * a["x"])
    assert near(full.values, want)
    assert torch.equal(full.copy, full.values.view(-1))
    squares = torch.stack([a["x"].square().sum(), (want + a["x"]).square().sum()])
    assert near(full.errors[:2], squares + torch.tensor([0.5, 0.25]))
    assert torch.equal(alone.values, alone.gradient)
    scaled.store_sent(stores)
    assert near(stores[0].values, a["x"] + a["g"] - a["m"])
    assert torch.equal(stores[1].to, stores[1].values.view(-1))
    scaled.move(moves)
    for one in moves:
        assert near(one.parameter, a["x"] - 0.1 * a["g"])
        assert one.momentum is None or torch.equal(one.momentum, one.gradient)


@pytest.mark.parametrize(("rows", "columns"), [s for s in SHAPES if s[0]])
def test_factors_have_the_bits_of_the_reference(monkeypatch, rows, columns):
    a = given(rows, columns)
    a["row"][0] = 0  # of no gradient: it gets the least factor
    for heard in ((None, None), listened(rows, columns)):
        sums = Sums(a["row"], a["column"], 0.3, *heard)
        both(monkeypatch, scaled.factors, sums, rows + 2)
        both(monkeypatch, scaled.reciprocal_factors, sums, rows + 5, 1e-3)


def test_threads_change_no_bits():
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        parts = encodings(1037, 1031, "bf16")
        scaled.encode(parts)
        plain = plain_passes(1037, 1031, "bf16")
        for call, args in zip((scaled.encode, scaled.store_sent, scaled.move), plain, strict=True):
            call(args)
        found.append(tensors_of([parts, plain]))
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------- formulas


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_operations_are_those_of_their_formulas(implementation, rows, columns):
    a = given(rows, columns)
    wide = {key: value.double() for key, value in a.items()}
    d = torch.outer(wide["row"], wide["column"])

    row, column = torch.ones(rows), torch.ones(columns)
    values = a["x"].clone()
    scaled.encode([Encoding(values, rows, sums=(row, column), unit=0.5)])
    squares = wide["x"].square()
    assert torch.equal(values, a["x"])
    assert near(row, 1 + 0.25 * squares.sum(1))
    assert near(column, 1 + 0.25 * squares.sum(0))

    for add, known in itertools.product((True, False), (rows, rows // 2)):
        sums = torch.zeros(rows), torch.zeros(columns)
        m = a["m"][:known] if add else None
        one = Encoding(a["g"].clone(), rows, a["row"], a["column"], m, known, 0.75, 2.0, sums)
        found, errors = torch.zeros(-(-rows // 2)), torch.zeros(2)
        one.projections, one.residual, one.errors = (a["signs"], 0, 2, found), a["x"], errors
        scaled.encode([one])
        m = wide["m"].clone()
        m[known:] = 0
        want = (0.75 * m * add + 0.25 * 2 * wide["g"]) / d
        assert near(one.values, want)
        assert near(sums[0], 4 * wide["g"].square().sum(1))
        assert near(sums[1], 4 * wide["g"].square().sum(0))
        assert torch.allclose(found.double(), 2 * wide["g"][::2] @ wide["signs"], atol=1e-3)
        assert near(errors, torch.stack([squares.sum(), (want + wide["x"]).square().sum()]))

    values = a["x"].clone()
    scaled.land([(values, a["row"], a["column"])], 3.0)
    assert near(values, 3 * wide["x"] * d)

    for limit in (0.0, 0.5):
        x, m = a["x"].clone(), a["m"].clone()
        scaled.move([Move(x, a["g"], m, a["row"], a["column"], 0.1, 0.9, limit)])
        moved = wide["g"] * d
        moved = moved.clamp(-limit, limit) if limit else moved
        assert near(x, 0.9 * wide["x"] - 0.1 * moved)
        assert torch.equal(m, a["g"])


@pytest.mark.parametrize(("rows", "columns"), [s for s in SHAPES if s[0]])
def test_factors_are_roots_of_the_second_moments(implementation, rows, columns):
    squares = given(rows, columns)["x"].double().square()
    row, column = (squares.sum(i).float() for i in (1, 0))
    row[0] = 0  # of no gradient: it gets the least factor
    sums = Sums(row, column, 0.5)
    by_row, by_column = scaled.factors(sums, rows + 2)
    total = column.double().sum() * 0.5
    wants = (row.double() / total).sqrt(), column.double().sqrt()
    leasts = (
        0.1 * (column.double().sum() / total / rows).sqrt(),
        0.1 * wants[1].square().mean().sqrt(),
    )
    for found, want, least in zip((by_row[:rows], by_column), wants, leasts, strict=True):
        assert near(found, want.clamp_min(least))
    assert torch.equal(by_row[rows:], torch.ones(2))
    by_row, by_column = scaled.reciprocal_factors(sums, rows, 1e-3)
    r, c = row.double() + 1e-3 * columns, column.double() + 1e-3 * rows
    total = c.sum()
    r, c = r.clamp_min(0.01 * total / rows), c.clamp_min(0.01 * total / columns)
    assert near(torch.outer(by_row, by_column), (torch.outer(r, c) / total / 0.5).rsqrt())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_sums_decay_and_new_ones_are_added(implementation, rows, columns):
    a = given(rows, columns)
    row, column = a["row"].clone(), a["column"].clone()
    fresh = torch.rand(rows + columns + 3)
    scaled.fold(Sums(row, column), fresh, 0.75, 0.5, 1)
    assert near(row, 0.75 * a["row"].double() + 0.5 * fresh[:rows])
    assert near(column, 0.75 * a["column"].double() + 0.5 * fresh[rows : rows + columns])


@pytest.mark.parametrize("each", [1, 16])
def test_what_is_heard_in_most_steps_has_a_lower_floor(implementation, each):
    """Rows as small as each other: one is heard in all steps, one in few of them, one in none."""
    columns, steps = 8, 1600
    sums = Sums(torch.zeros(4), torch.zeros(columns), 1.0, *listened(4, columns, torch.zeros))
    given = torch.zeros(steps, 4)
    now_and_then = torch.rand(steps, generator=torch.Generator().manual_seed(1)) < 0.05
    given[:, 0], given[:, 1], given[now_and_then, 2] = 1.0, 1e-4, 20e-4
    for k, row in enumerate(given.view(-1, each, 4).sum(1)):
        fresh = torch.cat((row, (row.sum() / columns).expand(columns)))
        scaled.fold(sums, fresh, 0.99**each, 0.01, each)
        if k * each < 6:  # it is too early to say
            early, _ = scaled.factors(sums, 4)
    late, _ = scaled.factors(sums, 4)
    whole = 0.1 * (sums.row.sum() / 4 / sums.column.sum()).sqrt()
    young = 1.0 if each == 1 else (1 - (1 - 0.99**each) / 0.5) ** 0.5
    assert torch.allclose(early[1:3], 0.1 * early[0] / 2 * young, rtol=0.1)
    assert torch.allclose(late[2:], whole.expand(2), rtol=0.1)
    assert float(late[1]) == pytest.approx(0.01 * float(late[0]), rel=0.01)


@each_value
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("known", [0, 2, 1000])
def test_a_gradient_above_the_bound_is_scaled_down_to_it(implementation, rows, columns, known):
    a = given(rows, columns)
    known = min(known, rows)
    wide = {key: value.double() for key, value in a.items()}
    energy = 4 * wide["g"].square().sum()
    m = wide["m"].clone()
    m[known:] = 0
    for most, share in ((energy / 9, 1 / 3), (2 * energy, 1.0)):
        sums = torch.zeros(rows), torch.zeros(columns)
        one = Encoding(
            *(a["g"].clone(), rows, a["row"], a["column"], a["m"][:known], known, 0.75, 2.0, sums),
            bound=(torch.ones(rows), float(most) / max(1, rows)),
        )
        scaled.encode([one])
        d = torch.outer(wide["row"], wide["column"])
        assert near(one.values, (0.75 * m + 0.25 * 2 * share * wide["g"]) / d)
        assert near(sums[0], 4 * wide["g"].square().sum(1))  # the whole gradient's
        assert near(sums[1], 4 * wide["g"].square().sum(0))


@pytest.mark.parametrize(("rows", "columns"), SHAPES[1:-1])
def test_a_step_takes_back_a_number_alone(implementation, rows, columns):
    """It is what clipping by norm has multiplied a gradient by; other changes stay."""
    a = given(rows, columns)
    landed = a["x"].clone()
    (probe,) = scaled.land([(landed, a["row"], a["column"])], 4.0)
    landed /= 4
    for changed, want in (
        (landed * 0.125, landed),
        (landed * 3, landed),
        (landed.clone(), landed),
        (landed.clamp(-0.1, 0.1), landed.clamp(-0.1, 0.1)),
        (landed * 0, landed * 0),
        (landed + 1, landed + 1),
    ):
        x, m = a["g"].clone(), a["m"].clone()
        scaled.move([Move(x, changed, m, a["row"], a["column"], 0.1, 0.9, 0.0, probe)])
        torch.testing.assert_close(m, want, rtol=1e-6, atol=0)


def test_what_is_not_finite_stays_so(implementation):
    x, m = torch.zeros(1, 20), torch.zeros(1, 20)
    g = torch.zeros(1, 20)
    g[0, 0], g[0, 17] = float("nan"), float("nan")
    scaled.move([Move(x, g, m, torch.ones(1), torch.ones(20), 1.0, 1.0, 5.0)])
    assert x.isnan().tolist() == g.isnan().tolist()
