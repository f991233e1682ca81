"""Golden vectors: the bytes of a released wire version never change.

``python -m tests.golden`` writes the files, and refuses to change existing entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

import pycomm
from pycomm.codecs import CODECS
from pycomm.codecs.args import EncodeArgs
from tests.codecs.test_contract import IMPLEMENTATIONS, runner, same
from tests.extent import noting, part
from tests.golden.__main__ import KEY

FOLDER = Path(__file__).parent.parent / "golden"
EVERYONE = [("reference", "cpu"), *IMPLEMENTATIONS]


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


@cache
def entries(name: str) -> list[tuple[str, str]]:
    """Return the specs and cases in a codec's file."""
    keys = [key.split("/") for key in golden(name) if key.endswith("/payload")]
    return [(spec, case) for spec, case, _ in keys]


def all_entries() -> list[tuple[str, str]]:
    return [entry for name in CODECS for entry in entries(name)]


@pytest.mark.parametrize("name", CODECS)
def test_files_are_of_this_wire_version(name):
    assert int(golden(name)["wire_version"]) == CODECS[name].wire_version


def combinations() -> Iterator[tuple[str, str, str, Sequence[tuple[str, str]]]]:
    """Yield every codec on every implementation, with its entries: all of them for the C++ codecs,
    and a part for those that are slow on the CPU, since the contract holds all to the reference."""
    part_of = {("reference", "cpu"): 3, ("emulated-cuda", "cpu"): 3, ("triton", "cpu"): 9}
    for (kind, device), name in product(EVERYONE, CODECS):
        yield name, kind, device, part(entries(name), part_of.get((kind, device), 1))


@pytest.mark.parametrize(
    ("name", "kind", "device", "chosen"),
    [pytest.param(*run, id="-".join(run[:3])) for run in combinations()],
)
def test_bytes_are_those_of_the_golden_file(name, kind, device, chosen):
    for spec, case in chosen:
        with noting(f"spec {spec}, case {case}"):
            check_entry(spec, case, kind, device)


def check_entry(spec: str, case: str, kind: str, device: str) -> None:
    codec = pycomm.codec(spec)
    run = runner(codec, kind, device)
    file = {
        key: torch.from_numpy(value.copy())
        for key, value in golden(codec.name).items()
        if case in key
    }
    x, residual = file[f"{case}/x"].to(device), file[f"{case}/residual"].to(device)
    out = torch.empty(codec.encoded_bytes(x.numel()), dtype=torch.uint8, device=device)
    owed, decoded = torch.empty_like(x), torch.empty_like(x)

    run.encode(codec, EncodeArgs(x, out, residual, owed, KEY, 5 * codec.granule))
    run.decode(codec, out, decoded, add=False)

    assert torch.equal(out.cpu(), file[f"{spec}/{case}/payload"])
    assert same(owed, file[f"{spec}/{case}/new_residual"])
    assert same(decoded, file[f"{spec}/{case}/decoded"])
