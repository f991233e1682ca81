"""randomk: properties beyond its bytes: no bias, the documented variance, and exact sums."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.implementations import Reference
from pycomm.errors import Error
from tests.codecs.test_contract import check, everywhere, runner, same
from tests.extent import each_value, part

NORMAL = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
SPECS = ["randomk:10", "randomk:every=4,block=64", "randomk:1"]


def code_and_decode(codec, x, **options):
    return codec.decode(codec.encode(x, **options), x.numel())


def small_integers(numel: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, (numel,), generator=g).float()


@pytest.mark.parametrize("spec", SPECS)
def test_one_block_of_each_stretch_travels(spec):
    codec = pycomm.codec(spec)
    x = NORMAL[: 100 * codec.granule]
    decoded = code_and_decode(codec, x, key=RandomKey(seed=5))
    blocks = (decoded != 0).view(100, codec.every, codec.block)
    assert bool((blocks.all(dim=2).sum(dim=1) == 1).all())
    assert int(blocks.sum()) == 100 * codec.block
    assert torch.equal(decoded[decoded != 0], x[decoded != 0])


@each_value
@pytest.mark.parametrize("spec", ["randomk:10,scale=unbiased", "randomk:4,block=8,scale=unbiased"])
@pytest.mark.parametrize("numel", [320, 333])
def test_no_bias_and_the_variance_of_the_page(spec, numel):
    codec = pycomm.codec(spec)
    x = NORMAL[:numel]
    steps = 4000
    total, square = torch.zeros(numel).double(), 0.0
    for step in range(steps):
        decoded = code_and_decode(codec, x, key=RandomKey(seed=9, step=step))
        total += decoded
        square += float((decoded - x).double().square().sum())
    length = torch.full((numel,), codec.every)
    rest = numel % codec.granule
    if rest:
        length[numel - rest :] = -(-rest // codec.block)
    omega = (length - 1).double()
    # A value is m x with probability 1 / m: its variance is (m - 1) x^2. 5 sigma of 333 means.
    bound = 5 * omega.sqrt() * x.abs() / steps**0.5
    assert bool(((total / steps - x).abs() <= bound + 1e-6).all())
    # The mean of 4000 squared errors of dozens of stretches each: 5 % is more than 5 sigma.
    assert square / steps == pytest.approx(float((omega * x.square()).sum()), rel=0.05)


def test_each_block_is_chosen_as_often_as_the_others():
    codec = pycomm.codec("randomk:7")
    decoded = code_and_decode(codec, torch.ones(7 * 100_000), key=RandomKey(seed=1))
    counts = decoded.view(-1, 7).sum(dim=0)
    # Binomial, 10^5 draws at 1/7: sigma is 111.
    assert bool(((counts - 100_000 / 7).abs() < 5 * 111).all())


@each_value
@everywhere
@pytest.mark.parametrize("every", [1, 3, 15, 16, 50, 65536])
def test_same_bytes_of_any_length_of_stretches(every, kind, device):
    """On GPUs 1 to 32 lanes share a stretch, by its length."""
    check(f"randomk:{every},scale=unbiased", kind, device, NORMAL[:1003], NORMAL[1003:2006])


@each_value
@everywhere
@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        (spec, ranks)
        for place, spec in enumerate(["randomk:3,scale=unbiased", "randomk:5,block=16"])
        for ranks in part(range(2, 9), 3, place)
    ],
)
def test_sums_of_contributions_are_encoded_without_loss(spec, ranks, kind, device):
    codec = pycomm.codec(spec)
    run = runner(codec, kind, device)
    key = RandomKey(seed=77, step=3, tensor=2)
    total = torch.zeros(1003, device=device)
    for rank in range(ranks):
        x = small_integers(1003, rank).to(device)
        payload = torch.empty(codec.encoded_bytes(1003), dtype=torch.uint8, device=device)
        run.encode(codec, EncodeArgs(x, payload, None, None, key, 0))
        run.decode_add(codec, payload, total)
    run.encode(codec, EncodeArgs(total, payload, None, None, key, 0, summed=True))
    got = torch.empty_like(total)
    run.decode(codec, payload, got)
    assert torch.equal(got, total)
    x = sum(small_integers(1003, rank) for rank in range(ranks))
    want = code_and_decode(codec, x, key=key)
    assert torch.equal(got.cpu(), want)  # small integers: sums and products are exact


def test_another_key_chooses_other_values():
    codec = pycomm.codec("randomk:10")
    x = NORMAL[:1000]
    keys = [RandomKey(), RandomKey(seed=1), RandomKey(step=1), RandomKey(tensor=1)]
    places = {tuple((code_and_decode(codec, x, key=key) != 0).tolist()) for key in keys}
    places.add(tuple((code_and_decode(codec, x, index=10) != 0).tolist()))
    assert len(places) == 5


def test_feedback_pays_everything_in_the_end():
    codec = pycomm.codec("randomk:10")
    residual = torch.zeros(1000)
    sent, truth = torch.zeros(1000), torch.zeros(1000)
    for step in range(100):
        x = small_integers(1000, step)
        payload = codec.encode(x, residual=residual, key=RandomKey(step=step))
        codec.decode_add(payload, sent)
        truth += x
    assert torch.equal(sent + residual, truth)
    assert float(residual.abs().max()) < float(truth.abs().max())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("spec", SPECS)
def test_overflow_is_seen_by_all_and_keeps_the_residual(spec, bad):
    codec = pycomm.codec(spec)
    x, residual = NORMAL[:1024].clone(), NORMAL[1024:2048].clone()
    x[700] = bad
    payload = codec.encode(x, residual=residual)
    hit = torch.arange(1024) // codec.granule == 700 // codec.granule
    assert torch.equal(codec.decode(payload, 1024).isnan(), hit)
    assert torch.equal(residual[hit], NORMAL[1024:2048][hit])
    assert bool(residual.isfinite().all())


def test_any_header_chooses_inside_the_tensor():
    codec = pycomm.codec("randomk:10,block=3")
    payload = codec.encode(NORMAL[:1000])
    payload[:24] = 255
    guard = torch.full((1064,), 7.0)
    codec.native.decode(payload.data_ptr(), guard[32:].data_ptr(), 1000)
    want = torch.empty(1000)
    Reference().decode(codec, payload, want)
    assert same(guard[32:-32], want)
    assert bool((guard[:32] == 7).all())
    assert bool((guard[-32:] == 7).all())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("every=0", "every=0: use 1 to 65536"),
        ("block=5000", "block=5000: use 1 to 4096"),
        ("scale=some", "scale=some"),
    ],
)
def test_wrong_options_are_explained(options, says):
    with pytest.raises(ValueError, match=says):
        pycomm.codec(f"randomk:{options}")
    with pytest.raises(Error, match=says):
        _C.Codec(f"randomk:{options}")


def test_only_what_sums_encodes_a_sum():
    with pytest.raises(ValueError, match="quant: combine is recode: leave out summed="):
        pycomm.codec("int8").encode(NORMAL[:10], summed=True)
