"""quant: properties beyond its bytes: bounds, no bias, and feedback without loss."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _test
from pycomm.codecs import Quant
from pycomm.codecs.args import RandomKey
from pycomm.codecs.philox import random_words
from tests.codecs.cases import KEYS
from tests.codecs.harness import NORMAL, code_and_decode
from tests.extent import each_value

SPECS = ["int8", "int8:block=32", "int4", "int4:block=32", "int7", "int3", "int2"]


@each_value
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_no_value_is_off_by_more_than_its_step(bits, rounding):
    codec = Quant(bits=bits, rounding=rounding)
    x = 0.25 + NORMAL[: 100 * codec.block]
    amax = x.view(-1, codec.block).abs().amax(1)
    off = (code_and_decode(codec, x) - x).view(-1, codec.block).abs()
    # 2^-20 of the largest value: the product and code * scale are rounded.
    step, slack = amax / codec.top, 2.0**-20 * amax
    assert bool((off <= (step * (0.5 if rounding == "nearest" else 1) + slack)[:, None]).all())


def test_two_bits_are_three_levels():
    codec = pycomm.codec("int2")
    x = torch.tensor([2.0, 1.01, 0.99, 0.0, -0.99, -1.01, -2.0])
    assert code_and_decode(codec, x).tolist() == [2, 2, 0, 0, 0, -2, -2]
    assert len(code_and_decode(codec, NORMAL[:64]).unique()) == 3


def test_odd_widths_are_a_little_endian_bit_string():
    payload = pycomm.codec("int3").encode(torch.tensor([1.0, 2.0, 3.0, -1.0, -2.0, -3.0]))
    # 001 010 011 111 110 101, from the lowest bit up.
    string = 1 | 2 << 3 | 3 << 6 | 7 << 9 | 6 << 12 | 5 << 15
    assert bytes(payload[4:].tolist()) == string.to_bytes(4, "little")


def test_key_and_index_change_the_rounding():
    codec = pycomm.codec("int8:rounding=stochastic")
    x = NORMAL[:256]
    payloads = [codec.encode(x, key=key) for key in KEYS] + [codec.encode(x, index=256)]
    assert len({bytes(payload.tolist()) for payload in payloads}) == len(payloads)
    assert torch.equal(
        codec.encode(x, key=RandomKey(3, 4, 5)), codec.encode(x, key=RandomKey(3, 4, 5))
    )


@pytest.mark.parametrize("index", [0, 4, 1 << 20, (1 << 34) - 4, 1 << 34, (1 << 40) + 8])
def test_random_words_are_those_of_the_core(index):
    key = RandomKey(seed=0xFEDCBA9876543210, step=3, tensor=0x80000001)
    words = random_words(key, index, 7, torch.device("cpu")).tolist()
    groups = [_test.random_words(key.seed, key.step, key.tensor, index // 4 + g) for g in (0, 1)]
    assert words == [*groups[0], *groups[1]][:7]


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_too_small_to_travel_stays_in_the_residual(spec):
    x, residual = torch.full((300,), 2.0**-101), torch.zeros(300)
    codec = pycomm.codec(spec)
    assert not codec.encode(x, residual=residual).any()
    assert torch.equal(residual, x)
