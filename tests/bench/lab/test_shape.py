"""Delays, losses and matrices as netlab takes them, and input that it refuses in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pycomm.bench.lab.shape import Shape, bits, changed, matrix


def test_words_become_numbers():
    words = {"delay": "500us", "loss": "0.1%", "rate": "20mbit"}
    assert changed(Shape(), words) == Shape(0.0005, 0.001, 20e6)
    assert changed(Shape(delay=1.0), {"rate": "unlimited"}) == Shape(delay=1.0)
    assert (bits("1gbit"), bits(None)) == (1e9, 0)


def test_later_lines_of_a_matrix_count_more():
    text = """
    # two sites
    0-1 delay=5ms
    *>2 loss=1%  # what comes to node 2
    0>2 delay=100ms loss=0
    """
    base = Shape(delay=0.02)
    assert matrix(3, base, text) == {
        (0, 1): Shape(delay=0.005),
        (1, 0): Shape(delay=0.005),
        (0, 2): Shape(delay=0.1),
        (1, 2): Shape(delay=0.02, loss=0.01),
        (2, 0): base,
        (2, 1): base,
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("0-3 delay=1ms", "no node 3: the nodes are 0 to 2"),
        ("0 1 delay=1ms", "cannot read '0 1 delay=1ms'"),
        ("0-1", "cannot read '0-1'"),
        ("0-1 colour=red", "a link has no 'colour'"),
        ("0-1 loss=2", "the loss 2 is no share: want 0% to 100%"),
    ],
)
def test_a_bad_line_is_named(line, problem):
    with pytest.raises(ValueError, match="matrix, line 2: ") as caught:
        matrix(3, Shape(), "0-1 delay=1ms\n" + line)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--loss", "200%"], "the loss 200% is no share: want 0% to 100%"),
        (["--loss=-1%"], "the loss -1% is no share: want 0% to 100%"),
        (["--delay=-3ms"], "cannot read the delay '-3ms': want a time with a unit, such as 30ms"),
        (["--delay", "61s"], "the delay 61s is impossible: want 0 to 60s"),
        (["--delay", "3"], "cannot read the delay '3': want a time with a unit, such as 30ms"),
        (["--loss", "nan"], "the loss nan is no share"),
        (["--delay", "1ms", "--rate", "1gbit,1gbit"], "with delay or loss a node has one link"),
        (["--matrix", "/no/such/file"], "No such file or directory"),
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
