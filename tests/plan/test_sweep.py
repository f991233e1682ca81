"""`plan sweep`: where codecs pay, up to 10,000 ranks, with pictures that need no network."""

from __future__ import annotations

import builtins
import itertools
import json
import time

import pytest

from pycomm.plan import CODINGS, PROCESSORS, Cluster, Link, draw, of_count
from pycomm.plan.__main__ import main
from pycomm.plan.sweep import at_rate, gain, rank_counts, sweep

WORDS = ["sweep", "350M", "--link", "100gbe", "--compute", "300ms", "--codec", "int8,int4"]


@pytest.fixture(scope="module")
def swept():
    cluster = Cluster(ranks=16, inter=Link.of("100gbe"), processor=PROCESSORS["gpu"])
    return sweep(of_count(350_000_000, 0.3), cluster, list(CODINGS.values()))


def test_codecs_pay_below_their_crossovers(swept):
    for name in ("int8", "int4", "eden:bits=2"):
        rate = swept.crossovers[name]
        below, above = (
            gain(swept.model, at_rate(swept.cluster, rate * factor), CODINGS[name])
            for factor in (0.97, 1.03)
        )
        assert below > 0.05 > above, name


def test_less_is_advised_where_links_are_faster(swept):
    order = [codec for codec, *_ in swept.intervals()]
    assert order[0] == "eden:bits=2"
    assert order[-1] == "none"


def test_more_ranks_never_take_less(swept):
    assert swept.by_ranks.at[-1] == 10_000
    steps = swept.by_ranks.steps["int8"]
    assert all(a <= b * 1.001 for a, b in itertools.pairwise(steps))


def test_ranks_fill_nodes():
    assert rank_counts(1, 10) == [2, 4, 8, 10]
    assert rank_counts(8, 10_000)[-1] == 10_000
    assert all(count % 8 == 0 for count in rank_counts(8, 10_000))


def test_chart_marks_codecs_advice_and_crossovers(swept):
    left, right = draw.of_sweep(swept).panels
    advised, *lines = left.series
    names = [name for line in lines for name in line.label.split(", ")]
    assert sorted(names) == sorted({"no codec", *CODINGS} - {"none"})
    assert "fp16, bf16" in {line.label for line in lines}  # the same bytes, so the same steps
    assert [line.label for line in right.series] == [line.label for line in left.series]
    best = [swept.by_rate.steps[codec][i] for i, codec in enumerate(swept.by_rate.best)]
    assert (advised.label, list(advised.y)) == ("advised", best)
    assert left.guides[0].x[0] == pytest.approx(8 * min(swept.crossovers.values()))


def test_ten_thousand_ranks_in_ten_seconds():
    cluster = Cluster(ranks=64, ranks_per_node=8, inter=Link.of("100gbe"))
    begin = time.process_time()  # the machine may have other work
    sweep(of_count(7_000_000_000, 3.0), cluster, list(CODINGS.values()))
    assert time.process_time() - begin < 10


def test_writes_tables_json_and_pictures(tmp_path, capsys):
    page, picture, record = (tmp_path / f"sweep.{kind}" for kind in ("html", "png", "json"))
    paths = ["--html", page, "--png", picture, "--json", record]
    assert main([*WORDS, *map(str, paths)]) == 0
    said = capsys.readouterr().out
    assert "int4 pays below" in said
    found = json.loads(record.read_text())
    assert len(found["rate"]["steps"]["int4"]) == len(found["rate"]["at"])
    text = page.read_text()
    assert text.count('src="data:image/svg+xml') == text.count("src=") == 1
    assert "<td>below" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("word", ["--html", "--png"])
def test_says_what_is_missing(word, tmp_path, capsys, monkeypatch):
    load = builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(f"No module named {name!r}")
        return load(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit) as ended:
        main([*WORDS, word, str(tmp_path / "out")])
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "matplotlib" in said
    assert "pycomm[bench]" in said
    assert said.count("\n") == 1
