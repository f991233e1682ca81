"""mx: properties beyond its bytes: the formats of the specification, and bounds."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm.codecs import MX
from pycomm.codecs.block import pack_bits
from pycomm.codecs.mx import ELEMENTS
from tests.codecs.harness import NORMAL, code_and_decode

FORMATS = list(ELEMENTS)
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_elements_of_four_bits_are_those_of_the_specification():
    codec = pycomm.codec("mxfp4")
    payload = torch.cat(
        (
            torch.tensor([127, 0, 0, 0], dtype=torch.uint8),
            pack_bits(torch.arange(16, dtype=torch.uint8), 4),
        )
    )
    assert codec.decode(payload, 16).tolist() == E2M1 + [-value for value in E2M1]


@pytest.mark.parametrize(
    ("name", "dtype"), [("mxfp8", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)]
)
def test_elements_of_eight_bits_are_torchs(name, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    payload = torch.cat((torch.full((8,), 127, dtype=torch.uint8), codes))
    got, want = pycomm.codec(name).decode(payload, 256), codes.view(dtype).to(torch.float32)
    assert torch.equal(got.nan_to_num(0.125), want.nan_to_num(0.125))
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize(
    ("name", "least", "step", "largest"),
    [("mxfp6", 0.125, 0.5, 7.5), ("mxfp6_e3m2", 0.0625, 4, 28)],
)
def test_elements_of_six_bits_are_those_of_the_specification(name, least, step, largest):
    codes = torch.arange(32, dtype=torch.uint8)
    payload = torch.cat((torch.tensor([127, 0, 0, 0], dtype=torch.uint8), pack_bits(codes, 6)))
    values = pycomm.codec(name).decode(payload, 32)
    assert values[1] == least
    assert values[31] == largest
    assert values[31] - values[30] == step
    assert torch.equal(values, values.sort().values)


@pytest.mark.parametrize("exponent", [-127, -100, 0, 126])
def test_scales_are_powers_of_two_by_their_exponent(exponent):
    payload = torch.tensor([127 + exponent, 0, 0, 0, 0x02, 0, 0, 0], dtype=torch.uint8)
    assert pycomm.codec("mxfp4").decode(payload, 1).item() == 2.0**exponent


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "nvfp4"])
def test_ceil_is_the_least_scale_that_saturates_nothing(form):
    top = ELEMENTS[form].top
    g = torch.Generator().manual_seed(0)
    x = (1 + torch.rand(1000, generator=g)) * 2.0 ** torch.randint(-80, 100, (1000,), generator=g)
    x[:2] = torch.tensor([top, 4 * top])
    rows = torch.zeros(1000, 32)
    rows[:, 0] = x
    floor, ceil = (
        2.0 ** (MX(format=form, scale=rule).encode(rows)[:1000].double() - 127)
        for rule in ("floor", "ceil")
    )
    assert bool((x.double() <= top * ceil).all())
    assert bool((x.double() > top * ceil / 2).all())
    assert torch.equal(floor, 2.0 ** (x.double().log2().floor() - torch.tensor(top).log2().floor()))


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "nvfp4"])
def test_no_value_is_off_by_more_than_half_its_step(form):
    codec = MX(format=form, scale="ceil")
    x = NORMAL[:32000]
    element = codec.element
    scale = 2.0 ** (codec.encode(x)[:1000].float() - 127).repeat_interleave(32)
    binade = (x / scale).abs().clamp(min=2.0**element.least).log2().floor()
    step = 2.0 ** (binade - element.mantissa) * scale
    off = (code_and_decode(codec, x) - x).abs()
    assert bool((off <= step / 2).all())


# With E4M3's half of a sixteenth a scale is too small by at most 1/17 of it, so what saturates at 6
# is off by 6/16 at most; the step at 6 is 2. The rest is half a step of the codes.
def test_nvfp4_is_off_by_no_more_than_a_step_of_its_block():
    x = NORMAL[: 1 << 16]
    amax = x.view(-1, 16).abs().amax(1)
    off = (code_and_decode(pycomm.codec("nvfp4"), x) - x).view(-1, 16).abs().amax(1)
    assert bool((off <= amax / 6 * (1 + 1 / 16) + 1e-6).all())


def test_nvfp4_uses_the_whole_range_of_both_scales():
    x = torch.zeros(4096)
    x[0], x[16], x[2048] = 3.0, 3.0 / 64, 1e-20
    payload = pycomm.codec("nvfp4").encode(x)
    assert payload[:8].view(torch.float32).tolist() == [
        (torch.tensor(3.0) / 2688).item(),
        (torch.tensor(1e-20) / 2688).item(),
    ]
    scales = payload[8 : 8 + 256].view(torch.float8_e4m3fn).float()
    assert scales[[0, 1, 2, 128]].tolist() == [448, 7, 0, 448]
    assert torch.allclose(code_and_decode(pycomm.codec("nvfp4"), x), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scale", ["floor", "ceil"])
def test_the_largest_finite_values_stay_finite(form, scale):
    codec = MX(format=form, scale="" if form == "nvfp4" else scale)
    x = torch.full((64,), 2.0**127 * (1 - 2.0**-24))
    assert bool(code_and_decode(codec, x).isfinite().all())
