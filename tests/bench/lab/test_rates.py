"""Rates of links mean what their page says."""

from __future__ import annotations

import pytest

from pycomm.bench.lab.rates import Rate, parse


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("1gbit", [Rate("1gbit", "1gbit")]),
        ("unlimited", [Rate(None, None)]),
        ("1.5mbit/unlimited", [Rate("1.5mbit", None)]),
        ("1gbit,9kbit/2mbit", [Rate("1gbit", "1gbit"), Rate("9kbit", "2mbit")]),
    ],
)
def test_rates(text, links):
    assert parse(text) == links


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "rate ''"),
        ("1gbit/", "rate ''"),
        ("gbit", "rate 'gbit'"),
        ("1gbit; rm x", "rate '1gbit; rm x'"),
        ("1gbit,", "rate ''"),
        ("2mbps", "rate '2mbps'"),  # of tc, which means bytes
        ("1gbit 30s:1mbit", "rate '1gbit 30s:1mbit'"),
    ],
)
def test_what_is_wrong_is_quoted(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse(text)
