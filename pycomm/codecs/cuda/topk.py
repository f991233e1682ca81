"""Launches of topk's CUDA kernels, in order, as in csrc/codecs/topk/topk.cu."""

from __future__ import annotations

import ctypes

import torch

from pycomm.codecs.args import EncodeArgs
from pycomm.codecs.cuda.kernels import LANES, WARPS, Call, StagedParams
from pycomm.codecs.cuda.names import NAMESPACE, ROW
from pycomm.codecs.topk import GROUP, INDEX_BITS, VALUE_BITS, TopK

# Constants of csrc/codecs/topk/scratch.h.
TILE = 2048
SLOT = TILE // 16
BINS = 2048
STATE = 16  # words
CLEARED = STATE + 2 * 3 * BINS
EXACT, SAMPLE = 0, 1

VALUES = tuple(VALUE_BITS)
INDICES = (*INDEX_BITS, "bitmap")


class TopkParams(StagedParams):
    """The struct of the same name in csrc/codecs/topk/scratch.h."""

    _fields_ = (
        ("length", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("last_k", ctypes.c_uint64),
        ("asked", ctypes.c_uint64),
        ("least", ctypes.c_uint64),
        ("sample_n", ctypes.c_uint64),
        ("sample_k", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint32),
        ("tensor", ctypes.c_uint32),
        ("sample", ctypes.c_uint32),
        ("values", ctypes.c_uint32),
        ("indices", ctypes.c_uint32),
        ("stage", ctypes.c_uint32),
    )


def scratch_bytes(codec: TopK, numel: int) -> int:
    """Return the scratch memory that a call needs, as ``Codec::scratch_bytes`` in C++."""
    if numel == 0:
        return 0
    staged = 2 * -(-_travel(codec, numel) // GROUP) * GROUP
    if codec.chunk:
        return 4 * -(-numel // codec.chunk) * staged
    sample = -(-codec.sampled(numel) // 4) * 4
    return 4 * (CLEARED + -(-numel // TILE) * (4 + SLOT) + sample + staged)


def encode_calls(codec: TopK, args: EncodeArgs, scratch: torch.Tensor) -> list[Call]:
    """Return the launches that do ``Codec.encode``."""
    numel = args.x.numel()
    if numel == 0:
        return []
    given = {
        "x": args.x.data_ptr(),
        "residual": 0 if args.residual is None else args.residual.data_ptr(),
        "new_residual": 0 if args.new_residual is None else args.new_residual.data_ptr(),
        "seed": args.key.seed,
        "step": args.key.step,
        "tensor": args.key.tensor,
    }
    params = _params(codec, numel, args.out, scratch, **given)
    flag = "true" if args.residual is not None else "false"
    if codec.chunk:
        return [_call(f"encode_chunks<{flag}>", numel, codec.chunk // WARPS, params)]

    def stage(number: int) -> list[Call]:
        here = _params(codec, numel, args.out, scratch, stage=number, **given)
        sampled = number == SAMPLE
        n, fed = (here.sample_n, "false") if sampled else (numel, flag)
        digits = ("first", "second", "third")
        return [
            *([_call(f"sample_kernel<{flag}>", n, 4 * LANES, here)] if sampled else []),
            *(_call(f"{name}_kernel<{fed}>", n, TILE, here) for name in digits),
            _call(f"{'sampled' if sampled else 'exact'}_kernel<{flag}>", numel, TILE, here),
            _call("scan_kernel", 1, 1, here),
        ]

    return [
        _call("clear_kernel", CLEARED, ROW, params),
        *(stage(SAMPLE) if codec.sample else []),
        *stage(EXACT),
        _call(f"choose_kernel<{flag}>", numel, TILE, params),
        _call(f"pack_kernel<{flag}>", params.k, GROUP, params),
    ]


def decode_calls(
    codec: TopK, payload: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor, *, add: bool
) -> list[Call]:
    """Return the launches that do ``Codec.decode`` or ``Codec.decode_add``."""
    numel = out.numel()
    if numel == 0:
        return []
    params = _params(codec, numel, payload, scratch, out=out.data_ptr())
    flag = "true" if add else "false"
    if codec.chunk:
        return [_call(f"decode_chunks<{flag}>", numel, codec.chunk // WARPS, params)]
    return [
        _call("clear_kernel", CLEARED, ROW, params),
        _call("check_kernel", params.k, LANES, params),
        _call(f"fill_kernel<{flag}>", numel, 4 * ROW, params),
        _call(f"scatter_kernel<{flag}>", params.k, LANES, params),
    ]


def kernels(codec: TopK) -> list[str]:
    """Return the names of all kernels that the codec may launch."""
    names = [f"{call}_chunks" for call in ("encode", "decode")]
    single = []
    if not codec.chunk:
        names = [f"{n}_kernel" for n in ("first", "second", "third", "exact", "choose", "pack")]
        names += [
            "fill_kernel",
            "scatter_kernel",
            *(["sample_kernel", "sampled_kernel"] if codec.sample else []),
        ]
        single = ["clear_kernel", "scan_kernel", "check_kernel"]
    names = [f"{name}<{flag}>" for name in names for flag in ("false", "true")]
    return [f"{NAMESPACE}::topk::{name}" for name in names + single]


def _travel(codec: TopK, numel: int) -> int:
    """Return the largest number of values sent for the largest record."""
    return codec.most(numel) if codec.sample else codec.count(codec.chunk or numel)


def _params(
    codec: TopK, numel: int, payload: torch.Tensor, scratch: torch.Tensor, **others: int
) -> TopkParams:
    length = codec.chunk or numel
    sample = codec.sampled(numel)
    return TopkParams(
        payload=payload.data_ptr(),
        scratch=scratch.data_ptr(),
        numel=numel,
        length=length,
        k=_travel(codec, numel),
        last_k=codec.count(numel % length),
        asked=codec.count(numel),
        least=codec.least(numel),
        sample_n=sample,
        sample_k=codec.count(sample),
        sample=codec.sample,
        values=VALUES.index(codec.values),
        indices=INDICES.index(codec.indices),
        **others,
    )


def _call(kernel: str, size: int, tile: int, params: TopkParams) -> Call:
    """Return one launch over ``size`` items, of which a warp takes ``tile``."""
    return Call("topk", f"{NAMESPACE}::topk::{kernel}", -(-size // (WARPS * tile)), params)
