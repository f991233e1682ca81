"""The planner's examiner: errors, picks, and rows that can be judged again."""

from __future__ import annotations

import pytest

from pycomm.bench import netlab, plan
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin, read_rows
from pycomm.bench.common.harness import record as with_origin
from pycomm.bench.common.report import JUDGED
from pycomm.bench.lab.jobs import ask
from pycomm.bench.plan import (
    PlanCase,
    accuracy,
    all_reduces,
    judge,
    model_of,
    picks,
    record,
)
from pycomm.bench.training.train import Config, parameters


def case(codec, predicted, measured, ranks=2):
    return PlanCase("all_reduce", "1gbit", ranks, 1 << 20, codec, "two_shot", predicted, measured)


GOOD = [case("none", 10.0, 10.5), case("int8", 3.0, 2.9), case("int4", 2.9, 3.1)]


def test_a_pick_may_be_a_tenth_slower_than_the_fastest():
    assert picks(GOOD) == [True]  # int4 was predicted, int8 was fastest
    slower = [*GOOD[:2], case("int4", 2.9, 3.3)]
    assert picks(slower) == [False]
    assert picks([*GOOD, *(case(c.codec, c.predicted, c.measured, 4) for c in slower)]) == [
        True,
        False,
    ]


def test_each_promise_is_held(capsys):
    assert judge(GOOD)
    assert not judge([case("none", 10.0, 15.0)])  # worst
    assert not judge([case(c, 10.0, 12.0) for c in ("none", "int8")])  # median
    assert not judge([case("none", 10.0, 10.0), case("int8", 9.9, 12.0)])  # picked
    assert "promised" in capsys.readouterr().out


def test_rows_come_back(tmp_path):
    path = tmp_path / "plan.csv"
    tables.append(path, [with_origin(record(case), Origin.here("test")) for case in GOOD])
    assert read_rows(path, PlanCase) == GOOD
    median, worst, picked = accuracy(GOOD)
    assert (median, worst) == pytest.approx((1 / 21, 2 / 31))
    assert picked == [True]


def test_a_link_may_have_a_rate_each_way(monkeypatch, capsys):
    def probe(rate, path):
        path.write_text(rate)

    monkeypatch.setattr(plan, "probe", probe)
    monkeypatch.setattr(plan, "measure", lambda *_: GOOD)
    assert plan.main(["--rate", "10mbit/100mbit"]) == 0
    monkeypatch.setattr(plan, "measure", lambda *_: [case("none", 10.0, 15.0)])
    assert plan.main([]) == JUDGED


@pytest.fixture(scope="module")
def lab():
    with netlab.open_lab(2, "1gbit")[0] as lab:
        yield lab


def test_ranks_time_an_all_reduce_of_each_size_and_codec(lab):
    rows = ask(lab, all_reduces, [4096, 65536], ["none", "int8"])
    assert [(row["size"], row["codec"]) for row in rows] == [
        *((4096, codec) for codec in ("none", "int8")),
        *((65536, codec) for codec in ("none", "int8")),
    ]
    assert all(row["seconds"] > 0 for row in rows)


def test_the_model_is_the_demos_with_the_times_of_steps_that_send_nothing():
    parts = {"forward": 0.02, "backward": 0.04, "optimizer": 0.02}
    model = model_of({"seconds": [0.3, 0.1, 0.2], "parts": parts}, ranks=1)
    assert model.values == parameters(Config())
    assert (model.compute, model.forward, model.backward) == (0.2, 0.25, 0.5)
