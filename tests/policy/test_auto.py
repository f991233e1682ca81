"""codec="auto" with a clock that the test makes: it finds the fastest, and is not fooled."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections import Counter

import pytest

from pycomm import monitor
from pycomm.policy import Policy
from pycomm.policy import auto as constants
from pycomm.policy.auto import Auto, accurate_enough, likely

MB = 1 << 20
BYTES = {"fp32": 100 * MB, "int8": 26 * MB, "bf16": 50 * MB, "int4": 13 * MB}
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


def take(auto: Auto, seconds: float, *others: float) -> None:
    """Take a step; `others` are what the other ranks have measured when a turn is over."""
    middle = auto.note(seconds)
    if middle is not None:
        auto.judge([middle, *others])


def run(auto: Auto, clock: Clock, steps: int) -> list[str]:
    """The codecs of the steps."""
    used = []
    for _ in range(steps):
        used.append(auto.codec)
        seconds = clock.step(auto.codec)
        take(auto, seconds, 0.9 * seconds)
    return used


def test_a_slow_link_gets_the_smallest_codec():
    auto = Auto(BYTES)
    used = run(auto, Clock(12.5 * MB), 200)
    assert not auto.trying
    assert auto.codec == "int4"
    assert 0 < used.count("fp32") <= 10
    assert "fp32 " in auto.reason


def test_between_them_the_finest_that_is_as_fast_wins():
    # int8 and int4 both hide behind computing; bf16 does not.
    auto = Auto(BYTES)
    run(auto, Clock(60 * MB, compute=2.0), 200)
    assert auto.codec == "int8"


def test_a_slow_codec_says_nothing_of_larger_ones():
    # A sparse codec that takes longer than exact steps do.
    auto = Auto({**BYTES, "powersgd": MB, "topk": 2 * MB})
    seconds = {"powersgd": 0.2, "topk": 0.9, "int4": 0.21, "int8": 0.18, "bf16": 0.15, "fp32": 0.1}
    for _ in range(300):
        take(auto, seconds[auto.codec])
    assert auto.codec == "fp32"


class Load:
    """Seconds of steps on a machine that others use: each step's own noise, and spells of load."""

    def __init__(self, seed: int, noise: float, often: float, factor: float = 2.0) -> None:
        self.random = random.Random(seed)
        self.noise, self.often, self.factor = noise, often, factor
        self.left = 0

    def __call__(self, seconds: float) -> float:
        if self.left == 0 and self.random.random() < self.often:
            self.left = self.random.randint(1, 20)
        self.left = max(0, self.left - 1)
        slower = self.factor if self.left else 1.0
        return seconds * slower * (1 + self.noise * self.random.expovariate(1))


def choices(seconds: dict[str, float], noise: float, often: float) -> tuple[Counter[str], int]:
    """What auto chooses in a hundred trainings; and the most exact steps that it took to know."""
    chosen: Counter[str] = Counter()
    most = 0
    for seed in range(100):
        auto, load, exact = Auto(BYTES), Load(seed, noise, often), 0
        while auto.trying:
            exact += auto.codec == "fp32"
            take(auto, load(seconds[auto.codec]))
        chosen[auto.codec] += 1
        most = max(most, exact)
    return chosen, most


LOADS = [(0.1, 0.0), (0.3, 0.0), (0.1, 0.02), (0.3, 0.03)]


@pytest.mark.parametrize(("noise", "often"), LOADS)
def test_changing_load_never_counts_against_exact(noise, often):
    # Shared memory: codecs take longer than the bytes that they save.
    chosen, _ = choices({"fp32": 1.0, "bf16": 1.03, "int8": 1.05, "int4": 1.06}, noise, often)
    assert chosen["fp32"] >= 97
    # All the same: there is nothing to be won, so what is left to chance is rare.
    chosen, _ = choices(dict.fromkeys(BYTES, 1.0), noise, often)
    assert chosen["fp32"] >= 93


@pytest.mark.parametrize(("noise", "often"), LOADS)
def test_a_slow_link_is_found_in_spite_of_load(noise, often):
    chosen, most = choices({"fp32": 8.0, "bf16": 4.0, "int8": 2.2, "int4": 1.0}, noise, often)
    assert chosen["int4"] >= 97
    assert most <= 10


def test_a_clear_gain_is_found_in_noise():
    chosen, _ = choices({"fp32": 1.4, "bf16": 1.2, "int8": 1.0, "int4": 1.0}, 0.1, 0.0)
    assert chosen["int8"] >= 97


def test_slower_steps_meet_all_candidates():
    # Every step takes 1 % more than the one before: over a trial, five times as long.
    for seconds, best in (
        ({"fp32": 1.0, "int4": 1.1}, "fp32"),
        ({"fp32": 1.2, "int4": 1.0}, "int4"),
    ):
        auto = Auto({"fp32": 100, "int4": 13})
        for step in range(200):
            if not auto.trying:
                break
            take(auto, seconds[auto.codec] * 1.01**step)
        assert auto.codec == best


def test_the_test_of_ranks_is_wilcoxons():
    # Values of the exact distribution, as tables have them (Wilcoxon 1945; n = 8, n = 5).
    assert likely([1.0] * 8) == 1 / 256
    assert likely([-1.0, 2, 3, 4, 5, 6, 7, 8]) == 2 / 256
    assert likely([1.0, -2, 3, 4, 5, 6, 7, 8]) == 3 / 256
    assert likely([1.0, 2, -3, 4, 5, 6, 7, 8]) == 5 / 256
    assert likely([-1.0] * 5) == 1.0
    assert likely([0.0] * 5) == 1.0
    assert likely([1.0, 2, 3, 4, 5]) == 1 / 32


def test_a_choice_stays_among_equals(monkeypatch):
    monkeypatch.setattr(constants, "_AGAIN", 50)
    auto = Auto(BYTES)
    clock = Clock(60 * MB, compute=2.0, noise=0.005)
    chosen = set()
    for _ in range(40):
        run(auto, clock, 50)
        if not auto.trying:
            chosen.add(auto.codec)
    assert chosen == {"int8"}


@pytest.mark.parametrize(
    ("others", "best"),
    [
        # Exact is slow on the second rank, int8 on none.
        ({"fp32": [2.0], "int8": [0.5]}, "int8"),
        # On the first rank int8 is twice as fast; the others wait for the second.
        ({"fp32": [1.0, 1.0], "int8": [1.1, 0.5]}, "fp32"),
    ],
)
def test_the_slowest_rank_counts(others, best):
    auto = Auto({"fp32": 100, "int8": 26})
    while auto.trying:
        take(auto, 1.0 if auto.codec == "fp32" else 0.5, *others[auto.codec])
    assert auto.codec == best


def test_it_looks_again_now_and_then(monkeypatch):
    monkeypatch.setattr(constants, "_AGAIN", 50)
    auto = Auto(BYTES)
    run(auto, Clock(12.5 * MB), 150)
    assert auto.codec == "int4"
    run(auto, Clock(1e12), 300)
    assert auto.codec == "fp32"


@pytest.fixture
def watching(monkeypatch):
    """Let nothing but the time of steps start new trials."""
    monkeypatch.setattr(constants, "_AGAIN", 10**6)
    monkeypatch.setattr(constants, "_WATCH", 20)


def test_a_changed_step_time_starts_new_trials(watching):
    auto = Auto(BYTES)
    run(auto, Clock(1e12), 200)
    assert auto.codec == "fp32"
    run(auto, Clock(12.5 * MB), 200)  # the link has become slow
    assert auto.codec == "int4"
    assert "fp32" not in run(auto, Clock(12.5 * MB), 500)  # and stays so
    run(auto, Clock(1e12), 300)
    assert auto.codec == "fp32"


def test_one_slow_stretch_is_no_change(watching):
    auto = Auto(BYTES)
    run(auto, Clock(1e12), 200)
    # Of two watches one at most is slow at the median, and one is, wherever they begin.
    used = run(auto, Clock(12.5 * MB), 19) + run(auto, Clock(1e12), 100)
    assert set(used) == {"fp32"}


def test_trials_become_rarer_while_nothing_changes(monkeypatch):
    monkeypatch.setattr(constants, "_AGAIN", 50)
    auto = Auto(BYTES)
    used = run(auto, Clock(60 * MB, compute=2.0), 4000)
    # 50, 100, 200, 400, 800, 800 ... steps between trials of about a hundred.
    assert used.count("int8") > 3000


def test_a_saved_choice_goes_on():
    auto = Auto(BYTES)
    run(auto, Clock(12.5 * MB), 200)
    other = Auto(BYTES)
    other.load_state_dict(auto.state_dict())
    assert not other.trying
    assert other.codec == auto.codec
    assert "checkpoint" in other.reason
    fresh = Auto({"fp32": 100})
    fresh.load_state_dict(auto.state_dict())  # int4 is no candidate there
    assert fresh.trying


def names(text: str) -> set[str]:
    return {codec.spec().partition(",block")[0] for codec in accurate_enough(Policy.of(text))}


def test_candidates_are_accurate_enough():
    usual = {"cast:dtype=float32", "cast:dtype=bfloat16", "quant:bits=8", "quant:bits=4"}
    assert {n for n in names("auto") if "eden" not in n} == usual
    assert any("eden:bits=2" in n for n in names("auto"))
    assert not any("eden:bits=1" in n for n in names("auto"))
    assert any("eden:bits=1" in n for n in names("auto error=1"))
    assert any("topk" in n for n in names("auto error=1"))
    assert not any("quant:bits=4" in n or "eden" in n for n in names("auto error=0.01"))


# ------------------------------------------------------------------------------------------ monitor
# Tests of the monitor in each of its output forms.


class Model:
    """Something to watch."""

    def __init__(self, step: int = 7, **known: float) -> None:
        group = monitor.Group("int4", 'because of "x"', parameters=2, values=800, payload_bytes=400)
        missing = dict.fromkeys(("step_seconds", "error", "cosine", "coding", "residual"))
        self.shown = monitor.MonitorReport(
            step=step,
            payload_bytes=400,
            plain_bytes=3200,
            overflows=1,
            checked=len(known),
            check_every=16,
            groups=(group,),
            events=("step 5: something has changed",),
            **{**missing, **known},
        )
        monitor.watch(self)

    def report(self) -> monitor.MonitorReport:
        return self.shown


@pytest.fixture
def model():
    return Model(step_seconds=0.25, error=0.1, cosine=0.99, coding=0.05, residual=0.2)


def number_of(model: Model) -> int:
    return next(n for n, report in monitor.snapshot().items() if report is model.shown)


def test_a_snapshot_has_every_model_that_lives(model):
    other = Model()
    assert number_of(other) > number_of(model)
    assert monitor.snapshot()[number_of(model)].ratio == 8.0
    gone = number_of(other)
    del other
    gc.collect()
    assert gone not in monitor.snapshot()


def test_text_is_for_people(model):
    text = monitor.text()
    assert f"model {number_of(model)}: step 7, 0.25 s a step" in text
    assert "(8.0 times less), 1 overflows" in text
    assert "error up to 0.1, cosine at least 0.99" in text
    assert 'int4 (because of "x"): 2 parameters, 800 values' in text
    assert "step 5: something has changed" in text


def test_numbers_are_a_line_for_a_board(model):
    numbers = model.shown.numbers()
    assert numbers["pycomm/ratio"] == 8.0
    assert numbers["pycomm/error"] == 0.1
    assert all(type(number) is float for number in numbers.values())
    unmeasured = Model().shown.numbers("a/")
    assert "a/error" not in unmeasured  # not measured is not 0
    assert unmeasured["a/step"] == 7.0


def test_a_total_says_what_gradients_took():
    total = monitor.Total()
    assert total.text() == ""
    total.add(250_000, 1_000_000, 0.0)
    total.add(250_000, 1_000_000, 1.5)
    assert total.text() == ("2 steps in 1.5 s: gradients of 2 MB were coded in 500 kB, 1.5 MB less")


def test_the_end_of_a_process_tells_totals_once():
    code = """
from pycomm import monitor
from pycomm.log import tell
for steps in (0, 2, 1):
    total = monitor.Total()
    for _ in range(steps):
        total.add(250_000, 1_000_000, 0.5)
    monitor.tell_at_exit(total, tell)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    line = "2 models, 3 steps in 1.0 s: gradients of 3 MB were coded in 750 kB, 2.25 MB less"
    assert done.stderr == f"pycomm: {line}\n"
