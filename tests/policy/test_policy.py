"""Policies: rules, schedules and texts; what auto chooses; whom the quality guard throws out."""

from __future__ import annotations

import doctest
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from math import inf, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from pycomm import monitor
from pycomm.codecs import ALIASES, codec, short_text
from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec
from pycomm.policy import PROTECT, Decision, Guard, Parameter, Policy, Rule, rules
from pycomm.policy import auto as constants
from pycomm.policy.auto import Auto, accurate_enough, likely
from pycomm.policy.checks import Checks, Quality, qualities
from pycomm.policy.quality import nominal_error, reduced_error
from tests.codecs.cases import SPECS
from tests.extent import FULL

WEIGHT = Parameter("layer.weight", (64, 64), torch.float32)
BIAS = Parameter("layer.bias", (4096,), torch.float32)


def chosen(policy: Policy, parameter: Parameter = WEIGHT, **step: int) -> str:
    return policy.decide(parameter, **step).codec.spec()


def test_norms_biases_and_small_ones_stay_exact():
    policy = Policy("int4")
    assert chosen(policy) == codec("int4").spec()
    assert policy.decide(BIAS).exact
    assert policy.decide(Parameter("small", (30, 30), torch.float32)).exact


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [
        (torch.float64, "float64", 8),
        (torch.complex128, "complex128", 8),  # each of two reals
        (torch.complex64, "fp32", 4),
        (torch.float32, "fp32", 4),
        (torch.bfloat16, "fp32", 4),
    ],
)
def test_the_form_of_exact_values_is_what_travels(dtype, name, size):
    found = Policy("fp32").decide(Parameter("layer.weight", (64, 64, 2), dtype))
    assert (found.form, found.encoded_bytes) == (name, size * 64 * 64 * 2)
    assert f": {name}, " in str(found)


@pytest.mark.parametrize(
    "condition",
    [
        {"name": "*.weight"},
        {"min_numel": 4096},
        {"max_numel": 4096},
        {"max_dims": 2},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_every_condition_of_a_rule_counts(condition):
    policy = Policy("int4", (Rule(codec="int8", **condition),))
    assert chosen(policy) == codec("int8").spec()
    others = {
        "name": Parameter("layer.bias", (64, 64), torch.float32),
        "min_numel": Parameter("layer.weight", (63, 65), torch.float32),
        "max_numel": Parameter("layer.weight", (64, 65), torch.float32),
        "max_dims": Parameter("layer.weight", (16, 16, 16), torch.float32),
        "dtype": Parameter("layer.weight", (64, 64), torch.bfloat16),
    }
    (name,) = condition
    assert chosen(policy, others[name]) == codec("int4").spec()


def test_the_first_rule_that_matches_wins():
    rules = (Rule(codec="fp16", name="layer.*"), Rule(codec="bf16", name="*"))
    assert chosen(Policy("int8", rules)) == codec("fp16").spec()


def test_warm_up_is_exact_and_ends():
    policy = Policy("int8", warmup=3)
    assert [policy.decide(WEIGHT, s).exact for s in (1, 3, 4)] == [True, True, False]


def test_a_schedule_holds_in_whatever_order_it_is_written():
    turns = [(200, "int8"), (100, "bf16"), (300, "fp32")]
    policy = Policy("int4", schedule=tuple(turns))
    specs = [codec(c).spec() for c in ("int4", "bf16", "int8", "fp32")]
    assert [chosen(policy, step=at) for at in (99, 100, 250, 999)] == specs
    assert policy == Policy("int4", schedule=tuple(sorted(turns)))  # ranks agree on it, too
    text = " ".join(["int4", *(f"{at}:{spec}" for at, spec in turns)])
    assert Policy.of(text) == policy


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (((100, "int8"), (100, "fp32")), "two codecs begin at 100"),
        (((-1, "int8"),), "-1 for int8"),
        (((1.5, "int8"),), "1.5 for int8"),
        ((("100", "int8"),), "'100' for int8"),
    ],
)
def test_an_ambiguous_schedule_is_refused(schedule, text):
    with pytest.raises(ValueError, match=text):
        Policy("int4", schedule=schedule)


@pytest.mark.parametrize("given", ["none", Policy("int8", (Rule(codec="none"),)), "none 9:int8"])
def test_none_is_a_codec_wherever_one_is_named(given):
    decision = Policy.of(given).decide(WEIGHT)
    assert decision.exact
    assert decision.encoded_bytes == 4 * WEIGHT.numel
    assert short_text(decision.codec) == "fp32"


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("int8", Policy("int8")),
        ("quant:bits=4,block=64", Policy("quant:bits=4,block=64")),
        ("auto", Policy("auto")),
        ("auto error=0.5", Policy("auto", error=0.5)),
        ("int4 warmup=100", Policy("int4", warmup=100)),
        ("fp32 100:int8 1000:quant:bits=4,block=64", None),
        ("int8 guard=off", Policy("int8", guard=None)),
    ],
)
def test_texts(text, policy):
    if policy is None:
        policy = Policy("fp32", schedule=((100, "int8"), (1000, "quant:bits=4,block=64")))
    assert Policy.of(text) == policy
    assert Policy.of(policy) is policy
    assert Policy.of(codec("int8")) == Policy(codec("int8"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the text is empty"),
        ("int9", "unknown codec 'int9'"),
        ("int8 int4", "'int4' in 'int8 int4' is none of warmup="),
        ("int8 warmup=x", "warmup='x' is not a number"),
        ("int8 warmup=-1", "give a number of steps"),
        ("int8 warmup=1 warmup=2", "warmup is given twice"),
        ("int8 100:int9", "unknown codec 'int9'"),
        ("auto 100:int8", "a schedule and auto both choose codecs"),
        ("int8 budget=4", "'budget=4' in 'int8 budget=4' is none of warmup="),
        ("int8 error=0.1", "error=0.1 bounds what auto chooses, and the codec is int8"),
        ("auto error=0", "error=0.0 must be above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        Policy.of(text).decide(WEIGHT)


def test_the_protection_is_a_rule_as_others_are():
    assert Policy().rules == PROTECT
    assert not Policy("int8", ()).decide(BIAS).exact


# ---------------------------------------------------------------------------------- documentation
# The examples of docs/policy.md and of docstrings do what they say.


PAGE = Path(__file__).parents[2] / "docs" / "policy.md"


@pytest.mark.parametrize("module", [rules, monitor], ids=lambda m: m.__name__)
def test_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_examples(monkeypatch):
    # Other tests may have left models and groups in this process.
    monkeypatch.setattr(monitor, "_watched", {})
    monkeypatch.setattr(monitor, "_groups", lambda: iter(()))
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted >= 8
    assert result.failed == 0


def test_the_codecs_of_the_page_on_migrating_exist():
    text = (PAGE.parent / "migrating.md").read_text()
    text, _, earlier = text.partition("## From earlier versions of pycomm")
    # Of its rows, "was | now", the first cell names codecs that are gone.
    text += "\n".join(f"| {row.split(' | ', 1)[1]}" for row in earlier.splitlines() if " | " in row)
    named = r'(?:codec=|codec\(|model, )"([^"]+)"|\| `"([^"`]+)"`'
    found = {a or b for a, b in re.findall(named, text)}
    assert len(found) > 10
    for name in sorted(found - {"auto"}):
        rules.Policy.of(name)


# ------------------------------------------------------------------------------------------ auto
# With a clock that the test makes it finds the fastest, and is not fooled.


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


def test_a_slow_codec_says_nothing_of_larger_ones():
    # A sparse codec that takes longer than exact steps do.
    auto = Auto({**BYTES, "sign": MB, "topk": 2 * MB})
    seconds = {"sign": 0.2, "topk": 0.9, "int4": 0.21, "int8": 0.18, "bf16": 0.15, "fp32": 0.1}
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


# ----------------------------------------------------------------------------------------- guard
# Whom the quality guard throws out: nobody whose result is as its codec's errors say, over all
# codecs, numbers of ranks and kinds of gradients; and who is really bad.


SIDE = 128
NUMEL = SIDE**2
RANKS = (1, 2, 4, 7)
CODECS = [
    spec
    for spec in dict.fromkeys(
        [*SPECS, *ALIASES, "eden:bits=1", "eden:bits=2,size=128", "int2:rounding=stochastic"]
    )
    if nominal_error(pycomm.codec(spec)) > 0
]


class OfTwo:
    """What a check asks of a group before it writes a line."""

    def rank(self) -> int:
        return 1


@cache
def gradients(kind: str, ranks: int) -> list[torch.Tensor]:
    """One for each rank: independent, equal, half of each, or opposite but for a tenth.

    Nobody may write to them, since they are made once."""
    g = torch.Generator().manual_seed(ranks)
    common = torch.randn(NUMEL, generator=g)
    own = [torch.randn(NUMEL, generator=g) for _ in range(ranks)]
    if kind == "heavy tails":  # Student's t with 3 degrees of freedom
        return [x / (torch.randn(3, NUMEL, generator=g).square().sum(0) / 3).sqrt() for x in own]
    if kind == "outliers":  # one in a thousand is a hundred times larger
        large = [torch.rand(NUMEL, generator=g) < 1e-3 for _ in range(ranks)]
        return [torch.where(many, 100 * x, x) for x, many in zip(own, large, strict=True)]
    weight = {"independent": 0.0, "equal": 1.0, "half equal": sqrt(0.5), "cancel": 0.1}[kind]
    mixed = [weight * common + sqrt(1 - weight**2) * x for x in own]
    if kind == "cancel" and ranks > 1:
        # They differ by much and their sum is small, as late in training.
        total = torch.stack(mixed).sum(0) * 0.9
        mixed = [x - total / ranks for x in mixed]
    return mixed


def reduced(codec: Codec, inputs: list[torch.Tensor], step: int) -> torch.Tensor:
    """The average as an all-reduce makes it: contributions are coded, and their sum by an owner."""
    ranks = len(inputs)
    total = torch.zeros(NUMEL)
    for rank, x in enumerate(inputs):
        codec.decode_add(codec.encode(x, key=RandomKey(seed=100 + rank, step=step)), total)
    total /= ranks
    if codec.combine != "recode":
        return total
    return codec.decode(codec.encode(total, key=RandomKey(seed=99, step=step)), NUMEL)


def checked(
    codec: Codec, inputs: list[torch.Tensor], guard: Guard, checks: int
) -> Iterator[tuple[Quality, str]]:
    """What check after check finds, and complains about."""
    due = torch.stack(inputs).mean(0)
    judge = Checks(guard, [OfTwo()], lambda: 0.0)  # type: ignore[arg-type]
    decision = Decision(Parameter("w", (SIDE, SIDE), torch.float32), codec, "")
    for step in range(0, checks * guard.every, guard.every):
        judge.begin(step, [decision])
        part = judge.wanted["w"]
        lost, d = (reduced(codec, inputs, step) - due)[part].double(), due[part].double()
        sent = sum(float((x[part].double() / len(inputs)).square().sum()) for x in inputs)
        found = Quality(
            step=step,
            error=0.0,
            cosine=1.0,
            coding=float(lost.norm() / d.norm()),
            residual=0.0,
            spread=sent / float(d.square().sum()),
        )
        yield found, judge.warning("w", codec, found)


def whole(codec: Codec, inputs: list[torch.Tensor]) -> tuple[float, float]:
    """Error of the whole parameter, and what it would be of normal values."""
    due = torch.stack(inputs).mean(0)
    energy = float(due.square().sum())
    spread = sum(float((x / len(inputs)).square().sum()) for x in inputs) / energy
    off = (reduced(codec, inputs, 0) - due).norm() / sqrt(energy)
    return float(off), reduced_error(codec, spread)


KINDS = ["independent", "equal", "half equal", "cancel", "heavy tails", "outliers"]


def cases(spec: str, kinds: list[str]) -> list[tuple[str, int]]:
    """Return every kind of gradients, each with one number of ranks, which takes turns from codec
    to codec; with all of them if the extent is full."""
    if FULL:
        return list(product(kinds, RANKS))
    first = CODECS.index(spec)
    return [(kind, RANKS[(first + i) % len(RANKS)]) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("spec", CODECS)
def test_a_codec_with_its_stated_error_stays(spec):
    codec = pycomm.codec(spec)
    for kind, ranks in cases(spec, KINDS):
        inputs = gradients(kind, ranks)
        off, expected = whole(codec, inputs)
        # On tails many are worse than on normal values, which is what the guard is for.
        if off > 1.05 * expected and kind in ("heavy tails", "outliers"):
            continue
        for found, complaint in checked(codec, inputs, Guard(), 6):
            assert not complaint, (kind, ranks, found, expected)


@pytest.mark.parametrize("spec", CODECS)
def test_an_all_reduce_has_the_error_of_its_codings(spec):
    """Of independent, equal and mixed contributions, to a tenth where it should be exact."""
    codec = pycomm.codec(spec)
    for kind, ranks in cases(spec, KINDS[:4]):
        off, expected = whole(codec, gradients(kind, ranks))
        assert off <= 1.1 * expected, (kind, ranks)
        if codec.unbiased:
            assert off >= 0.9 * expected, (kind, ranks)


BAD = {
    # One value of each block is so large that the noise of the others is larger than they are.
    "int3:rounding=stochastic": (1.0, 64, 6.0),
    # Below what the format or its scales can show.
    "fp16": (1e-9, 0, 0.0),
    "int8": (1e-32, 0, 0.0),
    "fp8": (1e-32, 0, 0.0),
    "mxfp4": (1e-42, 0, 0.0),
}


@pytest.mark.parametrize("spec", BAD)
@pytest.mark.parametrize("ranks", [2, 4])
def test_who_is_really_bad_is_thrown_out(spec, ranks):
    codec, (size, block, large) = pycomm.codec(spec), BAD[spec]
    inputs = [size * x for x in gradients("independent", ranks)]
    for x in inputs if block else ():
        x[::block] = large
    found = [complaint for _, complaint in checked(codec, inputs, Guard(), 2)]
    assert not found[0]
    assert "is off by" in found[1]


def test_codecs_whose_errors_are_above_one_have_no_limit():
    assert Guard().limit_of(1.0, 1.2) == inf
    assert Guard().limit_of(0.9, 0.6) == 1.0
    assert Guard().limit_of(0.9, 1.2) == pytest.approx(1.8)
    assert Guard().limit_of(0.2, 0.3) == 0.6
    assert Guard(limit=0.3).limit_of(2.0, 3.0) == 0.3


def test_a_good_check_between_two_bad_ones_forgives():
    judge = Checks(Guard(), [OfTwo()], lambda: 0.0)  # type: ignore[arg-type]
    codec = pycomm.codec("int8")
    bad, good = (
        Quality(step=0, error=0.0, cosine=1.0, coding=coding, residual=0.0) for coding in (5.0, 0.0)
    )
    complaints = [judge.warning("w", codec, found) for found in (bad, good, bad, bad)]
    assert [bool(complaint) for complaint in complaints] == [False, False, False, True]


def test_a_suspect_is_checked_again_soon():
    judge = Checks(Guard(every=16), [OfTwo()], lambda: 0.0)  # type: ignore[arg-type]
    bad = Quality(step=0, error=0.0, cosine=1.0, coding=5.0, residual=0.0)
    assert sorted(judge.begin(16, decisions())) == sorted(NUMELS)
    judge.wanted.clear()
    assert not judge.begin(19, decisions())
    judge.warning("b", codec("int8"), bad)
    assert [name for step in (17, 18, 20) for name in judge.begin(step, decisions())] == []
    assert list(judge.begin(19, decisions())) == ["b"]
    assert "b" in judge.warning("b", codec("int8"), bad)


# ------------------------------------------------------------------------------------------ samples
# Tests of samples: the values that take part in a check, and the numbers of it.


NUMELS = {"a": 4000, "b": 100_000, "c": 256, "d": 30_000, "e": 50_000}


def decisions(**specs: str) -> list[Decision]:
    return [
        Decision(Parameter(name, (n,), torch.float32), codec(specs.get(name, "int8")), "")
        for name, n in NUMELS.items()
    ]


def sampler(**options: Any) -> Checks:
    return Checks(Guard(**options), [OfTwo()], lambda: 0.0)  # type: ignore[arg-type]


def test_all_take_part_in_turn():
    s = sampler(parameters=2)
    turns = []
    for step in range(5):
        s.choose(step, decisions())
        turns.append(sorted(s.wanted))
    assert turns == [["a", "b"], ["c", "d"], ["a", "e"], ["b", "c"], ["d", "e"]]


def test_exact_ones_do_not_and_suspects_come_first():
    s = sampler(parameters=2)
    s.choose(1, decisions(a="fp32", c="fp32"), first=["e", "a"])
    assert sorted(s.wanted) == ["b", "e"]
    s.choose(2, decisions(**dict.fromkeys(NUMELS, "fp32")))
    assert s.wanted == {}


@pytest.mark.parametrize("every", [1, 16, 100])
def test_bytes_are_bounded(every):
    s = sampler(every=every, share=0.05)
    payload = sum(d.encoded_bytes for d in decisions())
    s.choose(every, decisions())
    values = sum(part.stop - part.start for part in s.wanted.values())
    assert 0 < 8 * values <= 0.05 * every * payload


def test_slices_lie_inside_and_wander():
    s = sampler(parameters=5, every=64)
    seen = set()
    for step in range(50):
        s.choose(step, decisions())
        for name, part in s.wanted.items():
            assert 0 <= part.start < part.stop <= NUMELS[name]
        seen.add(s.wanted["b"].start)
    assert len(seen) == 50


@pytest.mark.parametrize("spec", ["int8", "eden:bits=1", "topk:0.01"])
def test_slices_have_whole_blocks_and_enough_values(spec):
    """A part of a block says nothing: what rotates spreads the error of its large values."""
    s, given = sampler(), decisions(**dict.fromkeys(NUMELS, spec))
    unit = max(codec(spec).granule, 1)
    for step in range(0, 320, 16):
        s.choose(step, given)
        assert s.wanted
        for name, part in s.wanted.items():
            assert part.start % unit == 0
            assert part.stop % unit == 0 or part.stop == NUMELS[name]
            assert part.stop - part.start >= min(256, NUMELS[name] - part.start)


def numbers(result: torch.Tensor, exact: torch.Tensor, due: torch.Tensor) -> list[float]:
    pairs = [(result - exact,) * 2, (exact,) * 2, (result,) * 2, (result, exact)]
    pairs += [(result - due,) * 2, (due,) * 2, (due - exact,) * 2]
    sent = 3 * float(torch.dot(due, due))
    return [*(float(torch.dot(a, b)) for a, b in pairs), sent]


def test_numbers_become_errors_and_cosines():
    exact = torch.tensor([3.0, 4.0])
    due, result = torch.tensor([6.0, 8.0]), torch.tensor([6.0, 0.0])
    found = qualities(5, ["x"], numbers(result, exact, due))["x"]
    assert found.step == 5
    assert found.error == pytest.approx(1.0)  # (3, -4) of (3, 4)
    assert found.cosine == pytest.approx(0.6)
    assert found.coding == pytest.approx(0.8)  # 8 of 10
    assert found.residual == pytest.approx(1.0)
    assert found.spread == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_nothing_is_said_of_zeros_and_overflows(bad):
    exact = torch.full((2,), bad)
    good = numbers(torch.ones(2), torch.ones(2), torch.ones(2))
    found = qualities(5, ["x", "y"], numbers(exact, exact, exact) + good)
    assert list(found) == ["y"]
    assert found["y"].error == 0
