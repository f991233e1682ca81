"""rotate in Triton. Wire format: docs/wire/rotate.md; the inner codecs are in files of their own.

A program processes a tile of whole rotations, which also contains whole blocks of the inner codec.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import as_int32, launch
from pycomm.triton_kernels._math import add_or_not, error_after, load_sum
from pycomm.triton_kernels._rotation import (
    HEADER,
    TILE,
    WARPS,
    header_of,
    header_words,
    load_header,
    rotate,
    rotation_signs,
    shape,
    store_header,
    unrotate,
)
from pycomm.triton_kernels.cast import CODE, FLOAT8, from_code, to_code
from pycomm.triton_kernels.cast import decode_rows as decode_float8
from pycomm.triton_kernels.cast import encode_rows as encode_float8
from pycomm.triton_kernels.quant import decode_rows as decode_quant
from pycomm.triton_kernels.quant import encode_rows as encode_quant
from pycomm.triton_kernels.sign import decode_values as decode_sign
from pycomm.triton_kernels.sign import encode_rows as encode_sign

# ---------------------------------------------------------------- kernels


@triton.jit(
    do_not_specialize=[
        "key_low",
        "key_high",
        "first_low",
        "first_high",
        "seed_low",
        "seed_high",
        "step",
        "tensor",
        "group_low",
        "group_high",
        "shift",
    ]
)
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, header_ptr, scale_ptr, code_ptr,
    numel, rotated, scale_numbers, codes,
    key_low, key_high, first_low, first_high,
    seed_low, seed_high, step, tensor, group_low, group_high, shift,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    INNER: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, MINMAX: tl.constexpr, BFLOAT16: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    store_header(header_ptr, key_low, key_high, first_low, first_high)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * SIZE + tl.arange(0, SIZE)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    signs = rotation_signs(key_low, key_high, first_low, first_high, ROWS, SIZE)
    y = tl.reshape(rotate(p, signs, ROWS, SIZE, STEPS), (BLOCKS, BLOCK))

    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    if INNER == "quant":
        value = encode_quant(
            y, block, rotated, scale_ptr, code_ptr, scale_numbers, codes,
            seed_low, seed_high, step, tensor, group_low, group_high, shift,
            BITS, BLOCK, BLOCKS, STOCHASTIC, MINMAX, BFLOAT16,
        )  # fmt: skip
    elif INNER == "sign":
        value = encode_sign(y, block, rotated, scale_ptr, code_ptr, codes, BLOCK, BLOCKS)
    elif INNER == "float8":
        value = encode_float8(
            y, block, rotated, scale_ptr, code_ptr, codes, EXPONENT, MANTISSA, TOP, BLOCK
        )
    else:
        code = to_code(y, INNER)
        places = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        tl.store(code_ptr + places, code, mask=places < codes)
        value = from_code(code, INNER)
    if FEEDBACK:
        value = unrotate(tl.reshape(value, (ROWS, SIZE)), signs, ROWS, SIZE, STEPS)
        tl.store(new_residual_ptr + offsets, error_after(p, value, residual), mask=mask)


@triton.jit
def decode_kernel(
    header_ptr, scale_ptr, code_ptr, out_ptr, numel, rotated, codes,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    INNER: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, MINMAX: tl.constexpr, BFLOAT16: tl.constexpr,
    EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    key_low, key_high, first_low, first_high = load_header(header_ptr)
    signs = rotation_signs(key_low, key_high, first_low, first_high, ROWS, SIZE)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    places = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    if INNER == "quant":
        y = decode_quant(
            scale_ptr, code_ptr, block, rotated, codes, BITS, BLOCK, BLOCKS, MINMAX, BFLOAT16
        )
    elif INNER == "sign":
        y = decode_sign(scale_ptr, code_ptr, places, rotated, BLOCK)
    elif INNER == "float8":
        y = decode_float8(scale_ptr, code_ptr, block, rotated, EXPONENT, MANTISSA, BLOCK)
    else:
        y = from_code(tl.load(code_ptr + places, mask=places < rotated, other=0), INNER)
    value = unrotate(tl.reshape(y, (ROWS, SIZE)), signs, ROWS, SIZE, STEPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * SIZE + tl.arange(0, SIZE)[None, :]
    add_or_not(out_ptr, offsets, offsets < numel, value, ADD)


# -------------------------------------------------------------- launchers


def _rotated(codec: Any, numel: int) -> int:
    return triton.cdiv(numel, codec.size) * codec.size


def _sections(
    codec: Any, payload: torch.Tensor, numel: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the header, as words; scales and codes in the types of the inner codec's kernels."""
    header, inner, rotated = header_of(payload), payload[HEADER:], _rotated(codec, numel)
    if codec.inner.name == "quant":
        end = -(-codec.inner.scale_bytes(rotated) // 4) * 4
        dtype = torch.int16 if codec.inner.scale == "bfloat16" else torch.float32
        return header, inner[:end].view(dtype), inner[end:]
    end = 4 * triton.cdiv(rotated, codec.inner.block) if codec.inner.block else 0
    scale, codes = inner[:end].view(torch.float32), inner[end:]
    if codec.inner.name == "cast":
        dtype = CODE.get(codec.inner.dtype, torch.uint8)
        return header, scale, codes.view(dtype)
    return header, scale, codes.view(torch.int32)


def _constants(codec: Any, encode: bool) -> dict[str, Any]:
    """Return the constants for which the kernels are compiled."""
    inner = codec.inner
    exponent, mantissa, top = FLOAT8.get(getattr(inner, "dtype", ""), (0, 0, 0.0))
    quant = inner.name == "quant"
    name = "float8" if exponent else getattr(inner, "dtype", inner.name)
    block = inner.block or TILE
    constants = {
        **shape(codec.size),
        "INNER": name,
        "BLOCKS": TILE // block,
        "BLOCK": block,
        "BITS": inner.bits if quant else 0,
        "MINMAX": quant and inner.range == "minmax",
        "BFLOAT16": quant and inner.scale == "bfloat16",
        "EXPONENT": exponent,
        "MANTISSA": mantissa,
        "num_warps": WARPS,
    }
    if encode:
        constants |= {"STOCHASTIC": quant and inner.rounding != "nearest", "TOP": top}
    return constants


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    if numel == 0:
        return
    header, scale, codes = _sections(codec, args.out, numel)
    key, group = args.key, args.index // 4
    shift = codec.inner.shift(key) if codec.inner.name == "quant" else 0
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, header, scale, codes),
        *(numel, _rotated(codec, numel), scale.numel(), codes.numel()),
        *header_words(codec, args),
        *(as_int32(key.seed & 0xFFFFFFFF), as_int32(key.seed >> 32)),
        *(as_int32(key.step), as_int32(key.tensor)),
        *(as_int32(group & 0xFFFFFFFF), as_int32(group >> 32)),
        as_int32(shift),
        **_constants(codec, encode=True),
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    if numel == 0:
        return
    header, scale, codes = _sections(codec, payload, numel)
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(header, scale, codes, out, numel, _rotated(codec, numel), codes.numel()),
        **_constants(codec, encode=False),
        ADD=add,
    )
