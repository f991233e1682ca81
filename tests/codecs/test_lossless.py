"""lossless: properties beyond its bytes: exact values, smaller payloads, and safe decoding of
invalid ones."""

from __future__ import annotations

import pytest
import torch

import pycomm
from tests.codecs.cases import CASES
from tests.codecs.harness import NORMAL
from tests.codecs.test_contract import check, check_decode, everywhere, runner, same

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
