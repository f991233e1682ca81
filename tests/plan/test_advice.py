"""Tests of the planner's advice: use this codec, or do not, and why."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from pycomm.plan import (
    CODINGS,
    LINKS,
    PROCESSORS,
    Cluster,
    Link,
    ModelBucket,
    Processor,
    advise,
    best_of_each,
    of_count,
    of_tensors,
    options,
    predict,
    step,
)
from pycomm.plan.__main__ import main
from pycomm.plan.codecs import find
from pycomm.units import format_time

SLOW = Cluster(ranks=8, inter=Link.of("1gbit"))


def advice(model, cluster, **options):
    return advise(cluster, predict(model, cluster), **options)


def test_a_slow_link_gets_a_codec():
    given = advice(of_count(25_000_000, 0.12), SLOW)
    assert given.codec == "eden:bits=2"
    assert given.speedup > 5


def test_no_codec_above_the_error_asked_for():
    given = advice(of_count(25_000_000, 0.12), SLOW, error=1e-3)
    assert given.codec == "int8"


@pytest.mark.parametrize("processor", ["core", "gpu"])
def test_alike_errors_do_not_choose_mxfp4(processor):
    cluster = replace(SLOW, processor=PROCESSORS[processor])
    assert advice(of_count(25_000_000, 0.12), cluster, error=0.1).codec == "int4"


def test_a_misspelt_codec_is_told_its_name():
    for word, meant in (("INT4", "int4"), ("mxpf4", "mxfp4"), ("nnoe", "none")):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            find(word)
    assert find("none") == find("fp32") == CODINGS["none"]


def test_coded_momentum_is_named_where_it_is_faster():
    given = advice(of_count(25_000_000, 0.12), SLOW)
    (why,) = (why for why in given.why if "pycomm.code_optimizer(optimizer, model, 'sign')" in why)
    assert re.search(
        r"[\d.]+ MB instead of [\d.]+ MB, a step of about [\d.]+ ms, and .* a loss", why
    )
    hidden = advice(of_count(25_000_000, 0.6), Cluster(ranks=8, inter=Link.of("2gbit")))
    assert not any("code_optimizer" in why for why in hidden.why)


def test_the_finest_codec_that_is_as_fast():
    hidden = of_count(25_000_000, 0.6)  # all of int8 hides behind backward
    assert advice(hidden, Cluster(ranks=8, inter=Link.of("2gbit"))).codec == "int8"


@pytest.mark.parametrize(
    ("model", "cluster", "reason"),
    [
        (of_count(25_000_000, 5.0), SLOW, "compute-bound"),
        (
            of_count(25_000_000, 0.12),
            Cluster(ranks=8, inter=Link.of("nvlink"), processor=PROCESSORS["gpu"]),
            "fast enough",
        ),
        (of_count(1000, 1e-4), SLOW, "tiny"),
        (
            of_count(25_000_000, 0.01),
            Cluster(ranks=8, inter=Link.of("100gbe"), processor=Processor("slow", 1e9)),
            "break even",
        ),
        (of_count(1000, 1e-4), Cluster(ranks=1, inter=Link.of("1gbit")), "one rank"),
    ],
    ids=["compute", "link", "tiny", "codec", "alone"],
)
def test_says_dont_and_why(model, cluster, reason):
    given = advice(model, cluster)
    assert not given.compress
    assert reason in "\n".join(given.why)


def test_buckets_are_ddps():
    model = of_tensors([(1000, 1000), (1000,), (600, 600), (10,)], 1.0)
    # From the last: 10 and 360,000 values pass 1 MiB; then 25 MiB are not reached.
    assert model.buckets == (ModelBucket(360_010, 10), ModelBucket(1_001_000, 1000))
    # A bucket that is exactly full is closed.
    full = of_tensors([(10, 3), (512, 512)], 1.0)
    assert full.buckets == (ModelBucket(512 * 512), ModelBucket(30))
    # With bucket_cap_mb the first bucket is no smaller than the others.
    assert of_tensors([(1000, 1000), (600, 600)], 1.0, bucket_mb=25).buckets == (
        ModelBucket(1_360_000),
    )


def test_sixteen_bits_are_no_compression_of_bf16():
    found = predict(of_count(25_000_000, 0.12, value_bytes=2), SLOW)
    assert {"fp16", "bf16"}.isdisjoint(p.codec for p in found)
    assert {p.codec for p in found} == set(CODINGS) - {"fp16", "bf16"}


def test_torch_and_the_build_are_not_needed(tmp_path):
    script = (
        "import sys; sys.modules['torch'] = sys.modules['pycomm._C'] = None\n"
        "from pycomm.plan.__main__ import main\n"
        "sys.exit(main(['25M', '--ranks', '8', '--link', '1gbit', '--compute', '120ms']))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    assert b"use eden:bits=2\n" in output


PLAN = ["25M", "--compute", "1s", "--ranks", "4"]


def test_gpus_without_peers_share_the_bus():
    # EgoVerse, issue 667: 1.2 G values on 8 A40 in one host took 6.4 s a step, 3.6 s in bf16; a
    # step of one GPU alone takes 1.4 s. The bound of 10 % is what is unknown of that host.
    gpu, bus = PROCESSORS["gpu"], Link.of("dma:1.375GB/s")  # 22 GB/s, which 8 ranks cross twice
    box = Cluster(ranks=8, ranks_per_node=8, inter=LINKS["10gbe"], intra=bus, processor=gpu)
    for value_bytes, measured in ((4, 6.4), (2, 3.6)):
        model = of_count(1_200_000_000, 1.4, value_bytes=value_bytes)
        assert step(model, box).step == pytest.approx(measured, rel=0.1)
    assert advice(of_count(1_200_000_000, 1.4), box).compress
    peers = replace(box, intra=LINKS["pcie4"])
    assert not advice(of_count(1_200_000_000, 1.4), peers).compress


def predicted(*words):
    """Steps by codec, of the words of a command line."""
    parser = argparse.ArgumentParser()
    options.add_what(parser)
    given = parser.parse_args([*words, "--codec", "int8"])
    cluster = options.cluster(given, given.ranks)
    found = predict(options.model(given), cluster, options.chosen(given))
    return {prediction.codec: prediction.step for prediction in best_of_each(found)}


def test_a_preset_equals_its_rate():
    box = ["1.2B", "--ranks", "8", "--ranks-per-node", "8", "--compute", "1.4s"]
    for processor in ("gpu", "core"):
        words = [*box, "--processor", processor, "--intra"]
        assert predicted(*words, "22GB/s") == predicted(*words, "pcie4")
    assert Link.of("22GBps").rate == Link.of("22GB/s").rate  # and is no rate in bits


def test_a_gpus_link_counts_above_a_cores_rate():
    words = ["1.2B", "--ranks", "16", "--compute", "10ms", "--processor", "gpu", "--link"]
    slow, fast, faster = (predicted(*words, rate)["none"] for rate in RATES)
    assert slow / fast == pytest.approx(4, rel=0.05)
    assert fast / faster == pytest.approx(2.5, rel=0.05)
    # The same through TCP: a core moves 10 Gbit/s, whatever the card could.
    through_cores = [predicted(*words, f"tcp:{rate}")["none"] for rate in RATES]
    assert through_cores[1] == pytest.approx(through_cores[2], rel=0.01)


RATES = ("10gbit", "40gbit", "100gbit")


def test_who_is_held_back_by_tcp_is_told_so(capsys):
    words = ["1.2B", "--ranks", "16", "--compute", "10ms", "--link", "100gbit"]
    assert main(words) == 0
    assert "TCP on a core moves 10 Gbit/s" in capsys.readouterr().out
    assert main([*words, "--processor", "gpu"]) == 0
    assert "TCP" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["25X"], "25X"),
        (["1e400", "--compute", "1s"], "1e400"),
        (["25M", "--compute", "1e400s"], "1e400s"),
        ([*PLAN, "--link", "1e400gbit"], "1e400gbit"),
        (["25M"], "--compute"),
        ([*PLAN, "--link", "quick"], "quick"),
        ([*PLAN, "--link", "quic:1gbit"], "quic"),
        ([*PLAN, "--link", "1gbit,far"], "cannot read the time"),
        ([*PLAN, "--codec", "int9"], "int9"),
        ([*PLAN, "--codec", ","], "no codec"),
        ([*PLAN, "--ranks-per-node", "3"], "nodes of 3"),
        ([*PLAN, "--ranks-per-node", "0"], "'0'"),
        ([*PLAN, "--ranks", "-4"], "-4"),
        ([*PLAN, "--max-error", "-1"], "--max-error"),
        ([*PLAN, "--max-error", "nan"], "--max-error"),
        ([*PLAN, "--cores", "0"], "--cores"),
        ([*PLAN, "--cores", "inf"], "--cores"),
        (["25M", "--compute", "0s"], "--compute"),
        (["probe", "--out", "/"], "directory"),
        (["probe", "--effort", "0"], "--effort"),
        (["probe", "--effort", "1.5"], "--effort"),
        (["probe", "--out", "/proc/nothing/x.json"], "No such file"),
        (["probe", "--ranks", "1"], "one rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[-2:]),
)
def test_bad_words_are_answered_in_one_line(words, named, capsys):
    ranks = [] if words[0] == "probe" or "--ranks" in words else ["--ranks", "4"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *ranks])
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_a_probe_that_does_not_run_leaves_no_file(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("[]")
    for file in (there, tmp_path / "new.json"):
        with pytest.raises(SystemExit):
            main(["probe", "--out", str(file), "--ranks", "1"])
    assert [*tmp_path.iterdir()] == [there]
    assert there.read_text() == "[]"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9996, "1 s"), (999.6e-6, "1 ms"), (999.7, "1000 s"), (0.999, "999 ms")]
)
def test_times_have_three_digits(seconds, text):
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    "text", ["[]", "{}", "null", "1", '{"ranks": 2}', "no JSON", '{"inter": {"name": 1}}']
)
def test_a_file_that_is_no_probe_is_named(text, tmp_path, capsys):
    file = tmp_path / "probe.json"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([*PLAN, "--probe", str(file)])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert str(file) in said
    assert "not written by `plan probe`" in said
