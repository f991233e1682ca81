"""eden: properties beyond its bytes: the paper's error, no bias, and fixed sizes."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _test
from pycomm.codecs.args import RandomKey
from pycomm.codecs.rotation import SIZES, hadamard, header, random_bits, rotate, unrotate
from tests.codecs.harness import NORMAL, code_and_decode, relative_error
from tests.extent import each_value

# The paper's, re-computed.
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


@pytest.mark.parametrize("bits", UNBIASED)
def test_the_other_scale_has_the_least_error(bits):
    error = relative_error(pycomm.codec(f"eden:bits={bits},scale=mmse"), NORMAL)
    # An unbiased estimate with error v shrinks to one with v / (1 + v).
    assert error == pytest.approx(UNBIASED[bits] / (1 + UNBIASED[bits]), rel=0.02)


@pytest.mark.parametrize("bits", UNBIASED)
def test_sizes_of_squares_do_not_matter(bits):
    codec, x = pycomm.codec(f"eden:bits={bits}"), NORMAL[:2048]
    plain = code_and_decode(codec, x)
    for power in (2.0**-90, 2.0**100):
        assert torch.equal(code_and_decode(codec, x * power), plain * power)


# ----------------------------------------------------------------------------------- the rotation
# It can be undone, keeps lengths, depends on the key.


SHORT = torch.randn(20000, generator=torch.Generator().manual_seed(0))
KEY = RandomKey(seed=0xFEDCBA9876543210, step=3, tensor=0x80000001)


@pytest.mark.parametrize("size", [32, 128, 1024])
def test_the_transform_is_hadamards(size):
    rows, matrix = torch.eye(size), torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    assert torch.equal(hadamard(rows), matrix)


@pytest.mark.parametrize("size", SIZES)
def test_a_rotation_can_be_undone(size):
    head = header(KEY, 5 * size, torch.device("cpu"))
    p = torch.randint(-8, 9, (3 * size - 7,), generator=torch.Generator().manual_seed(1)).float()
    # The error is some 20 roundings of 2^-24 of lengths near 200, shared by all values.
    bound = 20 * 2.0**-24 * float(p.norm())
    assert float((unrotate(rotate(p, head, size), head, p.numel()) - p).abs().max()) < bound


@pytest.mark.parametrize("size", SIZES)
def test_all_lengths_change_alike(size):
    head = header(KEY, 0, torch.device("cpu"))
    steps = 2 * (size.bit_length() - 1) if size < 1024 else size.bit_length() + 5
    want = 77 / 128 if steps % 2 == 0 else 77 / 64
    for p in (torch.randn(size, generator=torch.Generator().manual_seed(2)), torch.eye(size)[7]):
        longer = rotate(p, head, size).double().square().sum() / p.double().square().sum()
        assert float(longer) == pytest.approx(want, rel=1e-5)


def test_signs_are_words_of_the_core():
    head = header(KEY, 96, torch.device("cpu"))
    words = _test.random_words(KEY.seed, KEY.step, KEY.tensor, 2**62)
    assert head[:8].tolist() == list((words[1] << 32 | words[0]).to_bytes(8, "little"))
    drawn = _test.random_words(words[1] << 32 | words[0], 0, 0, 0)[3]
    assert random_bits(head, 32).tolist() == [drawn >> i & 1 for i in range(32)]


def test_key_and_index_change_the_signs():
    codec, x = pycomm.codec("eden:bits=4"), SHORT[:1024]
    keys = [RandomKey(), RandomKey(seed=1), RandomKey(step=1), RandomKey(tensor=1)]
    payloads = [codec.encode(x, key=key)[16:] for key in keys] + [codec.encode(x, index=1024)[16:]]
    assert len({bytes(payload.tolist()) for payload in payloads}) == len(payloads)
