"""Rates of links mean what their page says."""

from __future__ import annotations

import pytest

from pycomm.bench.lab.rates import Rate, parse


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("1gbit", [[Rate(0, "1gbit", "1gbit")]]),
        ("unlimited", [[Rate(0, None, None)]]),
        ("1.5mbit/unlimited", [[Rate(0, "1.5mbit", None)]]),
        (
            "0s:1gbit 30s:8mbit/2mbps 60.5s:1gbit",
            [[Rate(0, "1gbit", "1gbit"), Rate(30, "8mbit", "2mbps"), Rate(60.5, "1gbit", "1gbit")]],
        ),
        ("1gbit,9kbit 2s:8bit", [[Rate(0, "1gbit", "1gbit")],
                                 [Rate(0, "9kbit", "9kbit"), Rate(2, "8bit", "8bit")]]),
    ],
)  # fmt: skip
def test_rates(text, links):
    assert parse(text) == links


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "rate ''"),
        ("1gbit/", "rate ''"),
        ("gbit", "rate 'gbit'"),
        ("1gbit; rm x", "rate '1gbit;'"),
        ("1gbit,", "rate ''"),
        ("1gbit 1mbit", "'1mbit' in the rate"),
        ("1gbit 30s:1mbit 20s:1gbit", "'20s:1gbit' in the rate"),
    ],
)
def test_what_is_wrong_is_quoted(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse(text)
