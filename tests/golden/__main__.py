"""Writes the golden vectors: ``python -m tests.golden [codec ...]``.

A file holds what the reference of one codec made of a few inputs, in its wire version. Bytes that
are there never change: if the reference makes others, this stops and asks for a new wire version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import pycomm
from pycomm.codecs import CODECS
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.implementations import Reference
from tests.codecs.cases import CASES, SPECS

FOLDER = Path(__file__).parent
KEY = RandomKey(seed=0x0123456789ABCDEF, step=7, tensor=0xFEDCBA98)
# Few, since they are stored once per codec text; the contract test has the rest.
NAMES = [
    "normal-1",
    "normal-257",
    "ties-int8",
    "ties-int4",
    "float16-edge",
    "denormals-and-one",
    "just-not-tiny",
    "tiny",
    "just-not-huge",
    "huge",
    "nan-at-300",
]


def vectors(codec: Codec) -> Iterator[tuple[str, np.ndarray]]:
    """Payload, new residual and decoded values of each case, by ``text/case/part``."""
    for case in NAMES:
        x, residual = CASES[case]
        out = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
        owed, decoded = torch.empty_like(x), torch.empty_like(x)
        args = EncodeArgs(x, out, residual, owed, KEY, 5 * codec.granule)
        Reference().encode(codec, args)
        Reference().decode(codec, out, decoded, add=False)
        for values in (owed, decoded):
            values[values.isnan()] = float("nan")  # bits of NaN results are not promised
        for part, value in (("payload", out), ("new_residual", owed), ("decoded", decoded)):
            yield f"{codec.spec()}/{case}/{part}", value.numpy()


def make(name: str) -> dict[str, np.ndarray]:
    """Everything in the file of one codec."""
    made: dict[str, np.ndarray] = {"wire_version": np.array(CODECS[name].wire_version)}
    for case in NAMES:
        made[f"{case}/x"], made[f"{case}/residual"] = (t.numpy() for t in CASES[case])
    for spec in SPECS:
        codec = pycomm.codec(spec)
        if codec.name == name:
            made |= dict(vectors(codec))
    return made


def main(names: list[str]) -> None:
    for name in names or CODECS:
        path, made = FOLDER / f"{name}.npz", make(name)
        if path.exists():
            there = np.load(path)
            changed = [
                key for key in there if made.get(key, np.array(0)).tobytes() != there[key].tobytes()
            ]
            if changed and "wire_version" not in changed:
                sys.exit(f"{name}: {changed[0]} would change; that takes a new wire_version")
        np.savez_compressed(path, **made)
        print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
