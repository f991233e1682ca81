"""ternary: properties beyond its bytes: sums are exact integers; no bias; a known variance."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.errors import Error
from tests.codecs.cases import CASES, amax_of
from tests.codecs.test_contract import everywhere, runner, same
from tests.extent import each_pair

# Any bits, edges of scales, and sizes around blocks and rows.
MEASURED = (
    *("any-bits", "wide-range", "tiny", "just-not-tiny", "other-nans", "residual-not-finite"),
    *("normal-1", "normal-33", "normal-257", "normal-5001", "one-largest", "denormals-and-one"),
)
NORMAL = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))


def contributions(codec, xs, step=0):
    """Return the payloads of all ranks, and the amax that they agreed on."""
    amax = torch.stack([codec.compute_amax(x) for x in xs]).amax(0)
    keys = [RandomKey(seed=5, step=step, rank=r, ranks=len(xs)) for r in range(len(xs))]
    payloads = [codec.encode(x, key=key, amax=amax) for x, key in zip(xs, keys, strict=True)]
    return payloads, amax


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 12, 127])
def test_a_sum_travels_without_loss(ranks):
    codec = pycomm.codec(f"ternary:ranks={ranks},block=64")
    # Equal values far from zero bring the sums to the top.
    xs = [NORMAL[:1000].sign() + 0.01 * NORMAL[r : 1000 + r] for r in range(ranks)]
    payloads, amax = contributions(codec, xs)
    total, integers = torch.zeros(1000), torch.zeros(1000, dtype=torch.int64)
    scale = payloads[0][: 4 * 16].view(torch.float32).repeat_interleave(64)[:1000]
    for payload in payloads:
        value = codec.decode(payload, 1000)
        integers += (value / scale).to(torch.int64)
        codec.decode_add(payload, total)
    assert torch.equal(total.double(), integers * scale.double())
    residual = torch.zeros(1000)
    key = RandomKey(seed=5, ranks=ranks)
    summed = codec.encode(total, key=key, residual=residual, amax=amax, summed=True)
    assert torch.equal(codec.decode(summed, 1000), total)
    assert not residual.any()
    assert int(integers.abs().max()) == ranks


def test_no_bias_and_the_variance_of_the_page():
    codec, x = pycomm.codec("ternary:ranks=1,block=256"), NORMAL[:256]
    steps = 4000
    total, squares = torch.zeros(256).double(), torch.zeros(256).double()
    for step in range(steps):
        value = codec.decode(codec.encode(x, key=RandomKey(seed=5, step=step)), 256).double()
        total += value
        squares += (value - x).square()
    scale = float(codec.encode(x)[:4].view(torch.float32))
    assert 0 <= scale / float(x.abs().max()) - 1 < 2.0**-7
    variance = scale * x.abs().double() - x.double().square()
    # 5.5 sigma of 256 means.
    assert bool(((total / steps - x).abs() <= 5.5 * (variance / steps).sqrt() + 1e-6).all())
    # A mean of 4000 * 256 squares.
    assert float(squares.sum() / steps) == pytest.approx(float(variance.sum()), rel=0.02)


def test_ranks_round_apart_though_they_share_the_seed():
    codec = pycomm.codec("ternary")
    payloads, _ = contributions(codec, [NORMAL[:4096]] * 7)
    assert len({bytes(payload.tolist()) for payload in payloads}) == 7
    again, _ = contributions(codec, [NORMAL[:4096]] * 7)
    assert all(torch.equal(a, b) for a, b in zip(payloads, again, strict=True))


@pytest.mark.parametrize(("ranks", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (63, 7)])
def test_bits_are_as_many_as_the_integers_need(ranks, bits):
    assert pycomm.codec(f"ternary:ranks={ranks}").bits == bits
    assert pycomm.codec(f"ternary:ranks={ranks}").encoded_bytes(2048) == 4 + 256 * bits


def test_more_ranks_than_fit_are_an_error():
    codec, key = pycomm.codec("ternary:ranks=3"), RandomKey(ranks=4)
    with pytest.raises(Error, match=r"no sum of 4 ranks: use ranks=4"):
        codec.encode(NORMAL[:100], key=key)
    with pytest.raises(ValueError, match=r"no sum of 4 ranks: use ranks=4"):
        codec.reference_encode(NORMAL[:100], key, 0, codec.compute_amax(NORMAL[:100]))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 2.0**120])
def test_overflow_on_one_rank_is_seen_by_all_and_keeps_the_residual(bad):
    codec = pycomm.codec("ternary:block=256")
    x, residual = NORMAL[:1024].clone(), NORMAL[1024:2048].clone()
    spoiled = x.clone()
    spoiled[700] = bad
    amax = torch.maximum(codec.compute_amax(x, residual), codec.compute_amax(spoiled))
    payload = codec.encode(x, residual=residual, amax=amax)
    hit = torch.arange(1024) // 256 == 700 // 256
    assert torch.equal(codec.decode(payload, 1024).isnan(), hit)
    assert torch.equal(residual[hit], NORMAL[1024:2048][hit])


@each_pair
@everywhere
@pytest.mark.parametrize("block", [64, 1024])
@pytest.mark.parametrize("case", MEASURED)
def test_measures_and_sums_are_those_of_the_reference(case, block, kind, device):
    codec, key = pycomm.codec(f"ternary:block={block}"), RandomKey(seed=1, rank=1, ranks=3)
    run, (x, residual) = runner(codec, kind, device), CASES[case]
    want = amax_of(codec, x, residual)
    x_there, residual_there = x.to(device), residual.to(device)
    for p, r in ((x_there, residual_there), (x_there + residual_there, None)):
        measure = torch.full_like(want, 1234.5, device=device)
        run.compute_amax(codec, p, r, measure)
        assert torch.equal(measure.cpu(), want)
    out = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8, device=device)
    left = torch.empty_like(residual_there)
    run.encode(codec, EncodeArgs(x_there, out, residual_there, left, key, 0, measure, True))
    payload = codec.reference_encode_sum(x + residual, key, 0, want)
    assert torch.equal(out.cpu(), payload)
    value = codec.reference_decode(payload, x.numel())
    assert same(left, torch.where(value.isfinite(), x + residual - value, residual))
    out.fill_(0xA5)
    run.encode(codec, EncodeArgs(x_there + residual_there, out, None, None, key, 0, measure, True))
    assert torch.equal(out.cpu(), payload)


@everywhere
def test_sums_beyond_the_top_are_clipped(kind, device):
    """They cannot arise from contributions that share their amax."""
    codec, key = pycomm.codec("ternary:ranks=3,block=64"), RandomKey(seed=1, ranks=3)
    x = torch.linspace(-20, 20, 500)
    amax = torch.ones(8)
    out = torch.empty(codec.encoded_bytes(500), dtype=torch.uint8, device=device)
    args = EncodeArgs(x.to(device), out, None, None, key, 0, amax.to(device), True)
    runner(codec, kind, device).encode(codec, args)
    assert torch.equal(out.cpu(), codec.reference_encode_sum(x, key, 0, amax))
    assert codec.decode(out.cpu(), 500).unique().tolist() == [-3, -2, -1, 0, 1, 2, 3]


def test_native_wants_a_measure_for_each_block():
    x, out = torch.zeros(300), torch.empty(1)
    with pytest.raises(Error, match="must share their amax"):
        _C.Codec("ternary").encode(x.data_ptr(), 300, out.data_ptr())
