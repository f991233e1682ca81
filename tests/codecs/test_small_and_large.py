"""Values near the limits of float32: the decoded result is never worse than zero."""

from __future__ import annotations

import pytest
import torch

import pycomm
from tests.codecs.cases import ROTATIONS, SPECS
from tests.noting import noting

MORE = [
    f"int{bits}:range=minmax{scale}"
    for bits in (2, 4, 8)
    for scale in ("", ",scale=bfloat16", ",rounding=stochastic")
]
N = 2048


def values() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(21)
    normal = torch.randn(N, generator=g)
    tiny = 2.0**-100
    one_low = torch.full((N,), -0.01 * tiny)
    one_low[::64] = -1.005 * tiny
    return {
        "denormals": torch.randint(-1000, 1001, (N,), generator=g) * 2.0**-149,
        "positive-denormals": torch.randint(1, 1001, (N,), generator=g) * 2.0**-149,
        "negative-denormals": torch.randint(-1000, 0, (N,), generator=g) * 2.0**-149,
        "below-normal": normal * 2.0**-126,
        "tiny": normal * 2.0**-102,
        "at-the-border": normal * tiny,
        "one-low": one_low,
        "one-high": -one_low,
        "small": normal * 1e-20,
        "large": normal * 1e20,
        "huge": normal * 2.0**110,
    }


VALUES = values()


def limit(codec: pycomm.codecs.base.Codec) -> float:
    """Return a codec's permitted relative squared error: that of zeros or, if unbiased, its own."""
    if not codec.unbiased:
        return 1.0
    assert codec.name == "eden"
    return 2.14 * 1.2  # of half a bit; a few rotations vary by chance


@pytest.mark.parametrize("spec", [*SPECS, *ROTATIONS, *MORE])
def test_what_arrives_is_not_worse_than_nothing(spec):
    codec = pycomm.codec(spec)
    for values in VALUES:
        with noting(f"values {values}"):
            check_that_it_is_not_worse_than_nothing(codec, values)


def check_that_it_is_not_worse_than_nothing(codec: pycomm.codecs.base.Codec, values: str) -> None:
    x = VALUES[values]
    payload = codec.encode(x)
    got = codec.decode(payload, N)
    if not bool(got.isfinite().all()):
        # Formats of 16 bits end at 65504.
        assert "float16" in codec.spec()
        assert values in ("large", "huge")
        return
    error = (got.double() - x.double()).square().sum()
    assert float(error) <= limit(codec) * float(x.double().square().sum()) * 1.0001


@pytest.mark.parametrize("scale", ["float32", "bfloat16"])
@pytest.mark.parametrize("values", VALUES)
def test_a_block_without_levels_is_its_value_next_to_zero(values, scale):
    codec = pycomm.codec(f"int4:range=minmax,scale={scale}")
    x = VALUES[values]
    rows = x.view(-1, codec.block)
    flat = (rows.amax(dim=1) - rows.amin(dim=1)) <= 2.0**-100
    got = codec.decode(codec.encode(x), N).view_as(rows)
    assert bool(((got - rows).abs() <= rows.abs())[flat].all())
