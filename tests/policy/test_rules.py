"""Tests of policies: rules, schedules, texts, and refused input."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

from pycomm import monitor
from pycomm.codecs import codec, short_text
from pycomm.policy import PROTECT, Parameter, Policy, Rule, rules

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


def test_schedules_are_by_step():
    policy = Policy("fp32", schedule=((10, "int8"), (20, "int4")))
    specs = [codec(c).spec() for c in ("fp32", "int8", "int8", "int4")]
    assert [chosen(policy, step=s) for s in (9, 10, 19, 20)] == specs


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
    assert len(found) > 12
    for name in sorted(found - {"auto"}):
        rules.Policy.of(name)
