"""topk: properties beyond its bytes: it sends exactly the largest values, loses nothing, and
decodes invalid payloads safely."""

from __future__ import annotations

import threading
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import pycomm
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.implementations import Reference, native_codec
from tests.codecs.harness import NORMAL, code_and_decode
from tests.codecs.test_contract import IMPLEMENTATIONS, check, runner
from tests.extent import each_pair, each_value

VALUES = ["float32", "int8", "bins2"]
FORMS = ["int32", "int12"]


# -------------------------------------------------------------------------- sent values


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_the_largest_travel_and_no_others(density, form):
    x = NORMAL[:200_000]
    codec = pycomm.codec(f"topk:{density},indices={form}")
    decoded, length = code_and_decode(codec, x), codec.granule or 200_000
    for values, got in zip(x.split(length), decoded.split(length), strict=True):
        largest = values.abs().topk(codec.count(values.numel())).indices
        want = torch.zeros_like(values)
        want[largest] = values[largest]
        assert torch.equal(got, want)


def test_of_equal_magnitudes_the_first_travel():
    x = torch.tensor([1.0, -2.0, 2.0, -2.0, 2.0, 3.0, 0.5, 2.0])
    decoded = code_and_decode(pycomm.codec("topk:0.5"), x)
    assert torch.equal(decoded, torch.tensor([0, -2.0, 2.0, -2.0, 0, 3.0, 0, 0]))


LONG = 70_000  # beyond 65536 a sample brackets the k-th value of a record
# The search for the k-th value depends on the values: each input takes a different path.
SEARCHED = {
    "normal": NORMAL[:LONG],
    "sorted": NORMAL[:LONG].sort().values,  # the sample is right, the chunk before is not
    "mostly-zero": NORMAL[:LONG] * (NORMAL[LONG : 2 * LONG] > 2.5),
    "all-zero": torch.zeros(LONG),
    "few-magnitudes": NORMAL[:LONG].round(),
    "one-magnitude": NORMAL[:LONG].sign(),
    # No sample of neighbours sees the large values, which are at isolated odd indices.
    "hidden": torch.ones(LONG).index_fill(0, torch.arange(17, LONG, 4096), 9.0),
    "growing": NORMAL[:LONG] * torch.logspace(-30, 30, LONG),
    "inf-at-the-end": torch.cat((NORMAL[: LONG - 1], torch.tensor([float("inf")]))),
    "all-inf": torch.full((LONG,), float("-inf")),
    "huge-at-the-end": torch.cat((NORMAL[: LONG - 1], torch.tensor([2.0**127]))),
}


@each_value
@pytest.mark.parametrize("case", SEARCHED)
@pytest.mark.parametrize(
    "spec",
    [
        "topk:0.01",
        "topk:0.9",
        "topk:1e-05,values=int8",
        "topk:0.1,values=bins2,indices=int12",
        "topk:0.02,values=int8,indices=int12",
        "topk:0.25,indices=int12",
    ],
)
def test_same_bytes_whatever_the_search_meets(spec, case):
    x = SEARCHED[case]
    check(spec, "native", "cpu", x, 0.1 * NORMAL[-x.numel() :])


# Every pair of values and indices, records of several tiles and a partial one, and slots that are
# too small.
ON_GPUS = {
    "topk:0.01": ("normal", "mostly-zero", "one-magnitude", "growing", "inf-at-the-end", "all-inf"),
    "topk:0.3,values=int8": ("normal",),
    "topk:0.05,values=bins2": ("few-magnitudes",),
    "topk:0.25,indices=int12": ("normal", "all-zero", "inf-at-the-end"),
    "topk:0.02,values=int8,indices=int12": ("normal", "few-magnitudes", "inf-at-the-end"),
    "topk:0.1,values=bins2,indices=int12": ("normal", "one-magnitude"),
}

RECORDS = [(spec, case) for spec, cases in ON_GPUS.items() for case in cases]


@each_pair
@pytest.mark.parametrize(
    ("kind", "device"), [pair for pair in IMPLEMENTATIONS if pair[0] not in ("native", "triton")]
)
@pytest.mark.parametrize(("spec", "case"), RECORDS)
def test_gpus_find_the_same_in_long_records(spec, case, kind, device):
    x = SEARCHED[case]
    check(spec, kind, device, x, 0.1 * NORMAL[-x.numel() :])


# ------------------------------------------------------------------------------- the count


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    digits=st.integers(1, 10**17),
    places=st.integers(0, 25),
    numel=st.integers(1, 2**32 - 1),
)
@example(digits=7, places=2, numel=100)
@example(digits=1, places=1, numel=2**32 - 10)
@example(digits=29, places=2, numel=100)
@example(digits=5, places=324, numel=2**32 - 1)
@example(digits=9999999999999999, places=16, numel=2**32 - 1)
def test_a_count_is_the_exact_product_rounded_up(digits, places, numel):
    density = float(Fraction(digits, 10**places))
    if not 0 < density <= 1:
        return
    written = Fraction(repr(density))
    want = max(1, min(numel, ceil(written * numel)))
    codec = pycomm.codec(f"topk:{density!r}")
    assert codec.count(numel) == want
    assert codec.encoded_bytes(numel) == 8 * want == native_codec(codec.spec()).encoded_bytes(numel)


# --------------------------------------------------------------------- invalid payloads


@pytest.mark.parametrize("kind", ["reference", "native", "emulated-cuda"])
def test_invalid_indices_void_a_record(kind):
    codec = pycomm.codec("topk:0.5")
    payload = codec.encode(torch.arange(8.0))
    index = payload[16:].view(torch.int32)
    assert index.tolist() == [4, 5, 6, 7]
    for places in ([4, 5, 6, 8], [4, 5, 5, 7], [4, 3, 6, 7], [4, 5, 6, -1], [0, 0, 0, 0]):
        index.copy_(torch.tensor(places))
        for add in (False, True):
            out = torch.ones(8)
            runner(codec, kind, "cpu").decode(codec, payload, out, add=add)
            assert bool(out.isnan().all())


def test_places_that_do_not_travel_stay_to_the_bit():
    codec = pycomm.codec("topk:0.5")
    out = codec.decode_add(codec.encode(torch.tensor([1.0, 0.0])), -torch.zeros(2))
    assert out.signbit().tolist() == [False, True]


# ------------------------------------------------------ the reference, which other GPUs take


class NoWaits(TorchDispatchMode):
    """Refuses operations for whose sizes or values a device would be waited for."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = "_local_scalar_dense", "nonzero", "masked_select", "equal"
        assert op.name() not in [f"aten::{name}" for name in waits], op
        places = args[1] if op.name().startswith("aten::index") else ()
        masks = [each for each in places if each is not None] if type(places) is list else []
        assert all(each.dtype != torch.bool for each in masks), op
        return op(*args, **(kwargs or {}))


# Those that have no kernels in Triton, but for lossless.
WITHOUT = [f"topk:0.1,values={values},indices={form}" for values in VALUES for form in FORMS]
WITHOUT += ["eden2", "eden:bits=3,size=4096,scale=mmse", "mxfp4", "mxfp8:scale=ceil", "nvfp4"]


@pytest.mark.parametrize("spec", WITHOUT)
def test_the_reference_waits_for_no_device(spec):
    codec = pycomm.codec(spec)
    x, residual = NORMAL[:9000].clone(), torch.zeros(9000)
    payload = torch.zeros(codec.encoded_bytes(9000), dtype=torch.uint8)
    with NoWaits():
        run = Reference()
        run.encode(codec, EncodeArgs(x, payload, residual, residual, RandomKey(), 0))
        for add in (False, True):
            run.decode(codec, payload, x, add=add)


# ------------------------------------------------------ values that change while they are coded


@each_value
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("form", "values"), [("int32", "float32"), ("int12", "int8")])
def test_values_changed_during_encode_hurt_no_memory(form, values, feedback):
    """He gets a wrong payload. Between two passes over them all values may become large."""
    codec = pycomm.codec(f"topk:0.01,values={values},indices={form}")
    x, residual = torch.zeros(60_000), torch.zeros(60_000) if feedback else None
    size = codec.encoded_bytes(x.numel())
    memory = torch.full((size + 8 * x.numel(),), 0xA5, dtype=torch.uint8)
    native, done = runner(codec, "native", "cpu"), threading.Event()

    def change() -> None:
        while not done.is_set():
            x.fill_(3.0)
            x.zero_()
            x[::7] = 1.0

    other = threading.Thread(target=change)
    other.start()
    try:
        for _ in range(400):
            owed = None if residual is None else residual.zero_()
            native.encode(codec, EncodeArgs(x, memory[:size], owed, owed, RandomKey(), 0))
    finally:
        done.set()
        other.join()
    assert bool((memory[size:] == 0xA5).all())
