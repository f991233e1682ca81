"""The limit of what a channel sends: a queue that overflows sets one, and random loss does not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import mean

import pytest

from tests.compiling import ROOT, compile_cpp

RATE = 24e6  # bytes a second


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    """Return a function from phases (rate, wanted, loss, windows) to what each window saw."""
    program = tmp_path_factory.mktemp("limit") / "rate_limit"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
    compile_cpp(Path(__file__).with_name("rate_limit_main.cpp"), program, *flags)

    def run(*phases):
        words = [str(word) for phase in phases for word in phase]
        done = subprocess.run([program, *words], stdout=subprocess.PIPE, text=True, check=True)
        return [tuple(map(float, line.split())) for line in done.stdout.splitlines()]

    return run


def offered(seen):
    return [window[0] for window in seen]


def delivered(seen):
    return [window[1] for window in seen]


def lost(seen):
    return [window[2] for window in seen]


@pytest.mark.parametrize("loss", [0, 0.01])
@pytest.mark.parametrize("wanted", [1.1, 1.3, 3])
def test_a_queue_that_overflows_all_the_time_is_left_alone(windows, wanted, loss):
    seen = windows((RATE, wanted * RATE, loss, 100))
    assert lost(seen)[0] > 0.05
    later = seen[10:]
    assert mean(lost(later)) < 0.025 + loss
    assert mean(delivered(later)) > 0.95 * RATE


def test_a_single_window_with_losses_changes_nothing(windows):
    seen = windows((RATE, 2 * RATE, 0, 1), (RATE, 0.9 * RATE, 0, 5), (RATE, 2 * RATE, 0, 1))
    assert offered(seen)[-1] == 2 * RATE


@pytest.mark.parametrize("loss", [0.01, 0.02, 0.024, 0.025, 0.026, 0.03, 0.04, 0.1])
@pytest.mark.parametrize("wanted", [0.1, 0.5])
def test_a_lossy_path_is_not_slowed_down(windows, loss, wanted):
    """Near the limit of what counts as too much, some windows lose more than that, some less."""
    wanted *= RATE
    seen = offered(windows((RATE, wanted, loss, 2000)))
    assert mean(seen) > 0.95 * wanted
    assert mean(seen[-500:]) > 0.9 * wanted


def test_a_path_that_becomes_faster_is_found(windows):
    seen = windows((RATE, 1.3 * RATE, 0, 30), (4 * RATE, 5 * RATE, 0, 12))
    assert delivered(seen)[29] < 1.05 * RATE
    assert delivered(seen)[-1] > 3 * RATE


def test_a_path_that_becomes_slower_is_followed(windows):
    seen = windows((RATE, 1.3 * RATE, 0, 30), (RATE / 3, 1.3 * RATE, 0, 30))
    later = seen[40:]
    assert mean(lost(later)) < 0.05
    assert mean(delivered(later)) > 0.9 * RATE / 3


def test_connections_that_are_made_again_count_from_zero(windows):
    """With the first window the new counts would be a second one with losses."""
    once = (RATE, 2 * RATE, 0, 1)
    seen = windows(once, (-RATE, 0.9 * RATE, 0, 1), once)
    assert offered(seen)[-1] == 2 * RATE
