"""The clock takes what was measured on a GPU, and tells what the engine still asks of a device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pycomm.bench.common import tables
from pycomm.bench.figures.charts import timeline
from pycomm.bench.figures.drawing import digest, picture_digest
from pycomm.bench.step import __main__ as command
from pycomm.bench.step import stand_in
from pycomm.bench.step.bound import wire_seconds
from pycomm.bench.step.stages import STAGES
from pycomm.bench.step.stand_in import broken, buckets, modelled, pace_of, record, scale_of
from pycomm.bench.training.train import MODELS
from pycomm.units import parse_rate
from tests.torch.interpreter import as_python, start_with

pytestmark = pytest.mark.timeout(600)  # the recorder takes 20 seconds of a free core
GPT = MODELS["124m"]
# Milliseconds of a step on an H200 that two ranks shared, measured in November 2026, when Python
# coded one parameter after the other on the caller's stream.
MEASURED = {
    ("int4", "10gbit"): 140,
    ("int8", "10gbit"): 195,
    ("int4", "1gbit"): 623,
}
BEFORE = ("int4", "int8")
CHANGES = ("wait", "launches", "stream")
# What the hook of a bucket asks for today, and how often the host waits in a step: these may only
# fall. Of tensors of the host, calls of the hook alone: a thread does the rest.
TODAY = {"launches": 7, "copies": 4, "calls": 17, "waits": 0, "held": 0}
TODAY_ON_THE_HOST = 7
WAITS_OF_A_LATE_CARRIER = 26  # for 13 buckets: its own
# Of CodedAdamW, which adds its passes; and launches of its step, for 50 matrices and 98 parameters
# that travel exactly.
TODAY_CODED = {"launches": 11, "calls": 34, "waits": 0, "held": 0}
LAUNCHES_OF_ITS_STEP = 4
# Of CodedSGD's step all but two are torch's, for the parameters that travel exactly: three for all
# of them where it has kernels for lists, as on a GPU.
LAUNCHES_OF_SGD = 3 * 98 + 2


JOBS = [
    *((codec, "late", "before") for codec in BEFORE),
    ("int4", "late", ""),
    *((codec, "ordered", "") for codec in stand_in.CODECS.values()),
    ("sgd sign", "ordered", ""),
]
NOW = ("int4", "ordered", "")
SMALL = replace(GPT, layers=2)
ON_SMALL = ["small", *CHANGES]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    keys = ("codec", "carrier", "changed")
    jobs = [dict(zip(keys, job, strict=True)) for job in JOBS]
    jobs.append({"codec": "int4", "device": "cpu"})
    changed = [dict(zip(keys, (*NOW[:2], change), strict=True)) for change in ("", *CHANGES)]
    with pytest.MonkeyPatch.context() as patched:
        start_with(patched, as_python(tmp_path_factory.mktemp("python")))
        found = dict(zip([*JOBS, "cpu"], record(GPT, jobs), strict=True))
        return found | dict(zip(ON_SMALL, record(SMALL, changed), strict=True))


@pytest.fixture(scope="module")
def step_of(recorded):
    """Return what the clock makes of a recorded step."""

    @cache
    def step(name, rate="10gbit"):
        model = SMALL if name in ON_SMALL else GPT
        return modelled(recorded[name], parse_rate(rate)[0], scale_of(model))

    return step


def bound_of(step, rate):
    return pace_of(GPT).bound(wire_seconds(step.sent, parse_rate(rate)[0]))


@pytest.mark.parametrize(("codec", "rate"), MEASURED)
def test_the_clock_takes_what_was_measured(step_of, codec, rate):
    found = 1e3 * step_of((codec, "late", "before"), rate).seconds
    assert found == pytest.approx(MEASURED[codec, rate], rel=0.2)


def test_the_buckets_are_those_of_ddp():
    assert [len(bucket) for bucket in buckets(GPT)] == [4, *[12] * 11, 12]
    assert pace_of(GPT).last == pytest.approx(0.354, abs=0.001)


def test_what_a_bucket_asks_for_only_falls(recorded):
    counts = recorded[NOW].summary()
    assert all(counts[name] <= most for name, most in TODAY.items()), counts
    assert recorded["int4", "late", ""].summary()["waits"] <= WAITS_OF_A_LATE_CARRIER
    assert recorded["cpu"].summary()["calls"] <= TODAY_ON_THE_HOST


@pytest.mark.parametrize(
    ("codec", "launches"), [("coded sign", LAUNCHES_OF_ITS_STEP), ("sgd sign", LAUNCHES_OF_SGD)]
)
def test_what_coded_momentum_asks_for_only_falls(recorded, codec, launches):
    found = recorded[codec, "ordered", ""]
    counts = found.summary()
    assert all(counts[name] <= most for name, most in TODAY_CODED.items()), counts
    kinds = [kind for kind, _, _ in found.notes]
    step = kinds[kinds.index(stand_in.STEP) :]
    assert step.count(stand_in.WORK) <= launches


def test_the_check_passes(recorded, monkeypatch, capsys):
    """What `bench step --stand-in --check` records: over a late carrier it checks nothing."""
    late = recorded["int4", "late", ""]
    ordered = [recorded[codec, "ordered", ""] for codec in stand_in.CODECS.values()]
    shown = [one for each in ordered for one in (each, late)]
    monkeypatch.setattr(stand_in, "record", lambda *_: [*shown, recorded["cpu"]])
    words = ["--stand-in", "--check", "--methods", ",".join(stand_in.CODECS)]
    assert command.main(words) == 0, capsys.readouterr().out


def test_today_is_faster_than_before(step_of):
    now, before = (step_of(("int4", "late", way)) for way in ("", "before"))
    assert now.seconds < 0.8 * before.seconds
    assert now.sent == before.sent
    assert now.busy["wire"] > before.busy["wire"]


def test_the_check_says_which_goals_do_not_hold(recorded, step_of):
    found = step_of(NOW)
    assert broken(recorded[NOW], found.seconds, found.seconds) == []
    wrong = broken(recorded["int4", "late", ""], found.seconds, found.seconds / 1.2)
    assert [line.partition(", where")[0].split()[1] for line in wrong] == ["waits", "of"]


@pytest.mark.parametrize("change", CHANGES)
def test_the_check_fails_again(recorded, step_of, change, monkeypatch):
    """Even if the goals were what today's path reaches."""
    today = recorded["small"]
    monkeypatch.setattr(stand_in, "GOALS", {k: today.summary()[k] for k in stand_in.GOALS})
    found = step_of("small")
    assert broken(today, found.seconds, found.seconds) == []
    later = step_of(change)
    wrong = broken(recorded[change], later.seconds, found.seconds)
    told = {"wait": "waits", "launches": "launches", "stream": "held"}[change]
    assert any(told in line for line in wrong)


def test_the_command_ends_with_1_where_goals_do_not_hold(recorded, monkeypatch, tmp_path, capsys):
    late = recorded["int4", "late", ""]
    monkeypatch.setattr(stand_in, "record", lambda *_: [late, late, recorded["cpu"]])
    words = [
        "--stand-in",
        "--methods",
        "int4",
        "--rate",
        "10gbit",
        "--trace",
        str(tmp_path / "t.csv"),
    ]
    assert command.main(words) == 0
    assert command.main([*words[:-2], "--check"]) == 1
    said = capsys.readouterr().out
    waits = late.summary()["waits"]
    assert f"not yet: int4 at 10gbit: {waits} waits, where 0 are the goal" in said
    spans = tables.read(tmp_path / "t.csv")
    assert {int(span["bucket"]) for span in spans} == {-1, *range(len(buckets(GPT)))}
    assert {span["stage"] for span in spans} == set(STAGES) - {"reduce"}
    for span in spans:
        assert 0 <= float(span["begin"]) < float(span["end"]) < 0.2
    assert picture_digest(tmp_path / "t.png") == digest(timeline(spans))


def test_a_lane_does_one_thing_after_the_other():
    lane = stand_in.Lane()
    assert lane.take(2.0) == 2.0
    assert lane.take(1.0, 0.5) == 3.0
    assert lane.take(1.0, 5.0, 4.0) == 6.0
    assert lane.take(0.0, 7.0) == 7.0
    assert lane.busy(1.0, 5.5) == 2.5
