"""Fuzz target in Python: what a member that lies sends in hand_over is read, or refused with one
type of error, and reading it makes no object of a class that could act.

    python -m tests.fuzz.contents CORPUS... --seconds 600 --seed 1
    python -m tests.fuzz.contents FILE                    an input that failed, again
    python -m tests.fuzz.contents --write FOLDER          the corpus

The arguments are those of standalone.cpp. Input: `s` and the pickle of a state, or `p` and a
preface.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from pycomm.elastic.contents import Form, Pickler, empty, read, read_forms
from pycomm.errors import Error

TENSORS = [torch.arange(6.0), torch.ones(2, 3)]
FORMS: list[Form] = [("float32", (6,), "cpu"), ("bfloat16", (2, 3), "cuda"), ("int64", (), "cpu")]
MOST = 1 << 20  # values of a tensor that is made; a member may have larger ones
# Making `torch.dtype`s and the like calls nothing of these.
ACTS = ("os.", "subprocess.", "exec", "compile", "open", "import", "socket.", "ctypes.")


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
    return pickle.dumps((state(), FORMS))


class Acts:
    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


ATTACKS = [
    pickle.dumps(Acts(os.system, "true")),
    pickle.dumps(Acts(eval, "1")),
    pickle.dumps(Acts(getattr, "text", "upper")),
    b"\x80\x04Nr\xff\xff\xff\x7f.",  # LONG_BINPUT: a table of 2**31 places
    b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINBYTES8 of 2**63 bytes
    b"",
    b"junk",
    b"\x80\x04K\x07Q.",  # tensor 7 of two
    b"\x80\x04\x8c\x01aQ.",  # tensor "a"
    b"(" * 10_000,
]


def seeds() -> list[bytes]:
    """Return valid inputs and attacks, from which mutation starts."""
    whole = [b"s" + state(), b"p" + preface()]
    return whole + [kind + attack for kind in (b"s", b"p") for attack in ATTACKS]


def run(data: bytes) -> None:
    """Read an input; whatever is no refusal is raised."""
    kind, text = data[:1], data[1:]
    with suppress(Error):
        if kind == b"s":
            read(text, TENSORS)
        else:
            for dtype, shape, device in read_forms(text)[1]:
                if torch.Size(shape).numel() <= MOST:
                    empty((dtype, shape, device))


def mutated(data: bytes, other: bytes, chance: random.Random) -> bytes:
    text = bytearray(data)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(6):
            case 0:
                text[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                text[at : at + 1] = bytes(b ^ 1 << chance.randrange(8) for b in text[at : at + 1])
            case 2:
                del text[at : at + chance.randrange(8)]
            case 3:
                text[at:at] = chance.randbytes(chance.randrange(6))
            case 4:  # some of another
                begin = chance.randrange(len(other) + 1)
                text[at : at + chance.randrange(32)] = other[begin : begin + chance.randrange(32)]
            case _:
                text[at : at + 1] = bytes([chance.choice((0, 1, 127, 128, 254, 255))])
    return bytes(text)


def inputs(corpus: list[bytes], seconds: float, seed: int) -> Iterator[bytes]:
    """Yield the corpus, then mutations of it for so long."""
    yield from corpus
    chance, end = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            yield mutated(chance.choice(corpus), chance.choice(corpus), chance)


_heard: list[str] = []
_hooked: list[bool] = []
_listening = [False]


def _hear(event: str, arguments: tuple) -> None:
    if _listening[0] and event.startswith(ACTS):
        _heard.append(f"{event} {arguments}")


def check(data: bytes) -> None:
    """Run an input, and listen to what it does.

    Raises:
        AssertionError: it has acted.
        Exception: it was neither read nor refused.
    """
    if not _hooked:
        sys.addaudithook(_hear)  # cannot be taken off
        _hooked.append(True)
    _heard.clear()
    _listening[0] = True
    try:
        run(data)
    finally:
        _listening[0] = False
    assert not _heard, f"an input has acted: {_heard}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.contents")
    parser.add_argument("corpus", nargs="*", type=Path)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds()):
            (options.write / f"{number}.bin").write_bytes(data)
        return 0
    paths = [p for path in options.corpus for p in (path.iterdir() if path.is_dir() else [path])]
    corpus = [path.read_bytes() for path in sorted(paths)]
    count = 0
    for data in inputs(corpus, options.seconds, options.seed):
        count += 1
        try:
            check(data)
        except BaseException:
            failed = Path(f"fuzz-failure-contents-{options.seed}.bin")
            failed.write_bytes(data)
            print(f"the input is in {failed}", file=sys.stderr)
            raise
    print(f"{count} inputs, seed {options.seed}, 0 findings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
