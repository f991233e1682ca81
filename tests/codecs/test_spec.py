"""The text form of a codec, and the errors for invalid texts and tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _C
from pycomm.codecs import (
    ALIASES,
    CODECS,
    MX,
    Cast,
    Eden,
    Quant,
    RandomKey,
    Unavailable,
    short_text,
)
from pycomm.codecs.implementations import implementation, launcher, select
from pycomm.env import env
from pycomm.errors import Error
from pycomm.reduction import paths


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("quant", Quant(bits=8, block=256)),
        ("int8", Quant(bits=8, block=256)),
        ("int4", Quant(bits=4, block=128)),
        ("quant:4", Quant(bits=4)),
        ("quant:bits=4,block=64", Quant(bits=4, block=64)),
        ("int4:block=64,rounding=stochastic", Quant(bits=4, block=64, rounding="stochastic")),
        ("int3", Quant(bits=3, block=64)),
        ("mx", MX(format="fp8_e4m3", scale="floor")),
        ("mxfp4:scale=ceil", MX(format="fp4_e2m1", scale="ceil")),
        ("nvfp4", MX(format="nvfp4")),
        ("cast", Cast(dtype="float16")),
        ("cast:bfloat16", Cast(dtype="bfloat16")),
        ("fp8", Cast(dtype="float8_e4m3", block=256)),
        ("drive:scale=mmse", Eden(bits=1, scale="mmse")),
        ("eden:bits=1", Eden(bits=1)),
        ("fp8_e5m2:block=32", Cast(dtype="float8_e5m2", block=32)),
    ],
)
def test_text_becomes_a_codec_and_back(text, codec):
    assert pycomm.codec(text) == codec
    assert pycomm.codec(codec.spec()) == codec
    assert pycomm.codec(codec) is codec
    assert hash(pycomm.codec(text)) == hash(codec)


# What Python and C++ say alike.
WRONG_ALIKE = [
    ("lossless:dtype=float16", r"dtype=float16: use one of float32, bfloat16"),
    ("topk:density=0", r"density=0.0: use more than 0 and at most 1"),
    ("topk:density=1.5", r"density=1.5: use more than 0"),
    ("topk:density=nan", r"density=nan: use more than 0"),
    ("topk:density=much", r"is not a number"),
    ("topk:values=int4", r"values=int4"),
    ("topk:indices=int8", r"indices=int8"),
    ("quant:bits=9", r"bits=9: use 2 to 8"),
    ("int4:bits=8", r"bits is given twice"),
    ("quant:bits=4,bits=8", r"bits is given twice"),
    ("eden:bits=5", r"bits=5: use 1, 2, 3 or 4"),
    ("cast:float12", r"dtype=float12: use one of float32, float16"),
    ("fp16:block=64", r"float16 has no blocks"),
]
WRONG = [
    (
        "int9",
        r"unknown codec 'int9': did you mean 'int[0-9]'\? The codecs are .*cast.*int4.*int8.*quant",
    ),
    ("", r"unknown codec '': the codecs are"),
    ("INT4", r"unknown codec 'INT4': did you mean 'int4'\?"),
    *WRONG_ALIKE,
    (
        "quant:bit=4",
        r"unknown option 'bit'; did you mean 'bits'\? quant has the options bits, block, rounding",
    ),
    ("int8:range=minmax", r"unknown option 'range'"),
    ("quant:bits=four", r"bits='four' is not an integer"),
    ("int8:block=100", r"block=100: use one of 32, 64, .*2048"),
    ("int8:block=4096", r"block=4096"),
    ("int8:rounding=up", r"rounding=up: use nearest or stochastic"),
    ("eden:size=48", r"size=48: use one of 32, 64, .*4096"),
    ("eden:bits=0", r"bits=0: use 1, 2, 3 or 4"),
    ("eden:bits=1.5", r"bits='1.5' is not an integer"),
    ("int8:64", r"write '64' as option=value; quant has the options"),
    ("mx:fp4", r"format=fp4: use one of fp8_e4m3, .*nvfp4"),
    ("nvfp4:scale=ceil", r"nvfp4 has one rule for scales; leave scale=ceil out"),
    ("mxfp4:scale=up", r"scale=up: use floor or ceil"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_texts_are_explained(text, says):
    with pytest.raises(ValueError, match=says):
        pycomm.codec(text)


# What is the core's own: it reads numbers, lists of words and sizes by itself.
NATIVE_WRONG = [
    *WRONG_ALIKE,
    ("int9", r'unknown codec "int9": the codecs are bf16, cast, .*quant'),
    ("sign:block=64,8", r'write "8" as option=value'),
    ("quant:bit=4", r'quant: unknown option "bit"; it has the options bits, block, rounding'),
    ("quant:bits=4x", r"bits=4x is not an integer"),
    ("quant:block=100", r"block=100: use a power of two from 32 to 2048"),
    ("quant:rounding=up", r"rounding=up: use one of nearest, stochastic"),
    ("mx:format=nvfp4,scale=floor", r"nvfp4 has one rule for scales; leave the option scale out"),
]


@pytest.mark.parametrize(("text", "says"), NATIVE_WRONG, ids=[text for text, _ in NATIVE_WRONG])
def test_wrong_texts_are_explained_by_the_core(text, says):
    with pytest.raises(Error, match=says):
        _C.Codec(text)


@pytest.mark.parametrize(
    "text",
    [
        *CODECS,
        *ALIASES,
        *("quant:4", "cast:bfloat16", "topk:0.001,values=int8", "lossless:bfloat16", "mx:nvfp4"),
        *("topk:1", "topk:1e-3", "topk:0.00002", "topk:0.1,indices=int12"),
        *("int4:block=64,rounding=stochastic", "int8:", "drive:scale=mmse", "eden:bits=3"),
    ],
)
def test_both_languages_read_the_same_texts(text):
    assert _C.codec_names() == list(CODECS)
    assert _C.Codec(text).spec == pycomm.codec(text).spec()


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("quant:bits=4", "int4"),
        ("quant:bits=4,block=128,rounding=nearest", "int4"),
        ("int4:block=64", "int4:block=64"),
        ("none", "fp32"),
        ("cast:bfloat16", "bf16"),
        ("fp8_e4m3", "fp8"),
        ("mx:nvfp4", "nvfp4"),
        ("topk:1", "topk:density=1.0"),
        ("topk:1e-3", "topk:density=0.001"),
        ("topk:0.00002", "topk:density=2e-05"),
        ("topk:0.1,indices=int12", "topk:density=0.1,indices=int12"),
        ("topk", "topk:density=0.01"),
        ("lossless", "lossless"),
        ("eden:bits=3", "eden:bits=3"),
    ],
)
def test_short_texts_are_read_back(text, short):
    codec = pycomm.codec(text)
    assert short_text(codec) == short
    assert pycomm.codec(short) == codec


X = torch.zeros(300)
BAD_CALLS = {
    "float64": (lambda c: c.encode(X.double()), TypeError, "x must be float32"),
    "not-contiguous": (
        lambda c: c.encode(torch.zeros(8, 8).t()),
        ValueError,
        "x must be contiguous",
    ),
    "negated": (
        lambda c: c.encode(torch._neg_view(X)),
        ValueError,
        r"x must be contiguous: call .resolve_neg\(\).contiguous",
    ),
    "out-dtype": (lambda c: c.encode(X, out=X), TypeError, "out must be uint8"),
    "out-size": (
        lambda c: c.encode(X, out=torch.zeros(3, dtype=torch.uint8)),
        ValueError,
        "out has 3 bytes, but 300 values take 308",
    ),
    "residual-size": (lambda c: c.encode(X, residual=X[:9].clone()), ValueError, "residual has 9"),
    "new-residual-alone": (lambda c: c.encode(X, new_residual=X), ValueError, "without residual"),
    "device": (lambda c: c.encode(X, residual=X.to("meta")), ValueError, "residual is on meta"),
    "index": (lambda c: c.encode(X, index=100), ValueError, "index 100 is not a multiple of 256"),
    "payload-size": (
        lambda c: c.decode(torch.zeros(3, dtype=torch.uint8), 300),
        ValueError,
        "payload has 3 bytes",
    ),
    "payload-place": (
        lambda c: c.decode_add(torch.zeros(309, dtype=torch.uint8)[1:], X),
        ValueError,
        "start at a multiple of 4",
    ),
    "seed": (lambda c: RandomKey(seed=-1), ValueError, "seed=-1 does not fit"),
}


@pytest.mark.parametrize("call", BAD_CALLS)
def test_wrong_arguments_are_explained(call):
    run, error, says = BAD_CALLS[call]
    with pytest.raises(error, match=says):
        run(pycomm.codec("int8"))


def test_native_checks_for_itself():
    with pytest.raises(Error, match=r"index 100 is not a multiple of 256"):
        _C.Codec("quant").encode(0, 0, 0, index=100)
    x = torch.zeros(4)
    with pytest.raises(Error, match=r"one of residual and new_residual is null"):
        _C.Codec("cast").encode(x.data_ptr(), 4, x.data_ptr(), error=(x.data_ptr(), 0))


@pytest.fixture
def impl(monkeypatch):
    def set_impl(kind: str) -> None:
        monkeypatch.setenv("PYCOMM_IMPL", kind)
        env.cache_clear()

    yield set_impl
    monkeypatch.undo()
    env.cache_clear()


def test_named_implementation_is_taken_or_raises(impl):
    assert type(select("quant", "cpu")).__name__ == "Native"
    impl("reference")
    assert type(select("quant", "cpu")).__name__ == "Reference"
    impl("nvrtc")
    with pytest.raises(Unavailable, match="nvrtc compiles for cuda"):
        pycomm.codec("int8").encode(X)
    with pytest.raises(ValueError, match="use native, nvrtc, triton or reference"):
        implementation("quant", "opencl", "cpu")


def test_triton_starts_none_of_the_kernels_that_the_core_describes(impl):
    """Its modules have a function `launch` of their own."""
    impl("triton")
    codec = pycomm.codec("int8")
    assert launcher(codec, "cuda") is None
    bucket = SimpleNamespace(pieces=[SimpleNamespace(codec=codec)])
    said = paths._kernels(bucket, None, torch.device("cuda"))
    assert said == "quant on cuda is coded by another implementation"


def test_native_code_is_refused_where_it_cannot_run():
    """It would take the addresses of another accelerator's memory for its own."""
    with pytest.raises(Unavailable, match="run on cpu and cuda, not on xpu"):
        implementation("quant", "native", "xpu")


def test_codec_without_kernels_uses_the_next_implementation(monkeypatch):
    monkeypatch.setattr(_C, "cuda_built", lambda: True)
    with pytest.raises(Unavailable, match="imaginary is not among the codecs in C"):
        implementation("imaginary", "native", "cuda")
    with pytest.raises(Unavailable, match="imaginary has no CUDA kernels"):
        implementation("imaginary", "nvrtc", "cuda")
    with pytest.raises(Unavailable, match="topk has no kernels in Triton"):
        implementation("topk", "triton", "cuda")
    assert type(select("imaginary", "cuda")).__name__ == "Reference"
    assert type(select("imaginary", "cpu")).__name__ == "Reference"


def test_any_shape_encodes_as_its_values_in_order():
    codec, x = pycomm.codec("int8"), torch.randn(6, 100)
    payload = codec.encode(x)
    assert torch.equal(payload, codec.encode(x.view(-1)))
    assert torch.equal(
        codec.decode(payload, torch.empty(6, 100)).view(-1), codec.decode(payload, 600)
    )


def test_arrays_are_taken_by_dlpack_without_a_copy():
    codec, x, residual = pycomm.codec("int8"), np.ones(300, np.float32), np.zeros(300, np.float32)
    residual += 0.3
    payload = codec.encode(x, np.zeros(308, np.uint8), residual)
    assert torch.equal(payload, codec.encode(torch.full((300,), 1.3)))
    codec.decode_add(payload.numpy(), x)
    assert x[0] + residual[0] == pytest.approx(2.3)


def test_parameters_are_encoded_without_a_graph():
    x = torch.ones(8, requires_grad=True)
    out = torch.zeros(8)
    assert not pycomm.codec("fp16").decode_add(pycomm.codec("fp16").encode(x), out).requires_grad
