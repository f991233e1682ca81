"""cast: properties beyond its bytes."""

from __future__ import annotations

import pytest
import torch

import pycomm
from tests.codecs.harness import never_sent, relative_error

NORMAL = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


# e4m3 is a known constant of the normal distribution, computed independently; 2 % as for quant. The
# others follow from the width of a step: u = 2^-11 (float16), 2^-8 (bfloat16), and the mean of
# 1/12 step^2 / value^2 over a binade lies between u^2 / 12 and u^2 / 3.
def test_error_of_e4m3_on_normal_values_is_the_known_constant():
    assert relative_error(pycomm.codec("fp8_e4m3"), NORMAL) == pytest.approx(6.81e-4, rel=0.02)


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


def test_overflow_of_float16_is_inf_so_that_the_loss_scaler_sees_it():
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


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_overflow_of_float8_is_seen_by_all_and_keeps_the_residual(name):
    codec = pycomm.codec(name)
    x, residual = NORMAL[:1024].clone(), NORMAL[1024:2048].clone()
    x[700] = float("inf")
    payload = codec.encode(x, residual=residual)
    hit = torch.arange(1024) // 256 == 2
    assert torch.equal(codec.decode(payload, 1024).isnan(), hit)
    assert torch.equal(residual[hit], NORMAL[1024:2048][hit])
    assert bool(residual.isfinite().all())


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_feedback_pays_everything_in_the_end(name):
    # Each step rounds p and the residual once, values below 8: 50 * 2 * 8 * 2^-24.
    assert never_sent(pycomm.codec(name), 1000) < 50 * 2 * 8 * 2.0**-24
