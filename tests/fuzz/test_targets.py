"""The fuzz targets and their corpus cover what they must; what they find is for `make soak`."""

from __future__ import annotations

import re
from pathlib import Path

from pycomm import _C
from pycomm.codecs import ALIASES
from tests.fuzz.__main__ import TARGETS, read_corpus

HERE = Path(__file__).parent


def specs() -> dict[int, str]:
    """The codecs of decoders.cpp, by the numbers by which inputs name them."""
    source = (HERE / "decoders.cpp").read_text()
    return {int(n): spec for n, spec in re.findall(r'\{(\d+), "([^"]+)"\}', source)}


def test_every_decoder_is_a_target():
    named = {spec.partition(":")[0] for spec in specs().values()}
    assert named == set(_C.codec_names())


def test_every_short_name_is_a_target():
    missing = [
        a for a, text in ALIASES.items() if not any(s.startswith(text) for s in specs().values())
    ]
    assert missing == []


def test_the_corpus_has_payloads_of_every_codec():
    inputs = read_corpus()["decoders"]
    for number, spec in specs().items():
        codec = _C.Codec(spec)
        for numel in (0, 1, 300):
            head = bytes([number, numel & 255, numel >> 8])
            whole = len(head) + codec.encoded_bytes(numel)
            assert any(i.startswith(head) and len(i) == whole for i in inputs), f"{spec}, {numel}"


def test_every_target_has_a_corpus():
    assert {path.stem for path in HERE.glob("*.cpp")} == {*TARGETS, "standalone"}
    assert set(read_corpus()) == set(TARGETS)
