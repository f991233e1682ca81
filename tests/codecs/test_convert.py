"""pycomm.convert: every implementation matches the reference to the bit."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

import pycomm
from pycomm._C import Launch, recorded
from pycomm.bench.common import accelerator
from pycomm.codecs import convert as module
from pycomm.codecs.convert import Conversion
from pycomm.codecs.implementations import Unavailable
from tests.codecs.cuda import emulated as emulated_cuda
from tests.codecs.cuda.ptx import ARCHS
from tests.codecs.harness import check_ptx, same
from tests.extent import each_pair

PAIRS = list(product(module.DTYPES, module.DTYPES))
KINDS = [("native", "cpu"), ("emulated-cuda", "cpu"), ("triton", "cpu")]
if GPU := accelerator.kind():
    KINDS = KINDS[:2] + [(kind, GPU) for kind in ("reference", "native", "nvrtc", "triton")]
SIZES = (0, 1, 127, 4096, 5003)
# Two factors and a divisor: none of them, all, and each alone.
CLIP = torch.tensor([0.7])
FACTORS = ((1.0, 1.0, 1.0), (1 / 3, CLIP, 7.0))
ALONE = ((1 / 3, 1.0, 1.0), (1.0, CLIP, 1.0), (1.0, 1.0, 7.0))
everywhere = pytest.mark.parametrize(("kind", "device"), KINDS, ids=["-".join(k) for k in KINDS])
every_pair = pytest.mark.parametrize(("source_type", "target_type"), PAIRS)


def runner(kind: str, device: str) -> module.Run:
    if kind == "emulated-cuda":
        return emulated
    try:
        return module.implementation(kind, device)
    except (ImportError, Unavailable) as reason:
        if device == "cpu":
            raise
        pytest.skip(f"{kind} on {device}: {reason}")


def emulated(conversion: Conversion) -> None:
    emulated_cuda.run(launches(conversion), emulated_cuda.all_kernels())


def launches(conversion: Conversion) -> list[Launch]:
    return recorded(partial(module._call(conversion), stream=0))


def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return all magnitudes, both signs, denormals, Inf and NaN."""
    bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=torch.Generator().manual_seed(7))
    x = bits.to(torch.int32).view(torch.float32)
    x[::2] = torch.randn(x[::2].numel(), generator=torch.Generator().manual_seed(8))
    return x.to(dtype)


@each_pair
@everywhere
@every_pair
def test_same_bits(kind, device, source_type, target_type):
    run = runner(kind, device)
    sizes = SIZES[::2] if kind == "triton" else SIZES
    for numel, (by, clip, divisor) in [*product(sizes, FACTORS), *product([257], ALONE)]:
        x = values(numel, source_type)
        want = torch.empty(numel, dtype=target_type)
        want_found = torch.zeros(1)
        module.reference(Conversion(x, want, by, clip, divisor, want_found))
        there = x.to(device)
        got = torch.full_like(want, 12.0, device=device)
        found = torch.zeros(1, device=device)
        put = clip.to(device) if isinstance(clip, torch.Tensor) else clip
        run(Conversion(there, got, by, put, divisor, found))
        assert same(got, want)
        assert torch.equal(found.cpu(), want_found)
        run(Conversion(there, got, by, put, divisor, None))
        assert same(got, want)
        if source_type == target_type:
            run(Conversion(there, there, by, put, divisor, None))
            assert same(there, want)


@everywhere
def test_unaligned_and_overflowing_values_convert(kind, device):
    run = runner(kind, device)
    x = torch.full((5000,), 65504.0, device=device)[1:]
    out = torch.empty(5003, dtype=torch.float16, device=device)[3:-1]
    found = torch.zeros(1, device=device)
    run(Conversion(x, out, found_inf=found))
    assert not found.any()
    x[4321] *= 2
    run(Conversion(x, out, found_inf=found))
    assert found.item() == 1
    assert out.isinf().nonzero().tolist() == [[4321]]
    run(Conversion(x[:10], out[:10], found_inf=found))
    assert found.item() == 1  # of an earlier tensor
    found.zero_()
    run(Conversion(x[:10], out[:10], float("inf"), 1.0, float("inf"), found))
    assert found.item() == 1
    found.zero_()
    ones, five = torch.ones(5, device=device), torch.empty(5, device=device)
    run(Conversion(ones, five, 2.0, found_inf=found))
    assert not found.any()


def test_the_public_function_checks_and_allocates():
    x = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    out = pycomm.convert(x, torch.float32, by=0.5)
    assert out.dtype == torch.float32
    assert out.tolist() == [[0.0, 0.5, 1.0], [1.5, 2.0, 2.5]]
    assert pycomm.convert(x, divisor=2) is x
    assert x[1, 2] == 2.5
    with pytest.raises(TypeError, match="not torch"):
        pycomm.convert(x.double())
    with pytest.raises(ValueError, match="contiguous"):
        pycomm.convert(x.t())
    with pytest.raises(ValueError, match="resolve_neg"):
        pycomm.convert(torch._neg_view(x))
    with pytest.raises(ValueError, match="out has 4 values"):
        pycomm.convert(x, torch.empty(4))
    with pytest.raises(ValueError, match="found_inf must be float32 with one value"):
        pycomm.convert(x, found_inf=torch.zeros(2))


def test_unscaling_is_that_of_a_grad_scaler():
    gradients = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 65536
    inverse, found = torch.tensor([1 / 65536]), torch.zeros(1)
    theirs, their_found = gradients.clone(), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([theirs], their_found, inverse)
    assert torch.equal(pycomm.convert(gradients, by=inverse, found_inf=found), theirs)
    assert torch.equal(found, their_found)


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_compiles_it_exactly(arch):
    empty = [[torch.empty(1, dtype=dtype) for dtype in pair] for pair in PAIRS]
    wanted = [launches(Conversion(*pair))[0].kernel for pair in empty]
    check_ptx("convert", wanted, arch)
