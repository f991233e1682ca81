"""Named inputs for every codec, each with its reason, and the codecs to test with them.

A case is (x, residual), both float32 of one size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pycomm.codecs import CODECS, codec

Case = tuple[torch.Tensor, torch.Tensor]

# Together these cover every width and rounding of quant besides int8 and int4.
WIDE = [
    "int2",
    "int3:rounding=stochastic",
    "int5",
    "int6:block=32,rounding=stochastic",
    "int7:block=2048",
]
SPECS = [
    "fp32",
    "fp16",
    "bf16",
    "fp8_e4m3",
    "fp8_e4m3:block=32",
    "fp8_e5m2",
    "int8",
    "int8:block=32",
    "int8:block=2048",
    "int8:rounding=stochastic",
    "int4",
    "int4:block=32",
    "int4:block=64,rounding=stochastic",
    "sign",
    "sign:block=32",
    "sign:block=2048",
    "eden2",
    "eden:bits=1,size=64,scale=mmse",
    "eden:bits=3,size=4096",
    "eden:bits=4,size=128",
    "lossless",
    "lossless:bfloat16",
    "topk:0.01",
    "topk:0.05,values=int8,indices=int12",
    "topk:0.1,values=bins2",
    "topk:0.015625,values=bins2,indices=int12",
    *WIDE,
    "mxfp8",
    "mxfp8_e5m2:scale=ceil",
    "mxfp6",
    "mxfp6_e3m2",
    "mxfp4",
    "nvfp4",
]
# A codec that is not listed yet is tested with its default options.
SPECS += [name for name in CODECS if not any(codec(spec).name == name for spec in SPECS)]

# Rotations that SPECS lacks: smaller and larger than a tile, with every width.
ROTATIONS = [
    *(f"eden:bits={bits},size=32" for bits in (1, 2, 3, 4)),
    *(f"eden:bits={bits},size=256,scale=mmse" for bits in (2, 4)),
    *(f"eden:bits={bits},size=2048" for bits in (1, 3)),
    "eden:bits=2,size=512",
    *(f"eden:bits={bits},size=4096,scale=mmse" for bits in (1, 4)),
]

# Sizes around the blocks of 32, 128 and 256 and the vector widths; odd ones end in half a byte.
SIZES = [1, 2, 3, 31, 32, 33, 127, 128, 129, 255, 256, 257, 2047, 5001]

MAX = torch.finfo(torch.float32).max
ULP = 2.0**-23


def bits(*words: int) -> torch.Tensor:
    """Return the float32 values with these bits."""
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def with_top(values: torch.Tensor, top: float) -> torch.Tensor:
    """Return ``values``, 31 at a time, each time after ``top``: every block has inv_scale 1."""
    rows = values[: len(values) // 31 * 31].view(-1, 31)
    return torch.cat((torch.full((len(rows), 1), top), rows), dim=1).reshape(-1)


def inputs() -> Iterator[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    for n in SIZES:
        yield f"normal-{n}", torch.randn(n, generator=g)
    normal = torch.randn(1000, generator=g)
    yield (
        "wide-range",
        torch.randn(3000, generator=g) * torch.exp(12 * torch.randn(3000, generator=g)),
    )
    yield (
        "any-bits",
        torch.randint(-(2**31), 2**31, (4000,), generator=g).to(torch.int32).view(torch.float32),
    )

    # Exact halves between two codes are rounded to the even one.
    yield "ties-int8", with_top(torch.arange(-126.5, 127, 0.5), 127.0)
    yield "ties-int4", with_top(torch.arange(-6.5, 7, 0.25).repeat(4), 7.0)
    yield "ties-float8-e4m3", with_top(_midpoints(torch.float8_e4m3fn), 448.0)
    yield "ties-float8-e5m2", with_top(_midpoints(torch.float8_e5m2), 57344.0)
    steps = torch.arange(0, 600)
    yield "ties-float16", 1 + (2 * steps + 1) * 2.0**-11
    yield "ties-float16-subnormal", (2 * steps + 1) * 2.0**-25
    yield "ties-bfloat16", 1 + (2 * steps[:120] + 1) * 2.0**-8
    # These are around the top code, where v = p * inv may be slightly too large.
    yield "equal-magnitudes", torch.tensor([0.1, -0.1, 0.1, 0.1 - ULP / 32]).repeat(100)
    yield "thirds", torch.full((300,), 1 / 3) * torch.arange(1, 301)

    yield "zeros", torch.zeros(300)
    yield "negative-zeros", -torch.zeros(300)
    yield "zeros-and-one", torch.cat((torch.zeros(299), -torch.zeros(300), torch.ones(1)))
    yield "denormals", torch.arange(-150, 150) * 2.0**-149
    yield "denormals-and-one", torch.cat((torch.arange(-150, 150) * 2.0**-149, torch.ones(1)))

    # The edges of tiny and huge blocks, and the last values that are still used.
    tiny = 2.0**-100
    yield "tiny", torch.full((300,), tiny)
    yield "just-not-tiny", torch.full((300,), tiny * (1 + ULP))
    yield "huge", torch.full((300,), 2.0**127)
    yield "just-not-huge", torch.full((300,), 2.0**127 * (1 - ULP / 2))
    yield "largest", torch.full((300,), MAX)
    yield "one-largest", torch.cat((normal[:299], torch.tensor([-MAX])))

    # float16 rounds to Inf from 65520 on; bfloat16 from just below the largest float32 on.
    yield "float16-edge", torch.tensor([65504.0, 65519.996, 65520.0, -65520.0, 1e30, -1e30, 6.1e-5])
    yield "bfloat16-edge", bits(0x7F7F7FFF, 0x7F7F8000, 0xFF7F8000, 0x7F7FFFFF)

    for name, bad in (("inf", 0x7F800000), ("minus-inf", 0xFF800000), ("nan", 0x7FC00000)):
        for place in (0, 300, 599):
            x = normal[:600].clone()
            x[place] = bits(bad)[0]
            yield f"{name}-at-{place}", x
    # Signs and payloads of NaN are not transmitted.
    yield "other-nans", torch.cat((bits(0xFFC00000, 0x7F800001, 0xFFFFFFFF), normal[:97]))
    yield "all-nan", torch.full((300,), float("nan"))


def _midpoints(dtype: torch.dtype) -> torch.Tensor:
    codes = torch.arange(0, 256, dtype=torch.uint8).view(dtype).to(torch.float32)
    finite = codes[codes.isfinite()].sort().values.unique()
    middle = (finite[1:] + finite[:-1]) / 2
    return middle.repeat(2)


def cases() -> dict[str, Case]:
    g = torch.Generator().manual_seed(2)
    named: dict[str, Case] = {}
    for name, x in inputs():
        named[name] = (x, 0.1 * torch.randn(x.numel(), generator=g))
    x, r = torch.randn(1000, generator=g), torch.randn(1000, generator=g)
    named["huge-residual"] = (x, 1e30 * r)
    named["denormal-residual"] = (x * 0, 1e-40 * r)
    named["residual-cancels"] = (x, -x)
    named["sum-overflows"] = (torch.full((300,), MAX), torch.full((300,), MAX))
    spoiled = r.clone()
    spoiled[[5, 500]] = torch.tensor([float("nan"), float("inf")])
    named["residual-not-finite"] = (x, spoiled)
    named["tiny-sum"] = (2.0**-101 * x.sign(), 2.0**-101 * r.sign())
    return named


CASES = cases()
