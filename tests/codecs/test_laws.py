"""Laws of all codecs beyond their bytes: errors, feedback, overflow, and invalid payloads."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm
from pycomm.codecs import Cast, Eden, Quant, Sign
from pycomm.codecs.base import Codec
from pycomm.codecs.implementations import Reference
from pycomm.codecs.mx import ELEMENTS
from tests.codecs.harness import NORMAL, never_sent, relative_error, same
from tests.extent import each_value

BITS = [1, 2, 3, 4]
FORMS = [f"mx:format={form}" for form in ELEMENTS]
VALUES = ["float32", "int8", "bins2"]


# Constants of the normal distribution, computed independently, to the known digits. 2 %: a sample
# of 2^20 values has blocks whose largest value varies; means of blocks and 10^4 chosen values less.
@pytest.mark.parametrize(
    ("spec", "constant", "rel"),
    [
        ("fp8_e4m3", 6.81e-4, 0.02),
        ("int8", 4.86e-5, 0.02),
        ("int8:rounding=stochastic", 2 * 4.86e-5, 0.02),
        ("int4", 1.38e-2, 0.02),
        ("mxfp8", 8.6e-4, 0.02),
        ("mxfp4", 1.3e-2, 0.02),
        ("nvfp4", 9.0e-3, 0.02),
        ("sign", 1 - 2 / math.pi, 0.01),
        ("topk:0.01", 0.915, 0.01),  # 1 % of the values carry 8.5 % of the energy
    ],
)
def test_error_of_normal_values_is_the_constant(spec, constant, rel):
    assert relative_error(pycomm.codec(spec), NORMAL) == pytest.approx(constant, rel=rel)


# The largest value that occurs in 50 steps, with what is owed.
PAID = {
    **dict.fromkeys(["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "eden2:scale=mmse"], 8),
    **{f"{n}:rounding={r}": 8 for n in ("int8", "int4") for r in ("nearest", "stochastic")},
    **dict.fromkeys(FORMS, 16),
    **{f"topk:0.05,values={values}": 32 for values in VALUES},
    "sign:block=64": 64,
}


@pytest.mark.parametrize("spec", PAID)
def test_feedback_pays_everything_in_the_end(spec):
    # Each step rounds p and the residual once.
    assert never_sent(pycomm.codec(spec), 3000) < 50 * 2 * PAID[spec] * 2.0**-24


def block_of(codec: Codec, numel: int) -> int:
    """Return how many values one that is not finite makes NaN."""
    if isinstance(codec, Eden):
        return codec.size
    if isinstance(codec, (Cast, Quant, Sign)):
        return codec.block
    return codec.granule or numel


OVERFLOWS = [
    *("fp8_e4m3", "fp8_e5m2", "sign", "sign:block=32", "sign:block=2048"),
    *("int8", "int8:block=32", "int4", "int4:block=32", "int7", "int3", "int2"),
    *FORMS,
    *(f"eden:bits={bits}" for bits in BITS),
    *(f"topk:0.01,values={v},indices={i}" for v in VALUES for i in ("int32", "int12")),
]


@each_value
@pytest.mark.parametrize("spec", OVERFLOWS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), 2.0**127])
def test_an_overflow_is_seen_by_all_and_keeps_the_residual(spec, bad):
    codec = pycomm.codec(spec)
    if bad == 2.0**127 and codec.name not in ("quant", "mx"):
        return  # it has codes for that value
    x, before = NORMAL[:9000].clone(), NORMAL[9000:18_000].clone()
    residual = before.clone()
    x[5000] = bad
    payload = codec.encode(x, residual=residual)
    block = block_of(codec, x.numel())
    hit = torch.arange(x.numel()) // block == 5000 // block
    assert torch.equal(codec.decode(payload, x.numel()).isnan(), hit)
    assert torch.equal(residual[hit], before[hit])
    assert bool(residual.isfinite().all())


# Those whose payloads hold sizes and places, and some others.
PLACES = [
    *("lossless", "lossless:bfloat16"),
    *(f"topk:0.1,values={v},indices={i}" for v in VALUES for i in ("int32", "int12")),
    *("fp8_e5m2", "int3", "int8:block=2048", "mx:fp6_e2m3", "nvfp4", "sign:block=32"),
    *("eden:bits=3,size=4096", "eden:bits=4,size=64"),
]


@pytest.mark.parametrize("spec", PLACES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_wrong_payload_is_read_within_its_bounds(spec, data):
    """Random bytes are nearly always invalid; these are valid payloads with a few changes."""
    codec = pycomm.codec(spec)
    numel = data.draw(st.integers(1, 5000))
    payload = codec.encode(NORMAL[:numel])
    if data.draw(st.booleans()):  # nothing of it is right
        seed = data.draw(st.integers(0, 999))
        payload.random_(256, generator=torch.Generator().manual_seed(seed))
    for _ in range(data.draw(st.integers(0, 6)) if payload.numel() else 0):
        place = data.draw(st.sampled_from([*range(4), *range(payload.numel())]))
        payload[place] = data.draw(st.integers(0, 255))
    # The copy has the exact size, so that the address sanitizer detects reads past its end.
    guard, copy = torch.full((numel + 64,), 7.0), payload.clone()
    codec.native.decode(copy.data_ptr(), guard[32:].data_ptr(), numel)
    want = torch.empty(numel)
    Reference().decode(codec, payload, want, add=False)
    assert same(guard[32:-32], want)
    codec.native.decode_add(copy.data_ptr(), guard[32:].data_ptr(), numel)
    assert bool((guard[:32] == 7).all())
    assert bool((guard[-32:] == 7).all())
