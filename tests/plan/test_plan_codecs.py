"""Tests that codecs do what a plan assumes of them."""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm.plan.codecs import KNOWN, find

NUMEL = 1 << 20
FAMILIES = [find(name) for name in ("topk:0.001", "topk:0.1")]
CODECS = [*(coding for coding in KNOWN.values() if not coding.exact), *FAMILIES]


@pytest.mark.parametrize("coding", CODECS, ids=lambda coding: coding.name)
def test_bytes_and_errors_are_the_codecs_own(coding):
    codec = pycomm.codec(coding.name)
    payload = codec.encoded_bytes(NUMEL) / NUMEL
    assert coding.payload == pytest.approx(payload, rel=0.01)

    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    error = (codec.decode(codec.encode(x), NUMEL) - x).square().sum() / x.square().sum()
    # One sample of 2^20 values; measured spread of the error is below 1 %. fp16's depends on where
    # between two powers of two the values lie.
    assert coding.error == pytest.approx(float(error), rel=0.03)


@pytest.mark.parametrize("coding", CODECS, ids=lambda coding: coding.name)
def test_payloads_meet_as_the_codecs_say(coding):
    codec = pycomm.codec(coding.name)
    assert coding.combine == codec.combine
    assert coding.spec in (codec.spec(), "")


@pytest.mark.parametrize("name", ["topk:0", "topk:2", "topk:x", "int9", ""])
def test_a_codec_of_which_nothing_is_known_is_named(name):
    with pytest.raises(ValueError, match=name or "''"):
        find(name)
