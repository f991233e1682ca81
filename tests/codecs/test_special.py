"""Properties of single codecs beyond the bytes of the golden files: a section for each codec."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _test
from pycomm.codecs import MX
from pycomm.codecs.args import RandomKey
from pycomm.codecs.mx import ELEMENTS
from pycomm.codecs.philox import random_words
from tests.codecs.cases import CASES
from tests.codecs.harness import NORMAL, relative_error
from tests.codecs.test_contract import check, check_decode, everywhere, runner, same
from tests.extent import each_value

# ------------------------------------------------------------------------------------------- quant
# Bounds, and random words.


@pytest.mark.parametrize("index", [0, 4, 1 << 20, (1 << 34) - 4, 1 << 34, (1 << 40) + 8])
def test_random_words_are_those_of_the_core(index):
    key = RandomKey(seed=0xFEDCBA9876543210, step=3, tensor=0x80000001)
    words = random_words(key, index, 7, torch.device("cpu")).tolist()
    groups = [_test.random_words(key.seed, key.step, key.tensor, index // 4 + g) for g in (0, 1)]
    assert words == [*groups[0], *groups[1]][:7]


# --------------------------------------------------------------------------------------------- cast


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


# --------------------------------------------------------------------------------------------- eden
# The paper's errors, re-computed.
UNBIASED = {1: 0.5708, 2: 0.1331, 3: 0.03578, 4: 0.00959}


# 4 %: a rotation of 1024 values is not quite normal, less so if many of them are zero.
@each_value
@pytest.mark.parametrize("bits", UNBIASED)
@pytest.mark.parametrize("what", ["normal", "sparse", "heavy"])
def test_error_is_that_of_the_paper_whatever_the_values(bits, what):
    x = NORMAL
    if what == "sparse":
        # Three of four values are zero. With a single one all rotated magnitudes would be equal.
        x = x * (torch.arange(x.numel()) % 4 == 0)
    if what == "heavy":
        x = x * x.abs()
    error = relative_error(pycomm.codec(f"eden:bits={bits}"), x)
    assert error == pytest.approx(UNBIASED[bits], rel=0.04)


# ----------------------------------------------------------------------------------------- lossless
# Exact values, smaller payloads, and safe decoding of invalid ones.


used = pycomm.codec("lossless").used_bytes


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(case):
    x = CASES[case][0]
    exact, short = pycomm.codec("lossless"), pycomm.codec("lossless:bfloat16")
    assert same(exact.decode(exact.encode(x), x.numel()), x)
    assert same(short.decode(short.encode(x), x.numel()), x.to(torch.bfloat16).float())


def test_used_bytes_are_those_that_a_reader_needs():
    lossless, int4 = pycomm.codec("lossless"), pycomm.codec("int4")
    payload = lossless.encode(NORMAL[:5000])
    cut = torch.zeros_like(payload)
    cut[: used(payload)] = payload[: used(payload)]
    assert same(lossless.decode(cut, 5000), NORMAL[:5000])
    assert int4.used_bytes(int4.encode(NORMAL[:5000])) == int4.encoded_bytes(5000)
    payload[:4] = 255
    with pytest.raises(ValueError, match="says that it has 4294967295 bytes"):
        lossless.used_bytes(payload)


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 27.3), ("bfloat16", 11.3)])
@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_bits_per_normal_value_are_those_of_the_page(dtype, bits, size):
    payload = pycomm.codec(f"lossless:{dtype}").encode(size * NORMAL)
    assert used(payload) * 8 / NORMAL.numel() == pytest.approx(bits, abs=0.1)


def test_equal_exponents_take_no_stream():
    x = 1 + torch.rand(10_000, generator=torch.Generator().manual_seed(1)) * 0.9
    assert used(pycomm.codec("lossless:bfloat16").encode(x)) == 16 + 10_000 + 128


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arbitrary_exponents_give_the_largest_payload(dtype):
    g = torch.Generator().manual_seed(2)
    x = torch.randint(-(2**31), 2**31, (5001,), generator=g).to(torch.int32).view(torch.float32)
    codec = pycomm.codec(f"lossless:{dtype}")
    assert used(codec.encode(x)) == codec.encoded_bytes(5001)


@everywhere
def test_many_blocks_find_their_places(kind, device):
    """Several warps, programs or threads take part in the prefix sum, with an odd end."""
    g = torch.Generator().manual_seed(3)
    offset = (torch.rand(20_003, generator=g).log() * -3).floor().clamp(max=90)
    x = (1 + torch.rand(20_003, generator=g) * 0.9) * torch.exp2(-offset)
    check("lossless", kind, device, x, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spread", [0, 1, 2, 5, 10, 30])
def test_same_bytes_at_every_width(dtype, spread):
    """Exponents become rarer with their distance from the largest, with a few far away."""
    g = torch.Generator().manual_seed(spread)
    offset = (torch.rand(5001, generator=g).log() * -spread).floor().clamp(max=90)
    x = (1 + torch.rand(5001, generator=g) * 0.9) * torch.exp2(-offset)
    check(f"lossless:{dtype}", "native", "cpu", x, torch.zeros_like(x))


@everywhere
def test_heads_that_lie_are_read_alike(kind, device):
    """Valid payloads get one wrong header field at a time; test_contract.py has random bytes."""
    codec, numel = pycomm.codec("lossless:bfloat16"), 3000
    honest = codec.encode(NORMAL[:numel])
    heads = sum(codec.sections(numel)[:3])
    end = used(honest)
    lies = [(heads + place, byte) for place in (1, 2, 13, 35) for byte in (0, 1, 2, 7, 9, 255)]
    lies += [(place, byte) for place in range(4) for byte in (0, 3, 255)]
    lies += [(0, end - 1 & 0xFF), (1, (end >> 8) - 1)]
    for place, byte in lies[:: 1 if kind == "native" else 5]:
        payload = honest.clone()
        payload[place] = byte
        check_decode(codec, runner(codec, kind, device), device, payload, numel)


# ----------------------------------------------------------------------------------------------- mx
# The formats of the specification, and bounds.


FORMATS = list(ELEMENTS)


@pytest.mark.parametrize(
    ("name", "dtype"), [("mxfp8", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)]
)
def test_elements_of_eight_bits_are_torchs(name, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    payload = torch.cat((torch.full((8,), 127, dtype=torch.uint8), codes))
    got, want = pycomm.codec(name).decode(payload, 256), codes.view(dtype).to(torch.float32)
    assert torch.equal(got.nan_to_num(0.125), want.nan_to_num(0.125))
    assert torch.equal(got.isnan(), want.isnan())


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
