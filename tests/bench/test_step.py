"""Steps beside their bounds: the bound, the command's words, and two ranks that pace themselves."""

from __future__ import annotations

from functools import cache

import pytest

from pycomm.bench.common import accelerator, tables
from pycomm.bench.lab.rates import bytes_per_second
from pycomm.bench.step import Pace, stand_in, wire_seconds
from pycomm.bench.step import __main__ as command
from pycomm.bench.step.stand_in import buckets, modelled, pace_of, record, scale_of
from pycomm.bench.training.train import MODELS, parameters


def test_the_bound_is_the_longest_of_what_must_follow():
    pace = Pace(first=0.014, compute=0.026, optimizer=0.002, last=0.35)
    assert pace.bound(0.0) == pytest.approx(0.028)  # nothing is sent
    assert pace.bound(0.010) == pytest.approx(0.0315)  # the last bucket follows backward
    assert pace.bound(0.053) == pytest.approx(0.069)  # the link is busy from the first one on
    assert wire_seconds(950.0, 1000.0) == pytest.approx(1.0)


def test_the_words_name_models_and_backends():
    assert parameters(MODELS["124m"]) == 124_439_808
    both = ["nccl", "pycomm", "cpu:pycomm,cuda:nccl"]
    assert command.backends("nccl,pycomm,cpu:pycomm,cuda:nccl") == both


def test_each_backend_has_its_methods():
    found = command.methods_of(["exact", "bf16", "int8", "int4"], ["nccl", "pycomm"])
    labels = ["nccl, exact", "nccl, bf16", "nccl, int4"]
    labels += ["pycomm, exact", "pycomm, int8", "pycomm, int4"]
    assert [method.label for method in found] == labels
    assert [method.hook for method in found[:3]] == ["", "bf16", ""]


@pytest.mark.timeout(300)
def test_two_ranks_take_turns_and_pace_themselves(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(accelerator, "kind", lambda: "")
    words = ["--model", "tiny", "--paced", "--rate", "1gbit"]
    words += ["--methods", "exact,int4", "--rounds", "1", "--turn-seconds", "0.05"]
    assert command.main([*words, "--csv", str(tmp_path / "x.csv")]) == 0
    printed = capsys.readouterr().out
    assert "# no lab: paced links were asked for" in printed
    rows = tables.read(tmp_path / "x.csv")
    assert [row["method"] for row in rows] == ["alone", "pycomm, exact", "pycomm, int4"]
    values = parameters(MODELS["tiny"])
    exact, int4 = (float(row["wire_bytes"]) for row in rows[1:])
    assert 4 * values <= exact < 4.2 * values
    assert int4 < exact / 2  # norms and biases travel exactly
    assert all(float(row["bound"]) > 0 and float(row["ratio"]) > 0 for row in rows[1:])
    assert all(part in row["parts"] for row in rows for part in ("forward", "backward"))


# ----------------------------------------------------------------------------------------- stand-in
# The clock takes what was measured on a GPU, and tells what the engine still asks of a device.


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


@pytest.fixture(scope="module")
def recorded():
    keys = ("codec", "carrier", "changed")
    jobs = [dict(zip(keys, job, strict=True)) for job in JOBS]
    jobs.append({"codec": "int4", "device": "cpu"})
    return dict(zip([*JOBS, "cpu"], record(GPT, jobs), strict=True))


@pytest.fixture(scope="module")
def step_of(recorded):
    """Return what the clock makes of a recorded step."""

    @cache
    def step(name, rate="10gbit"):
        return modelled(recorded[name], bytes_per_second(rate), scale_of(GPT))

    return step


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
    before = recorded["int4", "late", "before"].summary()  # which shows that counts can rise
    assert all(before[name] > TODAY[name] for name in ("launches", "calls", "waits", "held"))


@pytest.mark.parametrize("rate", ["10gbit", "1gbit"])
@pytest.mark.parametrize("codec", stand_in.CODECS.values())
def test_a_step_is_near_its_bound(step_of, codec, rate):
    found = step_of((codec, "ordered", ""), rate)
    bound = pace_of(GPT).bound(wire_seconds(found.sent, bytes_per_second(rate)))
    assert bound <= found.seconds <= stand_in.OVER * bound


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


def test_the_check_says_which_goals_do_not_hold(recorded, monkeypatch, capsys):
    def check(way):
        monkeypatch.setattr(stand_in, "record", lambda *_: [recorded[("int4", *way)]])
        words = ["--stand-in", "--check", "--methods", "int4", "--rate", "10gbit"]
        status = command.main(words)
        missed = [line for line in capsys.readouterr().out.splitlines() if "not yet: " in line]
        return status, [line.partition("10gbit: ")[2].split()[1].rstrip(",") for line in missed]

    assert check(("ordered", "")) == (0, [])
    assert check(("late", "before")) == (1, ["launches", "calls", "waits", "held", "of"])


def test_a_lane_does_one_thing_after_the_other():
    lane = stand_in.Lane()
    assert lane.take(2.0) == 2.0
    assert lane.take(1.0, 0.5) == 3.0
    assert lane.take(1.0, 5.0, 4.0) == 6.0
    assert lane.take(0.0, 7.0) == 7.0
