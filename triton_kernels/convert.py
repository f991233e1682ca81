"""`pycomm.convert` in Triton; arithmetic as in csrc/codecs/convert.h."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import INF_BITS, magnitude_bits
from pycomm.triton_kernels.cast import from_code, to_code

TILE = 2048  # values per program: 16 per thread of four warps
CODE = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

# ---------------------------------------------------------------- kernels


@triton.jit
def convert_kernel(
    in_ptr, out_ptr, by_ptr, clip_ptr, divisor_ptr, found_ptr, numel,
    FROM: tl.constexpr, TO: tl.constexpr, SIZE: tl.constexpr, FLAG: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = offsets < numel
    value = from_code(tl.load(in_ptr + offsets, mask=mask, other=0), FROM)
    value = value * tl.load(by_ptr) * tl.load(clip_ptr)
    code = to_code(tl.math.div_rn(value, tl.load(divisor_ptr)), TO)
    tl.store(out_ptr + offsets, code, mask=mask)
    if FLAG:
        bad = mask & (magnitude_bits(from_code(code, TO)) >= INF_BITS)
        tl.store(found_ptr, 1.0, mask=tl.max(bad.to(tl.int32), axis=0) > 0)


# -------------------------------------------------------------- launchers


def _factor(factor: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a number as a tensor, so that kernels have one signature."""
    if isinstance(factor, torch.Tensor):
        return factor
    return torch.full((1,), factor, dtype=torch.float32, device=x.device)


def convert(c: Any) -> None:
    """Run a `Conversion`: out = cast(x * by * clip / divisor)."""
    numel = c.x.numel()
    launch(
        convert_kernel,
        triton.cdiv(numel, TILE),
        c.x.view(-1).view(CODE[c.x.dtype]),
        c.out.view(-1).view(CODE[c.out.dtype]),
        *(_factor(factor, c.x) for factor in (c.by, c.clip, c.divisor)),
        c.found_inf,
        numel,
        FROM=str(c.x.dtype).removeprefix("torch."),
        TO=str(c.out.dtype).removeprefix("torch."),
        SIZE=TILE,
        FLAG=c.found_inf is not None,
    )
