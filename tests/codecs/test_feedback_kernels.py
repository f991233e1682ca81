"""Encoding with feedback on a GPU: kernels load and store residuals with the bits of the CPU.

The kernels are compiled by g++ (tests/codecs/cuda/emulated.py), and by NVRTC and nvcc to look at.
"""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs.cuda.launches import recorded
from pycomm.feedback import storage
from tests.codecs.cuda import emulated
from tests.codecs.cuda.ptx import ARCHS
from tests.codecs.harness import check_ptx, spills
from tests.torch.harness import same_bits

SPECS = [
    *("int8", "int4:block=64", "sign", "fp8_e4m3", "bf16", "mxfp4", "nvfp4", "lossless"),
    *("eden2", "eden:bits=2,size=128", "eden:bits=4,size=2048,scale=mmse"),
]
SIZES = [1, 31, 33, 4096, 5003]
KERNELS = [
    *(
        f"stored::{way}_kernel<stored::{form}>"
        for way in ("load", "store")
        for form in ("Float32", "BFloat16")
    ),
    "stored::load_blocks",
    "stored::store_blocks",
]


def values(numel: int, seed: int) -> torch.Tensor:
    """Return values of all magnitudes, so that some overflow bfloat16 and blocks of int8."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= 10.0 ** torch.randint(-3, 3, (numel,), generator=generator)
    if numel > 1000:
        x[100], x[300], x[500], x[2100] = 3.4e38, 2.0**-120, float("inf"), 1e25
    return x


def encode(
    spec: str, x: torch.Tensor, kind: str, form: str, old: torch.Tensor, *, on_gpu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload and the new residual, as it is stored."""
    codec = pycomm.codec(spec)
    out = torch.full((codec.encoded_bytes(x.numel()),), 0xA5, dtype=torch.uint8)
    fresh = torch.full_like(old, 7)

    def call(room: torch.Tensor) -> None:
        codec.native.encode_fed(
            x.data_ptr(),
            x.numel(),
            out.data_ptr(),
            kind=_C.FeedbackKind.__members__[kind],
            storage=_C.FeedbackStorage.__members__[form],
            decay=0.9,
            error=(old.data_ptr(), fresh.data_ptr()),
            momentum=(0, 0),
            scratch=_C.FeedbackScratch(),
            stream=0 if on_gpu else None,
            room=(room.data_ptr(), room.numel()),
        )

    if not on_gpu:
        call(torch.empty(0, dtype=torch.uint8))
        return out, fresh
    with emulated.guarded(4 * x.numel() + 512 + codec.native.scratch_bytes(x.numel())) as room:
        launches = recorded(lambda: call(room))
        if codec.name in ("topk", "lossless"):
            assert launches[0].kernel.startswith("stored::load")
            assert launches[-1].kernel.startswith("stored::store")
        else:
            assert len(launches) == 1
        emulated.run(launches, emulated.all_kernels())
    return out, fresh


@pytest.mark.parametrize("form", ["bf16", "int8", "float32"])
@pytest.mark.parametrize("kind", ["residual", "decay"])
def test_kernels_have_the_bits_of_the_cpu(kind, form):
    if (kind, form) == ("residual", "float32"):
        pytest.skip("by design: the codec's kernels read and write it themselves")
    for spec in SPECS:
        for numel in SIZES if spec == "int8" else SIZES[-1:]:
            old = storage.zeros(form, numel, torch.device("cpu"))
            storage.store(values(numel, 1).nan_to_num(0.0, 1e30, -1e30), old)
            want = encode(spec, values(numel, 2), kind, form, old, on_gpu=False)
            got = encode(spec, values(numel, 2), kind, form, old, on_gpu=True)
            for g, w in zip(got, want, strict=True):
                assert same_bits(g, w), (spec, numel)


def test_momentum_has_no_kernels():
    old = torch.zeros(64)
    with pytest.raises(pycomm.Error, match="momentum has no kernels on a GPU"):
        encode("int8", values(64, 1), "momentum", "float32", old, on_gpu=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_nvrtc_compiles_them_exactly(arch):
    check_ptx("feedback", KERNELS, arch)


def test_nvcc_spills_no_register(tmp_path):
    assert spills("feedback", tmp_path, ["90"]) == [("0", "0", "0")] * len(KERNELS)
