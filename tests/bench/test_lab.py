"""Rates of links mean what their page says."""

from __future__ import annotations

import subprocess
import sys

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


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rate", "1gbit@0@200%"], "cannot read the share '200%': want 0 to 100%"),
        (["--rate", "1gbit@-3ms"], "cannot read the round trip '-3ms': want a time with a unit"),
        (["--rate", "1gbit@61s"], "the round trip 61s is impossible: want 0 to 60s"),
        (["--rate", "1gbit,1gbit@1ms"], "with delay or loss a node has one link"),
        (["--nodes", "two"], "invalid int value: 'two'"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(options, problem):
    command = [sys.executable, "-m", "pycomm.bench.netlab", *options, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "netlab: " in done.stderr
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1
