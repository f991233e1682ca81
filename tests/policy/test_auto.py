"""codec="auto" with a clock that the test makes: it finds the fastest, and is not fooled."""

from __future__ import annotations

import random

import pytest

from pycomm.policy import Policy
from pycomm.policy.auto import Auto, Candidate, Trial
from pycomm.policy.steering import Fastest

MB = 1 << 20
CANDIDATES = [
    Candidate("fp32", 100 * MB),
    Candidate("int8", 26 * MB),
    Candidate("bf16", 50 * MB),
    Candidate("int4", 13 * MB),
]
BYTES = {c.name: c.bytes for c in CANDIDATES}
CODING = {"fp32": 0.0, "bf16": 0.01, "int8": 0.02, "int4": 0.02}


class Clock:
    """Seconds of a step on a link: communication that hides behind computing, and what does not."""

    def __init__(self, bytes_per_second: float, compute: float = 0.2, noise: float = 0.0) -> None:
        self.rate, self.compute, self.noise = bytes_per_second, compute, noise
        self.random = random.Random(0)

    def step(self, codec: str) -> float:
        exposed = max(0.0, 2 * BYTES[codec] / self.rate - 0.5 * self.compute)
        seconds = self.compute + CODING[codec] + exposed
        return seconds * (1 + self.noise * self.random.expovariate(1))


def run(auto: Auto, clock: Clock, steps: int) -> list[str]:
    """The codecs of the steps."""
    used = []
    for _ in range(steps):
        used.append(auto.codec)
        middle = auto.note(clock.step(auto.codec))
        if middle is not None:
            auto.judge([middle, 0.9 * middle])
    return used


def test_a_slow_link_gets_the_smallest_and_never_tries_exact():
    auto = Auto(CANDIDATES, Trial())
    used = run(auto, Clock(12.5 * MB), 100)
    assert auto.settled
    assert auto.codec == "int4"
    assert "fp32" not in used
    assert "fp32 at least" in auto.reason


def test_a_link_on_which_bytes_are_free_goes_back_to_exact():
    auto = Auto(CANDIDATES, Trial())
    run(auto, Clock(1e12), 100)
    assert auto.codec == "fp32"


def test_between_them_the_finest_that_is_as_fast_wins():
    # int8 and int4 both hide behind computing; bf16 does not.
    auto = Auto(CANDIDATES, Trial())
    run(auto, Clock(60 * MB, compute=2.0), 100)
    assert auto.codec == "int8"


def test_what_is_slow_to_code_says_nothing_about_larger_ones():
    # A sparse codec that takes longer than exact steps do.
    sparse = [Candidate("powersgd", MB, dense=False), Candidate("topk", 2 * MB, dense=False)]
    auto = Auto([*CANDIDATES, *sparse], Trial())
    seconds = {"powersgd": 0.2, "topk": 0.9, "int4": 0.21, "int8": 0.18, "bf16": 0.15, "fp32": 0.1}
    for _ in range(100):
        middle = auto.note(seconds[auto.codec])
        if middle is not None:
            auto.judge([middle])
    assert auto.codec == "fp32"


@pytest.mark.parametrize(("rate", "best"), [(12.5 * MB, "int4"), (1e12, "fp32")])
def test_noise_does_not_change_the_choice(rate, best):
    # Steps that take up to three times as long, now and then; a median of five bears two of them.
    clock = Clock(rate)
    auto = Auto(CANDIDATES, Trial())
    for step in range(100):
        outlier = step % 4 == 0
        middle = auto.note(clock.step(auto.codec) * (3 if outlier else 1))
        if middle is not None:
            auto.judge([middle])
    assert auto.codec == best


def test_a_choice_stays_among_equals():
    trial = Trial(again=50)
    auto = Auto(CANDIDATES, trial)
    clock = Clock(60 * MB, compute=2.0, noise=0.005)
    chosen = set()
    for _ in range(20):
        run(auto, clock, 50)
        if auto.settled:
            chosen.add(auto.codec)
    assert chosen == {"int8"}


def test_the_slowest_rank_counts():
    auto = Auto([Candidate("fp32", 100), Candidate("int8", 26)], Trial(first=0, skip=0, steps=1))
    assert auto.note(1.0) == 1.0
    auto.judge([1.0, 1.0])
    assert auto.note(0.9) == 0.9
    auto.judge([0.9, 2.0])  # exact is slow on the second rank
    assert auto.codec == "int8"


def test_it_looks_again_when_the_link_has_changed():
    auto = Auto(CANDIDATES, Trial(again=50))
    run(auto, Clock(12.5 * MB), 60)
    assert auto.codec == "int4"
    run(auto, Clock(1e12), 120)
    assert auto.codec == "fp32"


def test_a_saved_choice_goes_on():
    auto = Auto(CANDIDATES, Trial())
    run(auto, Clock(12.5 * MB), 100)
    other = Auto(CANDIDATES, Trial())
    other.load_state_dict(auto.state_dict())
    assert other.settled
    assert other.codec == auto.codec
    assert "checkpoint" in other.reason
    fresh = Auto(CANDIDATES[:1], Trial())
    fresh.load_state_dict(auto.state_dict())  # int4 is no candidate there
    assert not fresh.settled


def names(text: str) -> set[str]:
    return {codec.spec().partition(",block")[0] for codec in Fastest(Policy.of(text)).codecs}


def test_candidates_are_accurate_enough_and_errors_that_cancel_count_less():
    usual = {"cast:dtype=float32", "cast:dtype=bfloat16", "quant:bits=8", "quant:bits=4"}
    assert {n for n in names("auto") if "eden" not in n} == usual
    assert any("eden:bits=2" in n for n in names("auto"))
    assert not any("eden:bits=1" in n for n in names("auto"))
    assert any("eden:bits=1" in n for n in names("auto error=1"))
    assert any("topk" in n for n in names("auto error=1"))
    assert not any("quant:bits=4" in n or "eden" in n for n in names("auto error=0.01"))
