"""mx in Triton. Wire format: docs/wire/mx.md; arithmetic as in csrc/codecs/mx.h.

A program processes 2048 values, a super-block of nvfp4, with a row for each block.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import (
    HUGE,
    NAN_BITS,
    TINY,
    add_or_not,
    bits_float,
    error_after,
    float_bits,
    from_small,
    load_codes,
    load_sum,
    magnitude_bits,
    store_codes,
    to_small,
)

TILE = 2048

# ---------------------------------------------------------------- kernels


@triton.jit
def mx_scales(amax, TOP_BITS: tl.constexpr, CEIL: tl.constexpr):
    """Return (code, scale, inverse scale) of blocks; ``amax`` is given as bits."""
    exponent = amax >> 23
    if CEIL:
        exponent += ((amax & 0x7FFFFF) > (TOP_BITS & 0x7FFFFF)).to(tl.int32)
    code = tl.maximum(exponent - ((TOP_BITS >> 23) - 127), 0)
    used = bits_float(amax) < HUGE
    code = tl.where(used, code, 255)
    return code, from_e8m0(code), bits_float(tl.where(used, (254 - code) << 23, 0))


@triton.jit
def from_e8m0(code):
    bits = tl.where(code == 0, 1 << 22, code << 23)
    return bits_float(tl.where(code == 255, NAN_BITS, bits))


@triton.jit
def nv_scales(amax):
    """Return (super-scale, code, scale, inverse scale); ``amax`` is given as bits, [blocks, 1]."""
    top = bits_float(tl.max(amax, axis=0, keep_dims=True))
    used = (top > TINY) & (top < HUGE)
    safe = tl.where(used, top, 1.0)
    nan = bits_float(tl.full(top.shape, NAN_BITS, tl.int32))
    second = tl.where(used, tl.math.div_rn(safe, 2688.0), tl.where(top <= TINY, 0.0, nan))
    factor = tl.where(used, tl.math.div_rn(448.0, safe), 0.0)
    code, value = to_small(tl.where(used, bits_float(amax), 0.0) * factor, 4, 3)
    scale = value * second
    inv = tl.where(scale > 0, tl.math.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    return second, code.to(tl.int32), scale, inv


@triton.jit
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, super_ptr, scale_ptr, code_ptr,
    numel, scale_bytes, code_bytes,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP_BITS: tl.constexpr, NV: tl.constexpr,
    CEIL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    BITS: tl.constexpr = 1 + EXPONENT + MANTISSA
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)

    amax = tl.max(magnitude_bits(p), axis=1, keep_dims=True)
    if NV:
        second, scale_code, scale, inv = nv_scales(amax)
        places = tl.program_id(0) + tl.zeros_like(second).to(tl.int32)
        tl.store(super_ptr + places, second)
    else:
        scale_code, scale, inv = mx_scales(amax, TOP_BITS, CEIL)
    tl.store(
        scale_ptr + row,
        tl.where(row * BLOCK < numel, scale_code, 0).to(tl.uint8),
        mask=row < scale_bytes,
    )

    v = tl.where(inv > 0, p * inv, 0.0)
    magnitude = magnitude_bits(v)
    sign = float_bits(v) ^ magnitude
    v = bits_float(tl.minimum(magnitude, TOP_BITS) | sign)
    code, value = to_small(v, EXPONENT, MANTISSA)
    if BITS == 8:
        tl.store(code_ptr + offsets, code, mask=offsets < code_bytes)
    else:
        store_codes(code_ptr, row, code.to(tl.int32), code_bytes, BITS, BLOCK, ROWS)
    if FEEDBACK:
        left = error_after(p, value * scale, residual)
        tl.store(new_residual_ptr + offsets, left, mask=mask)


@triton.jit
def decode_kernel(
    super_ptr, scale_ptr, code_ptr, out_ptr, numel, code_bytes,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, NV: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    BITS: tl.constexpr = 1 + EXPONENT + MANTISSA
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = offsets < numel
    if BITS == 8:
        code = tl.load(code_ptr + offsets, mask=mask, other=0)
    else:
        code = load_codes(code_ptr, row, code_bytes, BITS, BLOCK, ROWS)
    scale_code = tl.load(scale_ptr + row, mask=row * BLOCK < numel, other=0).to(tl.int32)
    if NV:
        scale = from_small(scale_code, 4, 3) * tl.load(super_ptr + tl.program_id(0))
    else:
        scale = from_e8m0(scale_code)
    add_or_not(out_ptr, offsets, mask, from_small(code, EXPONENT, MANTISSA) * scale, ADD)


# -------------------------------------------------------------- launchers


def _sections(codec: Any, payload: torch.Tensor, numel: int) -> tuple[torch.Tensor, ...]:
    scales_at, codes_at = codec.sections(numel)
    supers = payload[:scales_at].view(torch.float32)
    return supers, payload[scales_at:codes_at], payload[codes_at:]


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    supers, scales, codes = _sections(codec, args.out, numel)
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, supers, scales, codes),
        *(numel, scales.numel(), codes.numel()),
        EXPONENT=codec.element.exponent,
        MANTISSA=codec.element.mantissa,
        TOP_BITS=int(
            torch.tensor(codec.element.top, dtype=torch.float32, device="cpu").view(torch.int32)
        ),
        NV=codec.format == "nvfp4",
        CEIL=codec.scale == "ceil",
        BLOCK=codec.block,
        ROWS=TILE // codec.block,
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    supers, scales, codes = _sections(codec, payload, numel)
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(supers, scales, codes, out, numel, codes.numel()),
        EXPONENT=codec.element.exponent,
        MANTISSA=codec.element.mantissa,
        NV=codec.format == "nvfp4",
        BLOCK=codec.block,
        ROWS=TILE // codec.block,
        ADD=add,
    )
