"""sign: properties beyond its bytes: its error, and feedback without loss."""

from __future__ import annotations

import pytest
import torch

import pycomm
from tests.codecs.harness import NORMAL, code_and_decode

SPECS = ["sign", "sign:block=32", "sign:block=2048"]


@pytest.mark.parametrize("spec", SPECS)
def test_contracts_by_the_share_of_the_mean_magnitude(spec):
    codec = pycomm.codec(spec)
    x = NORMAL[: 64 * codec.block] * torch.linspace(0.1, 10, 64 * codec.block)
    rows, owed = x.view(-1, codec.block).double(), (x - code_and_decode(codec, x)).double()
    left = owed.view_as(rows).square().sum(1) / rows.square().sum(1)
    delta = rows.abs().mean(1).square() / rows.square().mean(1)
    # The documented identity in real numbers; float32 rounds the scale and each difference.
    torch.testing.assert_close(left, 1 - delta, rtol=1e-5, atol=0)


def test_a_block_is_its_mean_magnitude_with_signs():
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, 7.0])
    payload = pycomm.codec("sign").encode(x)
    assert payload[:4].view(torch.float32).item() == 2.0
    assert payload[4:].tolist() == [0b00010, 0, 0, 0]
    assert pycomm.codec("sign").decode(payload, 5).tolist() == [2.0, -2.0, 2.0, 2.0, 2.0]


def test_the_order_of_the_sum_is_that_of_the_page():
    # 1 is lost when added to 2^24 alone, and counts when two of them are added first.
    x = torch.zeros(32)
    x[[0, 1, 17]] = torch.tensor([2.0**24, 1.0, 1.0])
    payload = pycomm.codec("sign:block=32").encode(x)
    assert payload[:4].view(torch.float32).item() == (2.0**24 + 2) / 32
    x[[17, 16]] = torch.tensor([0.0, 1.0])
    payload = pycomm.codec("sign:block=32").encode(x)
    assert payload[:4].view(torch.float32).item() == 2.0**24 / 32
