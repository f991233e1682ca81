"""eden in Triton. Wire format: docs/wire/eden.md; arithmetic as in csrc/codecs/eden.h.

A program processes a tile of whole rotations, one per row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import (
    HUGE,
    INF_BITS,
    NAN_BITS,
    TINY,
    add_or_not,
    bits_float,
    error_after,
    float_bits,
    load_codes,
    load_sum,
    magnitude_bits,
    store_codes,
)
from pycomm.triton_kernels._rotation import (
    HEADER,
    TILE,
    WARPS,
    header_of,
    header_words,
    load_header,
    random_bits,
    rotate,
    rotation_signs,
    shape,
    store_header,
    sums,
    unrotate,
)

# Of 5 to 8 bits.
# fmt: off
FINE = (
    (
        0.06588966, 0.19805183, 0.3313783, 0.4666995, 0.6049336, 0.7471357, 0.8945651, 1.0487833,
        1.2118044, 1.3863404, 1.576228, 1.7872332, 2.0287285, 2.3177395, 2.6911197, 3.2607324,
    ),
    (
        0.033409506, 0.10027829, 0.1672969, 0.23456699, 0.30219284, 0.37028265, 0.43894967,
        0.5083138, 0.578503, 0.6496556, 0.7219219, 0.7954677, 0.8704766, 0.94715494, 1.0257363,
        1.1064882, 1.1897202, 1.2757945, 1.365141, 1.4582764, 1.5558312, 1.6585889, 1.7675419,
        1.8839773, 2.0096111, 2.1468103, 2.2989812, 2.471305, 2.6722739, 2.9174068, 3.240437,
        3.7441013,
    ),
    (
        0.01682817, 0.050490864, 0.08417264, 0.11788628, 0.15164465, 0.18546072, 0.21934764,
        0.25331873, 0.28738755, 0.32156795, 0.35587403, 0.3903203, 0.42492166, 0.45969343,
        0.49465147, 0.5298122, 0.56519264, 0.6008105, 0.6366843, 0.6728333, 0.70927787, 0.74603915,
        0.78313965, 0.82060295, 0.8584542, 0.89671993, 0.9354285, 0.97461, 1.0142967, 1.0545232,
        1.0953267, 1.1367474, 1.1788286, 1.2216175, 1.2651651, 1.3095276, 1.3547662, 1.4009485,
        1.448149, 1.49645, 1.5459437, 1.5967331, 1.6489339, 1.702677, 1.7581115, 1.8154078,
        1.8747625, 1.9364046, 2.0006018, 2.0676715, 2.1379933, 2.2120275, 2.2903392, 2.3736343,
        2.4628115, 2.5590405, 2.6638865, 2.7795143, 2.9090471, 3.0572462, 3.231933, 3.4474304,
        3.7349367, 4.189694,
    ),
    (
        0.008446193, 0.025339384, 0.042234983, 0.059134603, 0.07603986, 0.092952356, 0.10987372,
        0.12680559, 0.14374956, 0.16070732, 0.17768049, 0.19467075, 0.21167976, 0.2287092,
        0.24576078, 0.26283622, 0.27993724, 0.2970656, 0.31422305, 0.3314114, 0.34863243, 0.365888,
        0.38317996, 0.40051022, 0.41788065, 0.4352932, 0.45274988, 0.47025266, 0.4878036,
        0.5054048, 0.5230583, 0.5407663, 0.55853105, 0.5763547, 0.5942396, 0.6121881, 0.6302026,
        0.6482855, 0.6664394, 0.68466675, 0.70297027, 0.72135264, 0.7398166, 0.75836504,
        0.77700084, 0.795727, 0.8145467, 0.833463, 0.8524793, 0.8715989, 0.8908253, 0.91016203,
        0.92961293, 0.9491818, 0.9688726, 0.98868936, 1.0086365, 1.0287182, 1.0489392, 1.0693042,
        1.0898181, 1.110486, 1.1313132, 1.1523054, 1.1734682, 1.1948076, 1.2163299, 1.2380418,
        1.2599499, 1.2820615, 1.304384, 1.3269253, 1.3496937, 1.3726976, 1.3959464, 1.4194493,
        1.4432166, 1.4672587, 1.491587, 1.5162132, 1.5411496, 1.5664098, 1.5920075, 1.6179578,
        1.6442765, 1.6709803, 1.6980875, 1.7256169, 1.7535894, 1.7820269, 1.8109531, 1.8403933,
        1.8703752, 1.900928, 1.9320842, 1.9638784, 1.9963485, 2.0295358, 2.0634851, 2.0982466,
        2.1338742, 2.1704283, 2.2079754, 2.24659, 2.2863545, 2.3273618, 2.3697171, 2.4135387,
        2.4589622, 2.5061426, 2.5552595, 2.6065214, 2.660174, 2.7165077, 2.7758706, 2.8386858,
        2.905473, 2.9768822, 3.053742, 3.1371326, 3.2285001, 3.3298485, 3.4440718, 3.575588,
        3.7316663, 3.9256377, 4.1865954, 4.6035357,
    ),
)
# fmt: on


def _between(levels: tuple[float, ...]) -> tuple[float, ...]:
    """Return the midpoints between neighbours, in float32."""
    at = torch.tensor(levels, dtype=torch.float32)
    return tuple(((at[:-1] + at[1:]) * 0.5).tolist())


# Magnitudes of the levels by bits, and the thresholds between adjacent levels.
LEVELS = tl.constexpr(
    (
        (0.0,),
        (0.7978846,),
        (0.45278, 1.5104176),
        (0.2450942, 0.7560053, 1.3439093, 2.1519457),
        (0.128395, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
        *FINE,
    )
)
BORDERS = tl.constexpr(
    (
        (),
        (),
        (0.9815988,),
        (0.5005497, 1.0499573, 1.7479275),
        (0.2582217, 0.5224037, 0.7995498, 1.0992858, 1.4371388, 1.8435318, 2.4008034),
        *map(_between, FINE),
    )
)

# ---------------------------------------------------------------- kernels


@triton.jit
def level_of(place, BITS: tl.constexpr):
    value = tl.full(place.shape, LEVELS[BITS][0], tl.float32)
    for i in tl.static_range((1 << BITS) // 2 - 1):
        value = tl.where(place > i, LEVELS[BITS][i + 1], value)
    return value


@triton.jit
def quantize(u, inv, BITS: tl.constexpr):
    """Return codes (int32), a level's index with the sign on top, and the values they represent."""
    if BITS == 0:
        code = tl.zeros_like(float_bits(u))
        value = tl.zeros_like(u)
    else:
        z = bits_float(magnitude_bits(u * inv))
        place = tl.zeros_like(float_bits(u))
        for i in tl.static_range((1 << BITS) // 2 - 1):
            place += (z >= BORDERS[BITS][i]).to(tl.int32)
        negative = (float_bits(u) >> 31) & 1
        code = place | negative << (BITS - 1)
        value = bits_float(float_bits(level_of(place, BITS)) | negative << 31)
    return code, value


@triton.jit
def dequantize(code, BITS: tl.constexpr):
    """Return the values of the lowest BITS bits of codes (int32)."""
    if BITS == 0:
        value = code.to(tl.float32) * 0.0
    else:
        level = level_of(code & ((1 << (BITS - 1)) - 1), BITS)
        value = bits_float(float_bits(level) | (code >> (BITS - 1) & 1) << 31)
    return value


@triton.jit
def halves_of(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the first and the second half of each row."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, SIZE // 2)), (0, 2, 1)))


@triton.jit
def decoded(
    code, scale, second, ROWS: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    if HALF:
        wide = dequantize(code >> BITS, BITS + 1) * scale
        narrow = dequantize(code, BITS) * scale
        pairs = tl.join(tl.where(second, narrow, wide), tl.where(second, wide, narrow))
        value = tl.reshape(tl.permute(pairs, (0, 2, 1)), (ROWS, SIZE))
    else:
        value = dequantize(code, BITS) * scale
    return value


@triton.jit(do_not_specialize=["key_low", "key_high", "first_low", "first_high"])
def encode_kernel(
    x_ptr, residual_ptr, new_residual_ptr, payload_ptr, scale_ptr, code_ptr, numel, code_bytes,
    key_low, key_high, first_low, first_high,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    BITS: tl.constexpr, HALF: tl.constexpr, MMSE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    store_header(payload_ptr, key_low, key_high, first_low, first_high)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * SIZE + tl.arange(0, SIZE)[None, :]
    mask = offsets < numel
    p, residual = load_sum(x_ptr, residual_ptr, offsets, mask, FEEDBACK)
    signs = rotation_signs(key_low, key_high, first_low, first_high, ROWS, SIZE)
    y = rotate(p, signs, ROWS, SIZE, STEPS)

    amax = bits_float(tl.max(magnitude_bits(y), axis=1, keep_dims=True))
    used = (amax > TINY) & (amax < HUGE)
    exponent = float_bits(tl.where(used, amax, 1.0)) & INF_BITS
    u = tl.where(used, y * bits_float((254 << 23) - exponent), 0.0)
    energy = tl.where(used, sums(u * u, ROWS, SIZE, STEPS), 1.0)
    inv = tl.math.sqrt_rn(tl.math.div_rn(SIZE * 1.0, energy))
    second = signs
    if HALF:
        choice = random_bits(key_low, key_high, first_low, first_high, ROWS, SIZE, 1)
        second, _ = halves_of(choice, ROWS, SIZE)
        second = second == 1
        a, b = halves_of(u, ROWS, SIZE)
        wide, narrow = tl.where(second, b, a), tl.where(second, a, b)
        code, value = quantize(wide, inv, BITS + 1)
        low, low_value = quantize(narrow, inv, BITS)
        code = low | code << BITS
        along = value * wide + low_value * narrow
        square = value * value + low_value * low_value
    else:
        code, value = quantize(u, inv, BITS)
        along, square = value * u, value * value
    UNITS: tl.constexpr = SIZE // 2 if HALF else SIZE
    UNIT_STEPS: tl.constexpr = STEPS - 1 if HALF else STEPS
    total = tl.where(used, sums(along, ROWS, UNITS, UNIT_STEPS), 1.0)
    if MMSE:
        ratio = tl.math.div_rn(total, tl.where(used, sums(square, ROWS, UNITS, UNIT_STEPS), 1.0))
    else:
        ratio = tl.math.div_rn(energy, total)
    nan = bits_float(tl.full(amax.shape, NAN_BITS, tl.int32))
    unused = tl.where(amax <= TINY, 0.0, nan)
    scale = tl.where(used, ratio * bits_float(exponent), unused)
    code = tl.where(used, code, 0)

    tl.store(scale_ptr + row, scale, mask=row * SIZE < numel)
    UNIT_BITS: tl.constexpr = 2 * BITS + 1 if HALF else BITS
    store_codes(code_ptr, row, code, code_bytes, UNIT_BITS, UNITS, ROWS)
    if FEEDBACK:
        y = decoded(code, scale, second, ROWS, SIZE, BITS, HALF)
        left = error_after(p, unrotate(y, signs, ROWS, SIZE, STEPS), residual)
        tl.store(new_residual_ptr + offsets, left, mask=mask)


@triton.jit
def decode_kernel(
    payload_ptr, scale_ptr, code_ptr, out_ptr, numel, code_bytes,
    ROWS: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr,
    BITS: tl.constexpr, HALF: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    key_low, key_high, first_low, first_high = load_header(payload_ptr)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * SIZE + tl.arange(0, SIZE)[None, :]
    signs = rotation_signs(key_low, key_high, first_low, first_high, ROWS, SIZE)
    second = signs
    if HALF:
        choice = random_bits(key_low, key_high, first_low, first_high, ROWS, SIZE, 1)
        second, _ = halves_of(choice, ROWS, SIZE)
        second = second == 1
    scale = tl.load(scale_ptr + row, mask=row * SIZE < numel, other=0.0)
    UNIT_BITS: tl.constexpr = 2 * BITS + 1 if HALF else BITS
    UNITS: tl.constexpr = SIZE // 2 if HALF else SIZE
    code = load_codes(code_ptr, row, code_bytes, UNIT_BITS, UNITS, ROWS)
    y = decoded(code, scale, second, ROWS, SIZE, BITS, HALF)
    value = unrotate(y, signs, ROWS, SIZE, STEPS)
    add_or_not(out_ptr, offsets, offsets < numel, value, ADD)


# -------------------------------------------------------------- launchers


def _sections(
    codec: Any, payload: torch.Tensor, numel: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the header, as words; the scales; the codes."""
    end = HEADER + 4 * triton.cdiv(numel, codec.size)
    return header_of(payload), payload[HEADER:end].view(torch.float32), payload[end:]


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    header, scale, codes = _sections(codec, args.out, numel)
    launch(
        encode_kernel,
        triton.cdiv(numel, TILE),
        *(args.x, args.residual, args.new_residual, header, scale, codes),
        *(numel, codes.numel()),
        *header_words(codec, args),
        **shape(codec.size),
        num_warps=WARPS,
        BITS=int(codec.bits),
        HALF=codec.bits != int(codec.bits),
        MMSE=codec.scale == "mmse",
        FEEDBACK=args.residual is not None,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor) -> None:
    """Store the decoded payload in ``out``."""
    _decode(codec, payload, out, add=False)


def decode_add(codec: Any, payload: torch.Tensor, out: torch.Tensor) -> None:
    """Add the decoded payload to ``out``."""
    _decode(codec, payload, out, add=True)


def _decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    numel = out.numel()
    header, scale, codes = _sections(codec, payload, numel)
    launch(
        decode_kernel,
        triton.cdiv(numel, TILE),
        *(header, scale, codes, out, numel, codes.numel()),
        **shape(codec.size),
        num_warps=WARPS,
        BITS=int(codec.bits),
        HALF=codec.bits != int(codec.bits),
        ADD=add,
    )
