"""The fuzz targets and their corpus cover what they must; what they find is for `make soak`. What a
member that lies sends in hand_over, which is quickly read, is tested here, too.
"""

from __future__ import annotations

import pickle
import re
from itertools import islice
from pathlib import Path

import pytest

from pycomm import _C
from pycomm.codecs import ALIASES
from pycomm.elastic.contents import StateError, empty, read, read_forms
from tests.fuzz import contents
from tests.fuzz.__main__ import IN_PYTHON, TARGETS, read_corpus

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
    assert {path.stem for path in HERE.glob("*.cpp")} == {*TARGETS, "standalone"} - {*IN_PYTHON}
    assert set(read_corpus()) == set(TARGETS)


# ------------------------------------------------------------------ contents of a hand-over


def test_a_state_is_read_as_written():
    found = read(contents.state(), contents.TENSORS)
    assert found["optimizer"]["state"][0]["exp_avg"] is contents.TENSORS[1]
    assert found["extra"]["d"] == 2**80
    pickled, forms = read_forms(contents.preface())
    assert pickled == contents.state()
    assert [empty(form).shape for form in forms] == [(6,), (2, 3), ()]


def test_mutated_states_are_read_or_refused():
    corpus = sorted(read_corpus()["contents"])
    for data in islice(contents.inputs(corpus, seconds=60, seed=11), 2000):
        contents.check(data)


@pytest.mark.parametrize("attack", contents.ATTACKS)
def test_a_pickle_that_no_member_writes_is_refused(attack):
    with pytest.raises(StateError):
        read(attack, contents.TENSORS)


def test_an_input_that_acts_is_found(monkeypatch):
    monkeypatch.setattr(contents, "read", lambda text, tensors: pickle.loads(text))
    with pytest.raises(AssertionError, match=r"has acted: .*os\.system"):
        contents.check(b"s" + contents.ATTACKS[0])


@pytest.mark.parametrize(
    "forms",
    [
        7,
        [7],
        [("float32", (-1,), "cpu")],
        [("float32", (2.5,), "cpu")],
        [("float32", (2**60,), "cpu")],
        [("load", (1,), "cpu")],
        [("no dtype", (1,), "cpu")],
        [("float32", [1], "cpu")],
        [("float32", (1,))],
    ],
)
def test_forms_of_no_tensor_are_refused(forms):
    with pytest.raises(StateError, match="says nothing of its tensors"):
        read_forms(pickle.dumps((b"", forms)))
