"""cast: properties beyond its bytes."""

from __future__ import annotations

import pytest
import torch

import pycomm
from tests.codecs.harness import NORMAL, relative_error


@pytest.mark.parametrize(
    ("name", "unit"), [("fp16", 2.0**-11), ("bf16", 2.0**-8), ("fp8_e5m2", 2.0**-3)]
)
def test_error_on_normal_values_is_that_of_the_mantissa(name, unit):
    assert unit**2 / 12 < relative_error(pycomm.codec(name), NORMAL) < unit**2 / 3


def test_float32_is_the_identity():
    codec, residual = pycomm.codec("fp32"), torch.zeros(1000)
    x = NORMAL[:1000]
    payload = codec.encode(x, residual=residual)
    assert torch.equal(payload.view(torch.float32), x)
    assert not residual.any()


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_types_are_torchs(name, dtype):
    payload = pycomm.codec(name).encode(NORMAL[:1001])
    assert torch.equal(payload[:2002].view(dtype), NORMAL[:1001].to(dtype))


def test_float16_overflows_to_inf():
    codec = pycomm.codec("fp16")
    x = torch.tensor([65504.0, 65519.0, 65520.0, -1e30, float("inf"), float("nan")])
    residual = torch.full((6,), 0.25)
    values = codec.decode(codec.encode(x, residual=residual), 6)
    assert values[:5].tolist() == [65504.0, 65504.0, float("inf"), float("-inf"), float("inf")]
    assert values[5].isnan()
    # An overflow is a skipped step, so its residual stays. The other residuals are exact.
    assert residual.tolist() == [0.25, 15.25, 0.25, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_float8_codes_of_finite_blocks_never_overflow(name):
    codec = pycomm.codec(name)
    # Each block has one magnitude, over all exponents: p * inv is close to the top.
    g = torch.Generator().manual_seed(0)
    mantissa = 1 + torch.rand(20_000, generator=g)
    amax = mantissa * 2.0 ** torch.randint(-100, 127, (20_000,), generator=g).float()
    x = amax.repeat_interleave(codec.block)
    codes = codec.encode(x)[4 * 20_000 :]
    top = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}[name]
    assert codes.unique().tolist() == [top]
