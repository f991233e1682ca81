"""The fuzz targets and their corpus cover what they must; what they find is for `make soak`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pycomm import _C
from pycomm.codecs import ALIASES
from tests.fuzz.__main__ import TARGETS, payloads, read_corpus, specs

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def test_every_decoder_is_a_target():
    named = {spec.partition(":")[0] for spec in specs().values()}
    assert named == set(_C.codec_names())


def test_every_short_name_is_a_target():
    missing = [
        a for a, text in ALIASES.items() if not any(s.startswith(text) for s in specs().values())
    ]
    assert missing == []


def test_the_corpus_has_payloads_of_every_codec():
    kinds = {(data[:3], len(data)) for data in read_corpus()["decoders"]}
    assert {(data[:3], len(data)) for data in payloads()} <= kinds


def test_every_target_has_a_corpus():
    assert {path.stem for path in HERE.glob("*.cpp")} == {*TARGETS, "standalone"}
    assert set(read_corpus()) == set(TARGETS)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_target_compiles(target):
    flags = ["-std=c++17", "-fsyntax-only", f"-I{ROOT}", f"-I{ROOT / 'csrc'}"]
    done = subprocess.run(
        ["g++", *flags, str(HERE / f"{target}.cpp")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
