"""What the planner says: use this codec, or don't, and why."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pycomm.plan import (
    CODINGS,
    PROCESSORS,
    Bucket,
    Cluster,
    Link,
    Processor,
    advise,
    of_count,
    of_tensors,
    predict,
)
from pycomm.plan.__main__ import main
from pycomm.plan.advice import break_even

SLOW = Cluster(ranks=8, inter=Link.of("1gbit"))


def advice(model, cluster, **options):
    return advise(model, cluster, predict(model, cluster), **options)


def test_a_slow_link_gets_a_codec():
    given = advice(of_count(25_000_000, 0.12), SLOW)
    assert given.codec == "eden:bits=2"
    assert given.speedup > 5


def test_no_codec_above_the_error_asked_for():
    given = advice(of_count(25_000_000, 0.12), SLOW, error=1e-3)
    assert given.codec == "int8"


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


def test_break_even_is_the_formula_of_the_page():
    # 8 ranks on 10 Gbit/s at a ratio of 4: 0.76 B.
    ten = Cluster(ranks=8, inter=Link("10", 1.25e9, 0))
    assert break_even(ten, 4.0) == pytest.approx(0.76 * 1.25e9, rel=0.01)


def test_buckets_are_ddps():
    model = of_tensors([(1000, 1000), (1000,), (600, 600), (10,)], 1.0)
    # From the last: 10 and 360,000 values pass 1 MiB; then 25 MiB are not reached.
    assert model.buckets == (Bucket(360_010, 10), Bucket(1_001_000, 1000))
    # With bucket_cap_mb the first bucket is no smaller than the others.
    assert of_tensors([(1000, 1000), (600, 600)], 1.0, bucket_mb=25).buckets == (Bucket(1_360_000),)


def test_sixteen_bits_are_no_compression_of_bf16():
    found = predict(of_count(25_000_000, 0.12, value_bytes=2), SLOW)
    assert {"fp16", "bf16"}.isdisjoint(p.codec for p in found)
    assert {p.codec for p in found} == set(CODINGS) - {"fp16", "bf16"}


def test_torch_and_the_build_are_not_needed(tmp_path):
    script = (
        "import sys; sys.modules['torch'] = sys.modules['pycomm._C'] = None\n"
        "from pycomm.plan.__main__ import main\n"
        "sys.exit(main(['25M', '--ranks', '8', '--link', '1gbit', '--compute', '120ms', "
        "'--json', '-']))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    found = json.loads(output)
    assert found["advice"]["codec"] == "eden:bits=2"


def test_a_module_by_its_file(tmp_path, capsys):
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\ndef net():\n    return torch.nn.Linear(100, 200), (torch.zeros(1, 100),)\n"
    )
    assert main([f"{file}:net", "--ranks", "4", "--link", "1gbit"]) == 0
    assert "20.2 k values in 1 buckets" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["25X"], "25X"),
        (["nowhere.py:net"], "nowhere.py"),
        (["25M"], "--compute"),
        (["25M", "--compute", "1s", "--link", "quick"], "quick"),
        (["25M", "--compute", "1s", "--codec", "int9"], "int9"),
        (["25M", "--compute", "1s", "--ranks-per-node", "3"], "nodes of 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_words_are_named(words, named, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--ranks", "4"])
    assert named in capsys.readouterr().err
