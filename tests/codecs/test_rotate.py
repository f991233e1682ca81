"""rotate: properties beyond its bytes: it is a rotation, it spreads outliers, and its payload alone
determines the inverse."""

from __future__ import annotations

import math

import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs.args import RandomKey
from pycomm.codecs.rotation import SIZES, hadamard, header, random_bits, rotate, unrotate

NORMAL = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
KEY = RandomKey(seed=0xFEDCBA9876543210, step=3, tensor=0x80000001)
SPECS = ["rotate+int4", "rotate:size=32+int8", "rotate:size=4096+sign:block=64"]


def relative_error(codec, x, **options) -> float:
    d = codec.decode(codec.encode(x, **options), x.numel()) - x
    return float(d.double().square().sum() / x.double().square().sum())


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
    # The inner codec is fp32; this is the same through C++.
    codec = pycomm.codec(f"rotate:size={size}+fp32")
    assert float((codec.decode(codec.encode(p), p.numel()) - p).abs().max()) < bound


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
    words = _C.random_words(KEY.seed, KEY.step, KEY.tensor, 2**62)
    assert head[:8].tolist() == list((words[1] << 32 | words[0]).to_bytes(8, "little"))
    drawn = _C.random_words(words[1] << 32 | words[0], 0, 0, 0)[3]
    assert random_bits(head, 32).tolist() == [drawn >> i & 1 for i in range(32)]


def test_one_large_value_no_longer_hides_the_others():
    x = NORMAL[: 1 << 14].clone()
    x[::128] = 100.0
    plain, rotated = pycomm.codec("int4"), pycomm.codec("rotate+int4")
    others = torch.arange(x.numel()) % 128 != 0
    lost = (plain.decode(plain.encode(x), x.numel()) - x)[others]
    kept = (rotated.decode(rotated.encode(x), x.numel()) - x)[others]
    assert float(lost.square().mean()) > 0.99  # int4 alone: all of them become zero
    assert relative_error(rotated, x) < 0.02
    assert float(kept.square().mean()) < 1.6  # spread over all: 2 % of an energy of 79 per value


@pytest.mark.parametrize("spec", SPECS)
def test_normal_values_keep_their_error(spec):
    codec = pycomm.codec(spec)
    # 3 %: the rotation of normal values is normal; the sample differs.
    assert relative_error(codec, NORMAL) == pytest.approx(
        relative_error(codec.inner, NORMAL), rel=0.03
    )


@pytest.mark.parametrize("spec", SPECS)
def test_parts_decode_as_the_whole(spec):
    codec, x = pycomm.codec(spec), NORMAL[:20000]
    whole = codec.decode(codec.encode(x, key=KEY), x.numel())
    cut = 2 * codec.granule
    first, last = x[:cut].clone(), x[cut:].clone()
    assert torch.equal(codec.decode(codec.encode(first, key=KEY), cut), whole[:cut])
    payload = codec.encode(last, key=KEY, index=cut)
    assert torch.equal(codec.decode(payload, last.numel()), whole[cut:])


def test_every_part_of_the_key_and_the_index_change_the_signs():
    codec, x = pycomm.codec("rotate+int8"), NORMAL[:1024]
    keys = [RandomKey(), RandomKey(seed=1), RandomKey(step=1), RandomKey(tensor=1)]
    payloads = [codec.encode(x, key=key)[16:] for key in keys] + [codec.encode(x, index=1024)[16:]]
    assert len({bytes(payload.tolist()) for payload in payloads}) == len(payloads)


def test_rotations_of_many_steps_have_no_bias():
    codec, x = pycomm.codec("rotate+sign"), NORMAL[:1024]
    steps = 1000
    total = torch.zeros(1024, dtype=torch.float64)
    for step in range(steps):
        total += codec.decode(codec.encode(x, key=RandomKey(step=step)), 1024)
    # The L1 scale shrinks: what remains is 2/pi of x in the direction of x, with noise around it.
    # 5.5 sigma of 1024 means, each of a variance of (2/pi)(1 - 2/pi) = 0.23 of the mean square.
    mean = total / steps
    along = float(mean @ x.double() / x.double().square().sum())
    assert along == pytest.approx(2 / math.pi, abs=0.03)
    assert float((mean - along * x).abs().max()) < 5.5 * (0.23 * 1.5 / steps) ** 0.5


def test_feedback_pays_everything_in_the_end():
    codec, g = pycomm.codec("rotate+int4"), torch.Generator().manual_seed(3)
    residual, sent, truth = (
        torch.zeros(3000),
        torch.zeros(3000).double(),
        torch.zeros(3000).double(),
    )
    for step in range(50):
        x = torch.randn(3000, generator=g)
        payload = codec.encode(x, residual=residual, key=RandomKey(step=step))
        sent += codec.decode(payload, 3000)
        truth += x
    # Each step rounds p and the residual once, values below 8: 50 * 2 * 8 * 2^-24.
    assert float((sent + residual - truth).abs().max()) < 50 * 2 * 8 * 2.0**-24


@pytest.mark.parametrize("spec", [*SPECS, "rotate+fp16"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_overflow_is_seen_by_all_and_keeps_the_residual(spec, bad):
    codec = pycomm.codec(spec)
    x, residual = NORMAL[:8192].clone(), NORMAL[8192:16384].clone()
    x[700] = bad
    payload = codec.encode(x, residual=residual)
    hit = torch.arange(8192) // codec.granule == 700 // codec.granule
    decoded = codec.decode(payload, 8192)
    assert not decoded[hit].isfinite().any()
    assert torch.equal(residual[hit], NORMAL[8192:16384][hit])
    assert bool(residual.isfinite().all())
