"""topk's sampled threshold: for a tensor of any shape it selects about the requested number of
values, and the largest ones. Also exact counts, and float16 values beyond its range.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import ceil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pycomm
from pycomm.codecs.args import RandomKey
from pycomm.codecs.implementations import native_codec
from tests.codecs.cases import KEYS
from tests.codecs.test_contract import check
from tests.extent import each_value, part


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def one_column(rows: int, columns: int, factor: float, place: int = 0) -> torch.Tensor:
    """Return a weight's gradient of which one column is much larger than the others."""
    x = normal(rows, columns)
    x[:, place] *= factor
    return x.view(-1)


def count_of(payload: torch.Tensor) -> int:
    return int(payload[4:8].view(torch.int32)[0])


def energy(spec: str, x: torch.Tensor) -> float:
    """Return the share of the energy of ``x`` that is sent."""
    codec = pycomm.codec(spec)
    decoded = codec.decode(codec.encode(x), x.numel())
    return float(decoded.double().square().sum() / x.double().square().sum())


# ------------------------------------------------------------------------------- the sample

ALIASED = {
    "rows of 64": (one_column(4096, 64, 30.0), 64),
    "rows of 1000": (one_column(512, 1000, 30.0), 1000),
    "the last column": (one_column(4096, 64, 30.0, place=63), 64),
    "a divisor": (one_column(4096, 64, 30.0), 32),
    "a multiple": (one_column(4096, 64, 30.0), 128),
}


@pytest.mark.parametrize("case", ALIASED)
def test_a_column_that_is_larger_does_not_mislead_the_sample(case):
    x, sample = ALIASED[case]
    codec = pycomm.codec(f"topk:0.01,sample={sample}")
    asked = codec.count(x.numel())
    assert abs(count_of(codec.encode(x)) - asked) <= asked / 4 + 1
    # The sum of the squares of the k largest grows slower than k, which may be a quarter smaller.
    assert energy(codec.spec(), x) >= 0.75 * energy("topk:0.01", x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    columns=st.sampled_from([2, 3, 48, 64, 100, 256, 768]),
    times=st.sampled_from([0.25, 0.5, 1, 2, 3]),
    width=st.integers(1, 3),
    place=st.integers(0, 1000),
    factor=st.sampled_from([0.0, 1e-3, 10.0, 1000.0]),
    density=st.sampled_from([0.002, 0.01, 0.1]),
    step=st.integers(0, 2**32 - 1),
)
def test_no_period_of_the_values_misleads_the_sample(
    columns, times, width, place, factor, density, step
):
    """Columns are much larger or smaller, or zero, at positions where stride and row coincide."""
    x = normal(40_000 // columns, columns, seed=step % 97)
    x[:, [(place + i) % columns for i in range(width)]] *= factor
    x = x.view(-1)
    codec = pycomm.codec(f"topk:{density},sample={max(1, int(columns * times))}")
    payload = codec.encode(x, key=RandomKey(seed=1, step=step))
    k, asked = count_of(payload), codec.count(x.numel())
    # There may be more if that many values equal the threshold, such as these zeros.
    assert codec.least(x.numel()) <= k <= codec.most(x.numel())
    assert asked - asked // 4 == codec.least(x.numel())
    largest = x.abs().sort(descending=True, stable=True).indices[:k].sort().values
    places = payload[8 + 4 * k : 8 + 8 * k].view(torch.int32).long()
    assert torch.equal(places, largest)


def test_where_the_sample_misleads_exactly_what_was_asked_travels():
    x = torch.ones(100_000)
    x[:99_000] = 0  # the threshold is 0 or 1, which all or 1 % of the values reach
    codec = pycomm.codec("topk:0.02,sample=100")
    payload = codec.encode(x)
    assert payload[:8].view(torch.int32).tolist() == [8 + 8 * 2000, 2000]
    exact = pycomm.codec("topk:0.02").encode(x)
    assert torch.equal(payload[8 : 8 + 16000], exact)
    assert not bool(payload[8 + 16000 :].any())


def test_with_feedback_every_column_travels():
    x, columns = ALIASED["rows of 64"][0].view(-1, 64), set()
    codec = pycomm.codec("topk:0.01,sample=64")
    residual = torch.zeros(x.numel())
    for step in range(300):
        g = normal(4096, 64, seed=step)
        g[:, 0] *= 30
        payload = codec.encode(g.view(-1), residual=residual, key=RandomKey(step=step))
        sent = codec.decode(payload, x.numel()).view(-1, 64)
        columns |= set((sent != 0).any(dim=0).nonzero().view(-1).tolist())
    assert columns == set(range(64))


def test_the_key_chooses_the_sample():
    x = normal(1 << 18)
    codec = pycomm.codec("topk:0.01,sample=64")
    counts = [count_of(codec.encode(x, key=key)) for key in KEYS]
    assert len(set(counts)) == len(counts)
    assert counts == [count_of(codec.encode(x, key=key)) for key in KEYS]


@each_value
@pytest.mark.parametrize(
    ("sample", "numel"),
    [
        *product([1, 2, 64, 65_536], [1, 2, 63, 64, 65, 127, 8193]),
        # Of three chunks, for which the reference takes seconds.
        *part([(64, 131_073), (1, 131_073), (2, 131_073), (65_536, 131_073)], 4),
    ],
)
def test_short_stretches_are_sampled_alike(sample, numel):
    check(f"topk:0.05,sample={sample}", "native", "cpu", normal(numel), 0.1 * normal(numel, seed=1))


# ------------------------------------------------------------------------------- the count


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    digits=st.integers(1, 10**17),
    places=st.integers(0, 25),
    numel=st.integers(1, 2**32 - 1),
)
@example(digits=7, places=2, numel=100)
@example(digits=1, places=1, numel=2**32 - 10)
@example(digits=29, places=2, numel=100)
def test_a_count_is_the_exact_product_rounded_up(digits, places, numel):
    density = float(Fraction(digits, 10**places))
    if not 0 < density <= 1:
        return
    written = Fraction(repr(density))
    want = max(1, min(numel, ceil(written * numel)))
    codec = pycomm.codec(f"topk:{density!r}")
    assert codec.count(numel) == want
    assert codec.encoded_bytes(numel) == 8 * want == native_codec(codec.spec()).encoded_bytes(numel)


def test_every_percentage_of_a_size_that_it_divides_is_whole():
    for percent in range(1, 101):
        for numel in (100, 300, 100_000, 2**20 * 100):
            codec = pycomm.codec(f"topk:{percent / 100}")
            assert codec.count(numel) == percent * numel // 100
            assert native_codec(codec.spec()).encoded_bytes(numel) == 8 * percent * numel // 100


@pytest.mark.parametrize("density", ["5e-324", "1e-300", "1e-38", "2.5e-10", "0.9999999999999999"])
def test_densities_at_the_ends_of_their_range(density):
    codec = pycomm.codec(f"topk:{density}")
    for numel in (1, 5000, 2**32 - 1):
        want = max(1, min(numel, ceil(Fraction(density) * numel)))
        assert codec.count(numel) == want
        assert native_codec(codec.spec()).encoded_bytes(numel) == 8 * want


# --------------------------------------------------------------------------------- float16


@pytest.mark.parametrize("sample", ["", ",sample=10"])
@pytest.mark.parametrize("size", [1e-29, 1e-9, 1e-4, 1.0, 1e5, 1e30])
def test_float16_keeps_values_of_any_size(size, sample):
    x = normal(50_000) * size
    codec = pycomm.codec(f"topk:0.01,values=float16{sample}")
    decoded = codec.decode(codec.encode(x), x.numel())
    sent = decoded != 0
    assert codec.least(x.numel()) <= int(sent.sum()) <= codec.most(x.numel())
    assert float(((decoded - x)[sent] / x[sent]).abs().max()) <= 2.0**-11


def test_float16_keeps_heavy_tails_finite_and_precise():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 18, generator=g) / torch.rand(1 << 18, generator=g) ** 2  # up to 1e10
    assert float(x.abs().max()) > 1e7
    codec = pycomm.codec("topk:0.01,values=float16")
    residual = torch.zeros_like(x)
    decoded = codec.decode(codec.encode(x, residual=residual), x.numel())
    assert bool(decoded.isfinite().all())
    assert bool(residual.isfinite().all())
    largest = x.abs().topk(codec.count(x.numel())).indices.sort().values
    for places in largest.split(256):  # a group of sent values
        a, error = x[places].abs(), (decoded - x)[places].abs()
        # Eleven bits, or half a step of the smallest number that float16 has beside the largest.
        assert bool((error <= (a * 2.0**-11).clamp(min=float(a.max()) * 2.0**-39)).all())
    assert torch.equal(residual, x - decoded)


@pytest.mark.parametrize("top", [1.0, 2.0**-99, 2.0**126, 2.0**127 * (1 - 2.0**-24)])
def test_float16_in_a_group_of_any_range(top):
    """All values within 2^28 of the largest of their group keep eleven bits."""
    x = top * 2.0 ** -torch.arange(0.0, 28.0, 0.25)
    codec = pycomm.codec("topk:1,values=float16")
    decoded = codec.decode(codec.encode(x), x.numel())
    assert bool((((decoded - x).double() / x.double()).abs() <= 2.0**-11).all())
