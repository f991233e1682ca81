"""reduce() against torch, bit for bit: every dtype and op, folded in the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce as fold_left
from itertools import product

import pytest
import torch

from pycomm import _C, _test
from pycomm.errors import Error
from tests.collectives.ways import INTEGERS, MEANINGLESS, REDUCIBLE
from tests.extent import each_value

TORCH = {name: getattr(torch, name.replace("e4m3", "e4m3fn")) for name in _C.DType.__members__}
SMALL_FLOATS = ["float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
# torch computes little on these; their values fit the next signed type, their bits wrap alike.
WIDER = {"uint16": torch.int32, "uint32": torch.int64}
DTYPES, OPS = _C.DType.__members__, _C.ReduceOp.__members__
CASES = [(dtype.name, op.name) for dtype, op in REDUCIBLE]
SIZES = [1, 3, 1000, 1024, 1025, 5001]  # around the block of the implementation, and odd
FACTOR = 0.3


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but for NaN, which only has to be NaN."""
    if a.dtype.is_complex:
        return same_bits(torch.view_as_real(a), torch.view_as_real(b))
    if a.dtype.is_floating_point:
        nan_a, nan_b = a.to(torch.float32).isnan(), b.to(torch.float32).isnan()
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        return torch.equal(nan_a, nan_b) and torch.equal(a.view(bits)[~nan_a], b.view(bits)[~nan_b])
    return torch.equal(a, b)


def make(dtype: str, numel: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    kind = TORCH[dtype]
    if dtype == "bool":
        return [torch.rand(numel, generator=g) < 0.5 for _ in range(count)]
    if dtype in INTEGERS:
        # Any bits at all: sums and products must wrap.
        size = torch.empty(0, dtype=kind).element_size()
        raw = [torch.randint(0, 256, (numel * size,), generator=g) for _ in range(count)]
        return [r.to(torch.uint8).view(kind) for r in raw]
    if kind.is_complex:
        return [torch.randn(numel, generator=g, dtype=kind) for _ in range(count)]
    return [
        (2 * torch.randn(numel, generator=g, dtype=torch.float64)).to(kind) for _ in range(count)
    ]


def run(dtype: str, op: str, inputs: list[torch.Tensor], out: torch.Tensor, **options) -> None:
    if op == "premul_sum":  # with one factor for all, which `out` that is an input meets too
        scaled = [scale(dtype, x, FACTOR) for x in inputs]
        inputs = [out.copy_(y) if x is out else y for x, y in zip(inputs, scaled, strict=True)]
    _C.reduce(
        DTYPES[dtype], OPS[op], [x.data_ptr() for x in inputs], out.data_ptr(),
        out.numel(), **options,
    )  # fmt: skip


def scale(dtype: str, x: torch.Tensor, factor: float) -> torch.Tensor:
    out = torch.empty_like(x)
    _C.scale(DTYPES[dtype], x.data_ptr(), out.data_ptr(), x.numel(), factor)
    return out


def narrow(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Cast; e4m3fn saturates, where older torch gave NaN."""
    return (x.clamp(-448, 448) if kind == torch.float8_e4m3fn else x).to(kind)


def complex_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def on_parts(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply to x, or to its real and imaginary parts."""
    return torch.view_as_complex(function(torch.view_as_real(x))) if x.is_complex() else function(x)


def truncated_mean(total: torch.Tensor, count: int) -> torch.Tensor:
    if total.dtype == torch.uint64:
        return torch.tensor([x // count for x in total.tolist()], dtype=torch.uint64)
    return torch.div(total, count, rounding_mode="trunc")


def reference(dtype: str, op: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The same fold in torch: float32 for the small floats, wrapping for the integers."""
    kind, count = TORCH[dtype], len(inputs)
    if dtype in SMALL_FLOATS and op == "premul_sum":  # products are rounded as they travel
        products = [narrow(x.to(torch.float32) * FACTOR, kind) for x in inputs]
        return reference(dtype, "sum", products)
    if dtype in SMALL_FLOATS:
        return narrow(reference("float32", op, [x.to(torch.float32) for x in inputs]), kind)
    if dtype == "uint64" and op in ("min", "max"):
        columns = zip(*(x.tolist() for x in inputs), strict=True)
        pick = min if op == "min" else max
        return torch.tensor([pick(column) for column in columns], dtype=kind)
    if dtype == "uint64" and op != "avg":  # two's complement: the bits of int64
        return reference("int64", op, [x.view(torch.int64) for x in inputs]).view(kind)
    if dtype == "uint64":
        return truncated_mean(reference(dtype, "sum", inputs), count)
    if dtype in WIDER and op == "avg":
        return truncated_mean(reference(dtype, "sum", inputs).to(WIDER[dtype]), count).to(kind)
    if dtype in WIDER:
        return reference("int64", op, [x.to(torch.int64) for x in inputs]).to(kind)
    if dtype == "bool" and op in ("sum", "prod"):
        op = "max" if op == "sum" else "min"
    if op == "avg":
        total = reference(dtype, "sum", inputs)
        if dtype in INTEGERS:
            return truncated_mean(total, count)
        return on_parts(lambda part: part / count, total)
    if op == "premul_sum":
        return reference(dtype, "sum", [on_parts(lambda part: part * FACTOR, x) for x in inputs])
    functions = {
        "sum": torch.add,
        "prod": complex_product if kind.is_complex else torch.mul,
        "min": torch.minimum,
        "max": torch.maximum,
        "band": torch.bitwise_and,
        "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }
    return fold_left(functions[op], inputs).clone()


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_equals_torch(dtype, op):
    for count, numel in product([1, 2, 3, 4, 8], SIZES):
        inputs = make(dtype, numel, count, seed=numel)
        out = torch.zeros_like(inputs[0])
        run(dtype, op, inputs, out)
        assert same_bits(out, reference(dtype, op, inputs)), (count, numel)


@each_value
@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_out_may_be_an_input_and_copy_gets_the_same(dtype, op):
    for count in (1, 2, 5):
        inputs = make(dtype, 3001, count)
        want = reference(dtype, op, inputs)
        for aliased in range(count):
            mine = [x.clone() for x in inputs]
            copy = torch.zeros_like(want)
            run(dtype, op, mine, mine[aliased], copy=copy.data_ptr())
            assert same_bits(mine[aliased], want)
            assert same_bits(copy, want)
            untouched = [j for j in range(count) if j != aliased]
            assert all(same_bits(mine[j], inputs[j]) for j in untouched)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_floats_decode_every_code(dtype):
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(TORCH[dtype])
    out = torch.zeros_like(codes)
    run(dtype, "sum", [codes], out)
    assert same_bits(out, codes)
    run(dtype, "sum", [codes, codes.flip(0)], out)
    assert same_bits(out, reference(dtype, "sum", [codes, codes.flip(0)]))


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_float8_every_pair(dtype, op):
    codes = torch.arange(256).to(torch.uint8)
    a = codes.repeat_interleave(256).view(TORCH[dtype])
    b = codes.repeat(256).view(TORCH[dtype])
    out = torch.zeros_like(a)
    run(dtype, op, [a, b], out)
    want = reference(dtype, op, [a, b])
    # A minimum of -0 and 0 may be either.
    if op in ("min", "max"):
        equal = out.float() == want.float()
    else:
        equal = out.view(torch.uint8) == want.view(torch.uint8)
    both_nan = out.float().isnan() & want.float().isnan()
    assert (equal | both_nan).all()


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_halves_and_overflows_round_as_in_torch(dtype):
    """Values that random ones do not meet: those just between two numbers of the small type."""
    kind = TORCH[dtype]
    small = torch.finfo(kind).bits == 8
    bits = torch.uint8 if small else torch.int16
    codes = torch.arange(0, 127) if small else torch.arange(0, 2**15 - 1, 61)  # of positive values
    below, above = ((codes + more).to(bits).view(kind).float() for more in (0, 1))
    halves = ((below.double() + above.double()) / 2)[above.isfinite()]
    largest = torch.finfo(kind).max
    step = largest - torch.tensor(largest).to(kind).view(bits).sub(1).view(kind).float().item()
    beyond = [largest + part * step for part in (0.25, 0.5, 0.75, 1, 2)]
    one = torch.ones(1).to(kind)
    for value in [*halves.tolist(), *(v for v in beyond if v <= torch.finfo(torch.float32).max)]:
        for signed in (value, -value):
            want = narrow(torch.full((1,), signed), kind)
            assert same_bits(scale(dtype, one, signed), want), signed


@each_value
@pytest.mark.parametrize(("dtype", "op"), MEANINGLESS)
def test_meaningless_op_is_refused(dtype, op):
    x = make(dtype, 4, 1)[0]
    with pytest.raises(Error, match=f"{op} has no meaning for {dtype}"):
        run(dtype, op, [x], x.clone())


def test_no_input_is_refused():
    with pytest.raises(Error, match="1 to 8192 inputs, not 0"):
        run("float32", "sum", [], torch.zeros(1))


def test_zero_elements_touch_nothing():
    x = torch.ones(3)
    _C.reduce(_C.DType.float32, _C.ReduceOp.sum, [x.data_ptr()] * 2, x.data_ptr(), 0)
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize("numel", [1, 15, 16384, 16385, 40000])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_all_finite_sees_one_bad_value_anywhere(numel, bad):
    x = torch.full((numel,), torch.finfo(torch.float32).max)
    assert _test.all_finite(x.data_ptr(), numel)
    assert _test.all_finite(0, 0)
    for place in {0, numel // 2, numel - 1}:
        y = x.clone()
        y[place] = bad
        assert not _test.all_finite(y.data_ptr(), numel)


def test_sizes_are_torch_s():
    for name, dtype in DTYPES.items():
        assert _C.size_of(dtype) == torch.empty(0, dtype=TORCH[name]).element_size()
