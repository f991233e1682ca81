"""Bits do not depend on how the thread is set to calculate: flushing of denormals, rounding."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs.args import RandomKey
from pycomm.codecs.implementations import Native
from tests.codecs.cases import CASES, SPECS
from tests.collectives.device import jobs as device
from tests.collectives.ways import CANONICAL, REDUCIBLE, WAYS, folded
from tests.extent import each_value, part
from tests.ranks import run

_LIBM = ctypes.CDLL("libm.so.6")
# The values of <fenv.h>; on Arm, up and down are swapped.
_ROUNDING = {"down": 0x400, "up": 0x800, "toward zero": 0xC00}
if platform.machine() == "aarch64":
    _ROUNDING = {"down": 0x800000, "up": 0x400000, "toward zero": 0xC00000}

KINDS = ["flush", *_ROUNDING]


@contextlib.contextmanager
def arithmetic(kind: str | None) -> Iterator[None]:
    """Apply one of KINDS to the calling thread, or nothing; check that the setting persists."""
    if kind is None:
        yield
        return
    if kind == "flush":
        assert torch.set_flush_denormal(True)
    else:
        assert _LIBM.fesetround(_ROUNDING[kind]) == 0
    try:
        yield
        assert is_set(kind), "the thread's arithmetic is no longer as it was"
    finally:
        _LIBM.fesetround(0)
        torch.set_flush_denormal(False)


def is_set(kind: str) -> bool:
    """Return whether the calling thread has this setting."""
    if kind == "flush":
        tiny = torch.tensor([1], dtype=torch.int32).view(torch.float32)
        return (tiny + tiny).view(torch.int32).item() == 0
    return _LIBM.fegetround() == _ROUNDING[kind]


FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3", "float8_e5m2", "complex64"]
OPS = ["sum", "avg", "prod", "min", "max"]
# Of the cases of codecs, those that other arithmetic changes.
NAMES = ["normal-257", "wide-range", "ties-float16-subnormal", "denormals-and-one", "thirds"]
NAMES += ["tiny-sum", "denormal-residual"]
kinds = pytest.mark.parametrize("kind", KINDS)


def raw(rank: int, dtype: str, numel: int) -> np.ndarray:
    """Any bits, of which a third are so small that they are denormal in most types."""
    random = np.random.default_rng([rank, len(dtype)])
    size = _C.size_of(_C.DType.__members__[dtype])
    data = random.integers(0, 256, (numel, size), dtype=np.uint8)
    part = size if not dtype.startswith("complex") else size // 2
    data[: numel // 3, part - 1 :: part] &= {1: 0x83, 2: 0x83}.get(part, 0x80)
    if part > 2:
        data[: numel // 3, part - 2 :: part] &= 0x0F
    return data.ravel()


def reduced(dtype: str, op: str, inputs: list[np.ndarray]) -> bytes:
    kind = _C.DType.__members__[dtype]
    if op != "scale":
        return folded(kind, _C.ReduceOp.__members__[op], inputs).tobytes()
    out = np.zeros_like(inputs[0])
    _C.scale(kind, inputs[0].ctypes.data, out.ctypes.data, len(out) // _C.size_of(kind), 0.3)
    return out.tobytes()


@each_value
@kinds
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions(kind, dtype):
    for op in [*OPS, "scale"]:
        if dtype == "complex64" and op in ("min", "max"):
            continue
        for count in (2, 3):
            inputs = [raw(r, dtype, 3001) for r in range(count)]
            want = reduced(dtype, op, inputs)
            with arithmetic(kind):
                got = reduced(dtype, op, inputs)
            assert got == want, (op, count)


def coded(spec: str, x: torch.Tensor, residual: torch.Tensor) -> list[bytes]:
    """What every entry of a codec in C++ makes of a case."""
    codec, native = pycomm.codec(spec), Native()
    numel, key = x.numel(), RandomKey(7, 3, 1)
    out = torch.zeros(codec.encoded_bytes(numel), dtype=torch.uint8)
    kept, values, sums = torch.zeros_like(x), torch.zeros_like(x), x.clone()
    codec.native.encode(
        x.data_ptr(), numel, out.data_ptr(), error=(residual.data_ptr(), kept.data_ptr()),
        seed=key.seed, step=key.step, tensor=key.tensor,
    )  # fmt: skip
    native.decode(codec, out, values, add=False)
    native.decode(codec, out, sums, add=True)
    return [t.numpy().tobytes() for t in (out, kept, values, sums)]


@pytest.mark.parametrize("spec", part(SPECS, 3))
def test_codecs(spec):
    for name in NAMES:
        x, residual = CASES[name]
        want = coded(spec, x, residual)
        for kind in KINDS:
            with arithmetic(kind):
                got = coded(spec, x, residual)
            assert got == want, (name, kind)


@kinds
def test_numbers_in_a_text_are_rounded_to_nearest(kind):
    texts = [f"{i / 1000:.3f}" for i in range(1, 1000)] + ["1e-3", "0.30000000000000001"]
    want = [float(text) for text in texts]
    with arithmetic(kind):
        got = [pycomm.codec(f"topk:{text}").density for text in texts]
        specs = [pycomm.codec(f"topk:{text}").spec() for text in texts]
    assert got == want
    assert specs == [pycomm.codec(f"topk:{text}").spec() for text in texts]


@each_value
@kinds
@pytest.mark.parametrize("form", [("decay", "int8"), ("momentum", "int8"), ("residual", "float32")])
def test_feedback(kind, form):
    x = torch.cat((torch.randn(3000), torch.arange(-150, 150) * 2.0**-149))
    codec = pycomm.codec("int4")

    def encoded() -> list[bytes]:
        out = torch.zeros(codec.encoded_bytes(x.numel()), dtype=torch.uint8)
        error, momentum = (torch.zeros(x.numel() * 4 + 4096, dtype=torch.uint8) for _ in range(2))
        for _ in range(3):
            codec.native.encode(
                x.data_ptr(), x.numel(), out.data_ptr(),
                kind=_C.FeedbackKind.__members__[form[0]],
                storage=_C.FeedbackStorage.__members__[form[1]], decay=0.9,
                error=(error.data_ptr(), error.data_ptr()),
                momentum=(momentum.data_ptr(), momentum.data_ptr()) if form[0] == "momentum"
                else (0, 0),
            )  # fmt: skip
        return [bytes(t) for t in (out, error, momentum)]

    want = encoded()
    with arithmetic(kind):
        got = encoded()
    assert got == want


@each_value
@kinds
@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32"])
def test_conversions(kind, to):
    x = torch.cat((torch.randn(3000), torch.arange(-150, 150) * 2.0**-149, 1e-6 * torch.randn(300)))

    def converted() -> bytes:
        out = torch.zeros(x.numel() * 4, dtype=torch.uint8)
        _C.convert(
            x.data_ptr(), _C.DType.float32, out.data_ptr(), _C.DType.__members__[to], x.numel(),
            by=(0, 0.3), clip=(0, 1.0), divisor=3.0, found_inf=0,
        )  # fmt: skip
        return bytes(out)

    want = converted()
    with arithmetic(kind):
        got = converted()
    assert got == want


# --------------------------------------------------------------------------------- ranks


def tiny(rank: int, numel: int) -> np.ndarray:
    """Denormals, and values whose sums are rounded."""
    random = np.random.default_rng([rank, numel])
    x = random.standard_normal(numel).astype("f4")
    x[::3] = random.integers(1, 1 << 20, len(x[::3]), dtype=np.uint32).view("f4")
    return x


def all_results(c, set_on) -> list[bytes]:
    """Every operation that calculates, on ranks of which some are set to other arithmetic."""
    results = []
    for numel in (5, 1000, 100_003):
        x, y, z, w = (tiny(c.rank, numel) for _ in range(4))  # NumPy rounds as the thread does
        with arithmetic(set_on.get(c.rank)):
            c.all_reduce(x, "avg")
            c.all_reduce(y, "premul_sum", factor=0.3)
            c.all_reduce_coded(z, "topk:density=0.3", seed=3)
            c.all_reduce_coded(w, "quant:bits=8", seed=3)
            results += [v.tobytes() for v in (x, y, z, w)]
    return results


@pytest.mark.parametrize(
    "way",
    [
        *WAYS.values(),
        {"transport": "shm", "algo": "ring"},
        {"transport": "shm", "algo": "one_shot"},
        {"transport": "shm", "nodes": [0, 0, 1], "sockets": 1},
    ],
    ids=str,
)
def test_ranks_that_are_set_unlike(way):
    want, *others = run(3, lambda c: all_results(c, {}), **way)
    assert all(other == want for other in others)
    for kind in KINDS:
        set_on = {1: kind, 2: "flush"}
        for result in run(3, lambda c, set_on=set_on: all_results(c, set_on), **way):
            assert result == want


@kinds
@pytest.mark.parametrize("algo", ["one_shot", "two_shot"])
def test_kernels_of_devices_on_the_processor(kind, algo):
    def job(c):
        x = c.put(tiny(c.rank, 5003))
        with arithmetic(kind if c.rank == 1 else None):
            c.all_reduce(x, "avg", algo=algo)
        return x.get().tobytes()

    first, *others = device.run(3, job)
    want = folded(_C.DType.float32, _C.ReduceOp.avg, [tiny(r, 5003) for r in range(3)])
    assert first == want.tobytes()
    assert all(other == first for other in others)


def test_floating_point_traps_end_no_reduction():
    """Inf - Inf is an invalid operation; with feenableexcept it is a SIGFPE elsewhere."""
    libm, invalid = ctypes.CDLL("libm.so.6"), 1
    inputs = [np.full(9, value, np.float32) for value in (np.inf, -np.inf)]
    if libm.feenableexcept(invalid) == -1:
        pytest.skip("this processor has no floating-point traps")
    try:
        out = reduced("float32", "sum", [x.view(np.uint8) for x in inputs])
    finally:
        libm.fedisableexcept(invalid)
    assert np.isnan(np.frombuffer(out, np.float32)).all()


# ---------------------------------------------------------------------------------------------- NaN
# A reduction that gives NaN gives the same NaN, whatever processor or place made it; for those of
# ranks test_algorithms.py tests the same.


DTYPES = _C.DType.__members__
REDOPS = _C.ReduceOp.__members__
everywhere = pytest.mark.parametrize("dtype", CANONICAL)


def special(rank: int, dtype: str, numel: int) -> np.ndarray:
    """Any bits, half of them with the exponent of Inf and NaN: all signs and payloads."""
    word, _, inf = CANONICAL[dtype]
    parts = numel * (2 if dtype.startswith("complex") else 1)
    random = np.random.default_rng([rank, numel])
    x = random.integers(0, np.iinfo(word).max, parts, dtype=word, endpoint=True)
    x[::2] |= np.array(inf, word)
    x[1::8] = inf  # Inf, whose sums with -Inf are new NaNs
    return x


def nans(x: np.ndarray, dtype: str) -> np.ndarray:
    word, canonical, inf = CANONICAL[dtype]
    sign = 1 << (8 * np.dtype(word).itemsize - 1)
    magnitude = x & np.array(~sign & np.iinfo(word).max, word)
    return magnitude == canonical if dtype == "float8_e4m3" else magnitude > inf


def ops(dtype: str) -> list[str]:
    return [op.name for kind, op in REDUCIBLE if kind.name == dtype]


def check(x: np.ndarray, dtype: str, what: object) -> None:
    word, canonical, _ = CANONICAL[dtype]
    found = nans(x, dtype)
    assert found.any(), what
    assert np.array_equal(x[found], np.full(found.sum(), canonical, word)), what


@each_value
@everywhere
@pytest.mark.parametrize("numel", [1, 3, 7, 8, 9, 1027])
def test_of_reductions(dtype, numel):
    """At sizes around the vectors, so that vectors and what is left over are compared."""
    kind = DTYPES[dtype]
    for op in ops(dtype):
        for count in (2, 3, 5):
            # Whatever the sums are, the first input makes them NaN.
            inputs = [special(r, dtype, numel) for r in range(count)]
            word, canonical, _ = CANONICAL[dtype]
            sign = 1 << (8 * np.dtype(word).itemsize - 1)
            inputs[count // 2][:] = np.array(canonical | sign | (1 if numel % 2 else 0), word)
            if op == "premul_sum":
                for x in inputs:
                    _C.scale(kind, x.ctypes.data, x.ctypes.data, numel, -0.5)
                    if nans(x, dtype).any():
                        check(x, dtype, "scale")
            out = folded(kind, REDOPS[op], inputs)
            assert nans(out, dtype).all(), (op, count)
            check(out, dtype, (op, count))


@each_value
@everywhere
@pytest.mark.parametrize("algo", ["one_shot", "two_shot"])
def test_of_kernels_of_devices(dtype, algo):
    kind, numel = DTYPES[dtype], 1027

    def job(c):
        for op in ops(dtype):
            x = c.put(special(c.rank, dtype, numel))
            c.call("all_reduce", x.address, x.address, numel, kind, REDOPS[op], algo=algo)
            check(x.get(), dtype, op)

    device.run(3, job)


def test_of_conversions_to_and_from_float16():
    """Eight at a time by an instruction, the rest by plain arithmetic: with the same bits."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    words = np.array([0x7FC00000, 0x7F800001, 0x7FA12345, 0x7FFFFFFF, 0x7F802000], np.uint32)
    words = np.concatenate((words, words | 0x80000000))
    options = {"by": (0, 1.0), "clip": (0, 1.0), "divisor": 1.0, "found_inf": 0}

    def converted(x, source, target, out):
        _C.convert(
            x.ctypes.data, DTYPES[source], out.ctypes.data, DTYPES[target], len(x), **options
        )
        return out

    wide = converted(codes, "float16", "float32", np.zeros(len(codes), np.uint32))
    for i in [*range(0x7BFA, 0x8000), *range(0xFBFA, 1 << 16, 7)]:
        alone = converted(codes[i : i + 1].copy(), "float16", "float32", np.zeros(1, np.uint32))
        assert alone[0] == wide[i], hex(i)
    for word in words:  # quiet, with its sign and what fits of its payload
        narrow = converted(np.full(9, word), "float32", "float16", np.zeros(9, np.uint16))
        assert set(narrow.tolist()) == {0x7E00 | int(word) >> 31 << 15 | int(word) >> 13 & 0x3FF}, (
            hex(word)
        )
