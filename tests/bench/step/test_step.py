"""Steps beside their bounds: the bound, the command's words, and two ranks that pace themselves."""

from __future__ import annotations

import argparse

import pytest

from pycomm.bench.common import tables
from pycomm.bench.figures.charts import bars_of_steps
from pycomm.bench.figures.drawing import digest, picture_digest
from pycomm.bench.step import __main__ as command
from pycomm.bench.step.bound import Pace, wire_seconds
from pycomm.bench.training.train import MODELS, Config, parameters
from tests.torch.interpreter import as_python, start_with


def test_the_bound_is_the_longest_of_what_must_follow():
    pace = Pace(first=0.014, compute=0.026, optimizer=0.002, last=0.35)
    assert pace.bound(0.0) == pytest.approx(0.028)  # nothing is sent
    assert pace.bound(0.010) == pytest.approx(0.0315)  # the last bucket follows backward
    assert pace.bound(0.053) == pytest.approx(0.069)  # the link is busy from the first one on
    assert wire_seconds(950.0, 1000.0) == pytest.approx(1.0)


def test_the_words_name_models_and_backends():
    assert command.model("124m") == ("124m", MODELS["124m"])
    assert parameters(MODELS["124m"]) == 124_439_808
    shape = Config(layers=1, width=32, heads=2, context=8, vocabulary=300, batch=3)
    assert command.model("1,32,2,8,300,3")[1] == shape
    with pytest.raises(argparse.ArgumentTypeError, match="no model '7b': want tiny, demo"):
        command.model("7b")
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
    start_with(monkeypatch, as_python(tmp_path))
    words = ["--model", "1,32,2,8,300,2", "--cpu", "--paced", "--rate", "1gbit"]
    words += ["--methods", "exact,int4", "--rounds", "1", "--turn-seconds", "0.05"]
    files = ["--csv", str(tmp_path / "x.csv"), "--picture", str(tmp_path / "x.png")]
    assert command.main([*words, *files]) == 0
    printed = capsys.readouterr().out
    assert "# no lab: paced links were asked for" in printed
    assert "# links: " in printed
    rows = tables.read(tmp_path / "x.csv")
    assert [row["method"] for row in rows] == ["alone", "pycomm, exact", "pycomm, int4"]
    values = parameters(command.model(words[1])[1])
    exact, int4 = (float(row["wire_bytes"]) for row in rows[1:])
    assert 4 * values <= exact < 4.2 * values
    assert int4 < exact / 2  # norms and biases travel exactly
    assert all(float(row["bound"]) > 0 and float(row["ratio"]) > 0 for row in rows[1:])
    assert all(part in row["parts"] for row in rows for part in ("forward", "backward"))
    chart = bars_of_steps(rows)
    assert picture_digest(tmp_path / "x.png") == digest(chart)
    ticks = [label.get_text() for label in chart.axes[0].get_yticklabels()]
    assert ticks == [row["method"] for row in rows][::-1]
