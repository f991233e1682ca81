"""A member that lies in hand_over: what it says of its state is read, or refused with one type of
error, and makes no object of a class that could act."""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch

from pycomm.elastic.contents import Pickler, empty, read, read_forms

ROUNDS = int(os.environ.get("HOSTILE_ROUNDS", "3000"))
TENSORS = [torch.arange(6.0), torch.ones(2, 3)]


def state() -> bytes:
    """What a member writes of a model and an optimizer."""
    written = io.BytesIO()
    Pickler(written).dump(
        {
            "optimizer": {
                "state": {0: {"step": TENSORS[0], "exp_avg": TENSORS[1]}, 1: {}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1]}],
            },
            "extra": OrderedDict(a={1, 2}, b=torch.float16, c=torch.device("cpu"), d=2**80, e=b"x"),
        }
    )
    return written.getvalue()


def preface() -> bytes:
    forms = [("float32", (6,), "cpu"), ("bfloat16", (2, 3), "cuda"), ("int64", (), "cpu")]
    return pickle.dumps((state(), forms))


def mutated(data: bytes, chance: random.Random) -> bytes:
    text = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(text))
        match chance.randrange(4):
            case 0:
                text[at] = chance.randrange(256)
            case 1:
                text[at] ^= 1 << chance.randrange(8)
            case 2:
                del text[at : at + chance.randrange(8)]
            case _:
                text[at:at] = chance.randbytes(chance.randrange(6))
        if not text:
            break
    return bytes(text)


def found_classes(act) -> set[str]:
    """Return the classes that pickles have named while `act` ran."""
    found: list[tuple[str, str]] = []
    listening = [True]

    def hear(event: str, arguments: tuple) -> None:
        if listening[0] and event in ("os.system", "subprocess.Popen", "exec", "compile", "open"):
            found.append((event, str(arguments)))

    sys.addaudithook(hear)  # cannot be taken off
    act()
    listening[0] = False
    return {event for event, _ in found}


def test_a_state_is_read_as_written():
    found = read(state(), TENSORS)
    assert found["optimizer"]["state"][0]["exp_avg"] is TENSORS[1]
    assert found["extra"]["d"] == 2**80
    pickled, forms = read_forms(preface())
    assert pickled == state()
    assert [empty(form).shape for form in forms] == [(6,), (2, 3), ()]


@pytest.mark.parametrize("what", ["state", "preface"])
def test_mutated_states_are_read_or_refused(what):
    whole, chance = {"state": state, "preface": preface}[what](), random.Random(11)
    reads = {"state": lambda data: read(data, TENSORS), "preface": read_forms}[what]

    def attack() -> None:
        for _ in range(ROUNDS):
            with suppress(pickle.UnpicklingError):
                reads(mutated(whole, chance))

    assert found_classes(attack) == set()


class Acts:
    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "attack",
    [
        pickle.dumps(Acts(os.system, "true")),
        pickle.dumps(Acts(eval, "1")),
        pickle.dumps(Acts(getattr, "text", "upper")),
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # LONG_BINPUT: a table of 2**31 places
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINBYTES8 of 2**63 bytes
        b"",
        b"junk",
        b"\x80\x04K\x07Q.",  # tensor 7 of two
        b"\x80\x04\x8c\x01aQ.",  # tensor "a"
        b"(" * 100_000,
    ],
)
def test_a_pickle_that_no_member_writes_is_refused(attack):
    with pytest.raises(pickle.UnpicklingError):
        read(attack, TENSORS)


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
    with pytest.raises(pickle.UnpicklingError, match="says nothing of its tensors"):
        read_forms(pickle.dumps((b"", forms)))
