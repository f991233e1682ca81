"""Averages of random codecs: codecs with random rounding or rotation are unbiased over keys, for
any values and any distribution of the energy over them."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import pycomm
from pycomm.codecs import CODECS
from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec
from tests.codecs.cases import ROTATIONS, SPECS
from tests.extent import noting, part

SIZE = 2048
# Deviations of the mean, in sigma, that occur by chance once in 10^7 projections.
SIGMAS = 5.5
# Codecs and their permitted bias, relative to the input in any direction. Exact random rounding has
# only float32's bias, at the top of a range; rotations are close to uniform ones.
EXACT = [
    "int8:rounding=stochastic",
    "int4:block=64,rounding=stochastic",
    "int2:rounding=stochastic",
    "int3:rounding=stochastic",
    "int6:block=32,rounding=stochastic",
]
ROTATED = [
    "eden:bits=1",
    "eden:bits=1,size=128",
    "eden:bits=3,size=256",
    "eden:bits=2",
    "eden:bits=2,size=128",
    "eden:bits=4,size=4096",
]
BIAS = dict.fromkeys(EXACT, 1e-5) | dict.fromkeys(ROTATED, 0.01)


def values() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    normal = torch.randn(SIZE, generator=g)
    heavy = torch.randn(SIZE, generator=g) / torch.randn(SIZE, generator=g).abs().clamp(min=0.05)
    one = torch.randn(SIZE, generator=g)
    one[5] = 4 * float(one.norm())
    sixteen = torch.zeros(SIZE)
    sixteen[torch.randperm(1024, generator=g)[:16]] = torch.randn(16, generator=g)
    return {"normal": normal, "heavy": heavy, "one-large": one, "sixteen": sixteen}


VALUES = values()


def decoded(codec: Codec, x: torch.Tensor, step: int) -> torch.Tensor:
    key = RandomKey(seed=77, step=step, tensor=3)
    payload = codec.encode(x, key=key)
    return codec.decode(payload, x.numel()).double()


def directions(x: torch.Tensor) -> torch.Tensor:
    """Return parts of x, float64 [parts, numel]: all, without the largest, small, random signs."""
    g = torch.Generator().manual_seed(12)
    x = x.double()
    rest = x.clone()
    rest[x.abs().argmax()] = 0
    small = torch.where(x.abs() <= x.abs().median(), x, torch.zeros_like(x))
    signs = torch.randint(0, 2, x.shape, generator=g) * 2 - 1
    return torch.stack([one for one in (x, rest, small, rest * signs) if one.norm() > 0])


@pytest.mark.parametrize(("spec", "values"), part(list(product(BIAS, VALUES)), 3))
def test_the_mean_over_keys_is_the_value(spec, values):
    codec, x, keys = pycomm.codec(spec), VALUES[values], 1000
    parts = directions(x)
    # The deviation in the direction of a part, relative to its size: 0 is right.
    off = torch.stack([parts @ (decoded(codec, x, k) - x.double()) for k in range(keys)])
    off = off / parts.square().sum(dim=1)
    chance = SIGMAS * off.std(dim=0) / keys**0.5
    assert bool((off.mean(dim=0).abs() <= BIAS[spec] + chance).all()), off.mean(dim=0)


def test_every_codec_that_says_so_is_among_these():
    named = {pycomm.codec(spec).spec().split(":")[0] for spec in BIAS}
    assert {pycomm.codec(spec).name for spec in SPECS if pycomm.codec(spec).unbiased} <= named
    assert named <= set(CODECS)


# ------------------------------------------------------------------------------ limits of float32
# Near them the decoded result is never worse than zero.


N = 2048


def extremes() -> dict[str, torch.Tensor]:
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


EXTREMES = extremes()


@pytest.mark.parametrize("spec", [*SPECS, *ROTATIONS])
def test_what_arrives_is_not_worse_than_nothing(spec):
    codec = pycomm.codec(spec)
    for case in EXTREMES:
        with noting(f"case {case}"):
            check_that_it_is_not_worse_than_nothing(codec, case)


def check_that_it_is_not_worse_than_nothing(codec: Codec, case: str) -> None:
    x = EXTREMES[case]
    payload = codec.encode(x)
    got = codec.decode(payload, N)
    if not bool(got.isfinite().all()):
        # Formats of 16 bits end at 65504.
        assert "float16" in codec.spec()
        assert case in ("large", "huge")
        return
    error = (got.double() - x.double()).square().sum()
    assert float(error) <= float(x.double().square().sum()) * 1.0001
