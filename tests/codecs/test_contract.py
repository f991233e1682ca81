"""The codec contract: every implementation of every codec matches its reference to the bit, in
payloads, in residuals, and in decoding of arbitrary payloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pycomm
from pycomm.bench.common import accelerator
from pycomm.codecs import MX, Eden, Quant
from pycomm.codecs.args import EncodeArgs, RandomKey
from pycomm.codecs.base import Codec
from pycomm.codecs.implementations import Reference, Unavailable, implementation
from pycomm.codecs.philox import random_words
from pycomm.codecs.rotation import HEADER
from tests.codecs.cases import CASES, ROTATIONS, SPECS, bits
from tests.codecs.cuda import emulated as emulated_cuda
from tests.codecs.harness import same
from tests.extent import FULL, each_value, noting, part

# (implementation, device). CPU implementations must work. With a GPU Triton's interpreter is off,
# and an implementation that is not installed is skipped, but `make gpu` requires them all.
CPU = [("native", "cpu"), ("emulated-cuda", "cpu"), ("triton", "cpu")]
GPU = accelerator.kind()
CUDA = [(kind, GPU or "cuda") for kind in ("reference", "native", "nvrtc", "triton")]
IMPLEMENTATIONS = CPU[:2] + CUDA if GPU else CPU

KEY = RandomKey(seed=0x0123456789ABCDEF, step=7, tensor=0xFEDCBA98)
REFERENCE = Reference()

everywhere = pytest.mark.parametrize(
    ("kind", "device"), IMPLEMENTATIONS, ids=["-".join(pair) for pair in IMPLEMENTATIONS]
)
every_spec = pytest.mark.parametrize("spec", SPECS)


# `make gpu` counts what is skipped for any other reason as a failure.
def skip_by_design(reason: str) -> None:
    pytest.skip(f"by design: {reason}")


def runner(codec: Codec, kind: str, device: str):
    if kind == "emulated-cuda":
        return emulated_cuda
    if kind == "triton" and codec.name in ("eden", "lossless", "mx", "topk"):
        skip_by_design("it has no kernels in Triton")
    try:
        return implementation(codec.name, kind, device)
    except (ImportError, Unavailable) as reason:
        if device == "cpu":
            raise
        pytest.skip(f"{kind} on {device}: {reason}")


def encode(run, codec: Codec, x, residual=None, new_residual=None, index=0) -> torch.Tensor:
    # Unwritten bytes are detected.
    out = torch.full((codec.encoded_bytes(x.numel()),), 0xA5, dtype=torch.uint8, device=x.device)
    run.encode(codec, EncodeArgs(x, out, residual, new_residual, KEY, index))
    return out


def bytes_of(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()


def tensor_of(data: bytes, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


# The implementations are held to the same results of the reference, one after the other.
@lru_cache(maxsize=256)
def encoded(spec: str, data: bytes, owed: bytes | None, index: int) -> tuple[torch.Tensor, ...]:
    """Return the reference's payload, and its residual if there is one before."""
    codec, x = pycomm.codec(spec), tensor_of(data)
    if owed is None:
        return (encode(REFERENCE, codec, x, index=index),)
    new_residual = torch.empty_like(x)
    return encode(REFERENCE, codec, x, tensor_of(owed), new_residual, index), new_residual


@lru_cache(maxsize=256)
def decoded(spec: str, payload: bytes, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reference's values, and those that it adds to `base_of(numel)`."""
    codec, data = pycomm.codec(spec), tensor_of(payload, torch.uint8)
    values, added = torch.empty(numel), base_of(numel)
    REFERENCE.decode(codec, data, values, add=False)
    REFERENCE.decode(codec, data, added, add=True)
    return values, added


def base_of(numel: int) -> torch.Tensor:
    return torch.linspace(-1, 1, numel)


def check(spec: str, kind: str, device: str, x, residual, index: int | None = None) -> None:
    codec = pycomm.codec(spec)
    run = runner(codec, kind, device)
    index = 3 * codec.granule if index is None else index
    there, owed_there = x.to(device), residual.to(device)

    (want,) = encoded(spec, bytes_of(x), None, index)
    assert torch.equal(encode(run, codec, there, index=index).cpu(), want)

    want_fed, want_owed = encoded(spec, bytes_of(x), bytes_of(residual), index)
    owed = torch.full_like(owed_there, 1234.5)
    assert torch.equal(encode(run, codec, there, owed_there, owed, index).cpu(), want_fed)
    assert same(owed, want_owed)
    assert same(owed_there, residual)
    in_place = owed_there.clone()
    assert torch.equal(encode(run, codec, there, in_place, in_place, index).cpu(), want_fed)
    assert same(in_place, want_owed)
    assert same(there, x)

    check_decode(codec, run, device, want_fed, x.numel())


def check_decode(codec: Codec, run, device: str, payload: torch.Tensor, numel: int) -> None:
    values, added = decoded(codec.spec(), bytes_of(payload), numel)
    got = torch.full((numel,), 1234.5, device=device)
    run.decode(codec, payload.to(device), got, add=False)
    assert same(got, values)

    got = base_of(numel).to(device)
    run.decode(codec, payload.to(device), got, add=True)
    assert same(got, added)


# Cases in which a comparison of equal numbers decides, where samples would miss them.
DECIDING = {"mxfp8_e5m2:scale=ceil": ["ties-float8-e5m2"], "lossless": ["ties-int4", "normal-32"]}


def combinations() -> Iterator[tuple[str, str, str, Sequence[str]]]:
    """Yield every spec on every implementation, with the cases that it runs.

    Native code runs all cases with the first spec of a codec, and every third one with the others;
    emulated CUDA runs every sixth with the others, whose references are there by then.
    Triton's interpreter, which takes most of the time, runs every twelfth case with the first
    spec of a codec, and every 36th with the others. The next spec begins at the next case, so that
    a codec of several specs meets all. The full extent runs all on the CPU, and twelve times as
    many in Triton's interpreter.
    """
    seen = set()
    for number, spec in enumerate(SPECS):
        name = pycomm.codec(spec).name
        step = {
            "native": 1 if FULL or name not in seen else 3,
            "emulated-cuda": 1 if FULL or name not in seen else 6,
            "triton": (1 if FULL else 12) * (3 if name in seen else 1),
        }
        for kind, device in IMPLEMENTATIONS:
            every_nth = step.get(kind, 1) if device == "cpu" else 1
            chosen = list(CASES)[number % every_nth :: every_nth]
            if name == "cast":  # of the numbers halfway between two others it rounds its own
                chosen += [case for case in CASES if case.startswith("ties") and case not in chosen]
            chosen += [case for case in DECIDING.get(spec, ()) if case not in chosen]
            yield spec, kind, device, chosen
        seen.add(name)


def on_each() -> Iterator[tuple[str, str, str]]:
    """Yield every spec on every implementation; for Triton's interpreter each codec's first one,
    and every fifth of the others."""
    seen = set()
    others = SPECS if FULL else part(SPECS, 5)
    for spec in SPECS:
        name = pycomm.codec(spec).name
        for kind, device in IMPLEMENTATIONS:
            if (kind, device) != ("triton", "cpu") or name not in seen or spec in others:
                yield spec, kind, device
        seen.add(name)


every_spec_everywhere = pytest.mark.parametrize(("spec", "kind", "device"), list(on_each()))


@pytest.mark.parametrize(
    ("spec", "kind", "device", "cases"),
    [pytest.param(*run, id="-".join(run[:3])) for run in combinations()],
)
def test_same_bytes(spec, kind, device, cases):
    for case in cases:
        with noting(f"case {case}"):
            check(spec, kind, device, *CASES[case])


@st.composite
def drawn(draw):
    """Draw any bits within a window of exponents, with a few special values."""
    numel = draw(st.integers(1, 700))
    lowest = draw(st.integers(0, 254))
    highest = draw(st.integers(lowest, min(lowest + draw(st.integers(0, 40)), 254)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def floats() -> torch.Tensor:
        exponent = torch.randint(lowest, highest + 1, (numel,), generator=g) << 23
        mantissa = torch.randint(0, 1 << 23, (numel,), generator=g)
        sign = torch.randint(0, 2, (numel,), generator=g) << 31
        word = sign | exponent | mantissa
        return (
            torch.where(word >> 31 > 0, word - (1 << 32), word).to(torch.int32).view(torch.float32)
        )

    x, residual = floats(), floats() * draw(st.sampled_from([0.0, 0.01, 1.0]))
    special = st.sampled_from([0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF])
    for place, word in draw(st.lists(st.tuples(st.integers(0, numel - 1), special), max_size=3)):
        x[place] = bits(word)[0]
    return x, residual


@each_value
@every_spec_everywhere
def test_same_bytes_of_drawn_values(spec, kind, device):
    interpreted = (kind, device) == ("triton", "cpu")
    examples = (8 if FULL else 2) if interpreted else (25 if FULL else 6)

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(case=drawn())
    def same_bytes(case):
        check(spec, kind, device, *case)

    same_bytes()


# Their inverse scale is top / amax, so that blocks can be built with close rounding decisions.
STOCHASTIC = ["int8:rounding=stochastic", "int4:block=64,rounding=stochastic"]


@everywhere
@pytest.mark.parametrize("spec", STOCHASTIC)
def test_same_bytes_where_chance_just_decides(spec, kind, device):
    codec = pycomm.codec(spec)
    index = 3 * codec.block
    random = random_words(KEY, index, codec.block, torch.device("cpu")) >> 1
    # With the top value first, inv is 1, and these fractions equal the random bits or nearly so.
    x = random * 2.0**-31
    x[0] = codec.top
    assert bool((x.double() * 2.0**31 == random)[1:].any())
    check(spec, kind, device, x, torch.zeros_like(x), index)


@everywhere
@pytest.mark.parametrize("spec", STOCHASTIC)
def test_same_bytes_where_chance_would_pass_the_top(spec, kind, device):
    codec = pycomm.codec(spec)
    amax = torch.tensor([magnitude_beyond(codec.top)])
    hair = float(amax * (torch.full_like(amax, codec.top) / amax)) - codec.top
    place = rare_places(int(hair * 2.0**31))[0]
    index = place // codec.block * codec.block
    x = amax.repeat(codec.block)
    check(spec, kind, device, x, torch.zeros_like(x), index)


def magnitude_beyond(top: int) -> float:
    """Return a value whose product with its inverse scale is rounded to above the top."""
    amax = 1 + torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    beyond = amax * (torch.full_like(amax, top) / amax) > top
    return float(amax[beyond][0])


@cache
def rare_places(threshold: int) -> list[int]:
    """Return the indices, among the first 2^22, whose random bits are below the threshold."""
    random = random_words(KEY, 0, 1 << 22, torch.device("cpu")) >> 1
    return (random < threshold).nonzero().view(-1).tolist()


@pytest.mark.parametrize(
    ("spec", "kind", "device"),
    [
        (spec, kind, device)
        for kind, device in IMPLEMENTATIONS
        if kind != "triton"
        for spec in part(ROTATIONS, 2)
    ],
)
def test_every_kind_of_rotation(spec, kind, device):
    check(spec, kind, device, *CASES["normal-5001"])


@each_value
@every_spec_everywhere
def test_any_payload_decodes_the_same(spec, kind, device):
    codec = pycomm.codec(spec)
    run = runner(codec, kind, device)
    examples = 10 if FULL else 2 if (kind, device) == ("triton", "cpu") else 6

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(numel=st.integers(1, 700), seed=st.integers(0, 2**31))
    def decodes_the_same(numel, seed):
        g = torch.Generator().manual_seed(seed)
        payload = torch.randint(0, 256, (codec.encoded_bytes(numel),), generator=g)
        check_decode(codec, run, device, payload.to(torch.uint8), numel)

    decodes_the_same()


def shifted(x: torch.Tensor, device: str) -> torch.Tensor:
    """Return the same values at an address that is a multiple of 4 bytes and not of 16."""
    step = 4 // x.element_size()
    return torch.cat((x[:step], x)).to(device)[step:]


@each_value
@every_spec
def test_bytes_of_ones_are_no_values(spec):
    """A failed operation on device tensors leaves them; see csrc/binding/torch/device.h.

    Payloads of variable size are not decoded then: pycomm/reduction/payloads.py.
    """
    codec = pycomm.codec(spec)
    for run in (REFERENCE, implementation(codec.name, "native", "cpu"), emulated_cuda):
        for numel in (1, 33, 5000):
            payload = torch.full((codec.encoded_bytes(numel),), 0xFF, dtype=torch.uint8)
            out = torch.zeros(numel)
            run.decode(codec, payload, out, add=False)
            assert codec.variable or out.isnan().all()


@every_spec_everywhere
def test_alignment_does_not_matter(spec, kind, device):
    codec = pycomm.codec(spec)
    run = runner(codec, kind, device)
    x, residual = CASES["normal-5001"]
    want_owed = torch.empty_like(residual)
    want = encode(REFERENCE, codec, x, residual, want_owed)

    owed = shifted(residual, device)
    payload = shifted(torch.zeros_like(want), device)
    run.encode(codec, EncodeArgs(shifted(x, device), payload, owed, owed, KEY, 0))
    assert torch.equal(payload.cpu(), want)
    assert same(owed, want_owed)

    want_sum, got = x.clone(), shifted(x, device)
    REFERENCE.decode(codec, want, want_sum, add=True)
    run.decode(codec, payload, got, add=True)
    assert same(got, want_sum)


@each_value
@every_spec_everywhere
def test_parts_have_the_bytes_of_the_whole(spec, kind, device):
    codec = pycomm.codec(spec)
    if codec.granule == 0:
        skip_by_design("its tensors are not cut")
    if codec.variable:
        skip_by_design("its payloads have no places of their own")
    run = runner(codec, kind, device)
    x = CASES["normal-5001"][0].to(device)
    cuts = [*range(0, 5001, codec.granule)[:3], 5001]
    parts = [
        sections(codec, encode(run, codec, x[begin:end].contiguous(), index=begin), end - begin)
        for begin, end in pairwise(cuts)
    ]
    whole = sections(codec, encode(run, codec, x), 5001)
    for section, *of_parts in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(of_parts), section)


def sections(codec: Codec, payload: torch.Tensor, numel: int) -> list[torch.Tensor]:
    """Return scales, without padding, and codes with theirs; records have scales of their own."""
    if isinstance(codec, Eden):  # each part has its own header
        payload, numel = payload[HEADER:], -(-numel // codec.size) * codec.size
    if isinstance(codec, MX):
        scales_at, codes_at = codec.sections(numel)
        scales_end = scales_at + -(-numel // codec.block)
        return [payload[:scales_at], payload[scales_at:scales_end], payload[codes_at:]]
    if isinstance(codec, Quant):
        scale_bytes = codec.scale_bytes(numel)
    else:
        block = codec.size if isinstance(codec, Eden) else getattr(codec, "block", 0)
        scale_bytes = 4 * -(-numel // block) if block else 0
    return [payload[:scale_bytes], payload[-(-scale_bytes // 4) * 4 :]]


@each_value
@everywhere
@every_spec
def test_nothing_encodes_to_nothing(spec, kind, device):
    codec = pycomm.codec(spec)
    run = runner(codec, kind, device)
    nothing = torch.empty(0, device=device)
    assert encode(run, codec, nothing, nothing.clone(), nothing.clone()).numel() == 0
    run.decode(codec, torch.empty(0, dtype=torch.uint8, device=device), nothing, add=True)


@every_spec
def test_sizes_and_names_agree_with_native(spec):
    codec = pycomm.codec(spec)
    assert codec.native.name == codec.name
    assert codec.native.spec == codec.spec()
    assert codec.native.combine == codec.combine
    assert codec.native.wire_version == codec.wire_version
    assert codec.native.granule == codec.granule
    for numel in (0, 1, 31, 32, 33, 255, 256, 257, 100_003):
        assert codec.native.encoded_bytes(numel) == codec.encoded_bytes(numel)
        assert codec.encoded_bytes(numel) % 4 == 0
        assert codec.native.scratch_bytes(numel) % 16 == 0
