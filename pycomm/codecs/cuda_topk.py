"""Which CUDA kernels of topk run, one after the other; csrc/codecs/topk.cu launches the same."""

from __future__ import annotations

import ctypes

import torch

from pycomm.codecs.base import EncodeArgs
from pycomm.codecs.cuda_kernels import LANES, WARPS, Call
from pycomm.codecs.cuda_names import NAMESPACE, ROW
from pycomm.codecs.topk import GROUP, INDEX_BITS, VALUE_BITS, TopK

# Of csrc/codecs/topk_scratch.h.
TILE = 2048
SLOT = TILE // 16
BINS = 2048
STATE = 16  # words
CLEARED = STATE + 2 * 3 * BINS
EXACT, SAMPLE = 0, 1

VALUES = tuple(VALUE_BITS)
INDICES = (*INDEX_BITS, "bitmap")


class TopkParams(ctypes.Structure):
    """The struct of the same name in csrc/codecs/topk_scratch.h."""

    _fields_ = (
        ("x", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("new_residual", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("payload", ctypes.c_uint64),
        ("scratch", ctypes.c_uint64),
        ("numel", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("last_k", ctypes.c_uint64),
        ("sample_n", ctypes.c_uint64),
        ("sample_k", ctypes.c_uint64),
        ("sample", ctypes.c_uint32),
        ("values", ctypes.c_uint32),
        ("indices", ctypes.c_uint32),
        ("stage", ctypes.c_uint32),
    )


def scratch_bytes(codec: TopK, numel: int) -> int:
    """Return how much scratch memory a call takes, as ``Codec::scratch_bytes`` in C++."""
    if numel == 0:
        return 0
    staged = 2 * -(-_travel(codec, numel) // GROUP) * GROUP
    if codec.chunk:
        return 4 * -(-numel // codec.chunk) * staged
    return 4 * (CLEARED + -(-numel // TILE) * (4 + SLOT) + staged)


def encode_calls(codec: TopK, args: EncodeArgs, scratch: torch.Tensor) -> list[Call]:
    """Return the launches that do ``Codec.encode``."""
    numel = args.x.numel()
    if numel == 0:
        return []
    pointers = {
        "x": args.x.data_ptr(),
        "residual": 0 if args.residual is None else args.residual.data_ptr(),
        "new_residual": 0 if args.new_residual is None else args.new_residual.data_ptr(),
    }
    params = _params(codec, numel, args.out, scratch, **pointers)
    flag = "true" if args.residual is not None else "false"
    if codec.chunk:
        return [_call(f"encode_chunks<{flag}>", numel, codec.chunk // WARPS, params)]

    def stage(number: int, last: str) -> list[Call]:
        here = _params(codec, numel, args.out, scratch, stage=number, **pointers)
        n = here.sample_n if number == SAMPLE else numel
        return [
            *(
                _call(f"{name}_kernel<{flag}>", n, TILE, here)
                for name in ("first", "second", "third")
            ),
            _call(f"{last}_kernel<{flag}>", numel, TILE, here),
            _call("scan_kernel", 1, 1, here),
        ]

    return [
        _call("clear_kernel", CLEARED, ROW, params),
        *(stage(SAMPLE, "sampled") if codec.sample else []),
        *stage(EXACT, "exact"),
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
    """Return the names of all kernels that the codec may start."""
    names = [f"{call}_chunks" for call in ("encode", "decode")]
    single = []
    if not codec.chunk:
        names = [f"{n}_kernel" for n in ("first", "second", "third", "exact", "choose", "pack")]
        names += ["fill_kernel", "scatter_kernel", *(["sampled_kernel"] if codec.sample else [])]
        single = ["clear_kernel", "scan_kernel", "check_kernel"]
    names = [f"{name}<{flag}>" for name in names for flag in ("false", "true")]
    return [f"{NAMESPACE}::topk::{name}" for name in names + single]


def _travel(codec: TopK, numel: int) -> int:
    """The most that travels of the largest record."""
    return codec.most(numel) if codec.sample else codec.count(codec.chunk or numel)


def _params(
    codec: TopK, numel: int, payload: torch.Tensor, scratch: torch.Tensor, **others: int
) -> TopkParams:
    length = codec.chunk or numel
    sample = -(-numel // codec.sample) if codec.sample else 0
    return TopkParams(
        payload=payload.data_ptr(),
        scratch=scratch.data_ptr(),
        numel=numel,
        length=length,
        k=_travel(codec, numel),
        last_k=codec.count(numel % length),
        sample_n=sample,
        sample_k=codec.count(sample),
        sample=codec.sample,
        values=VALUES.index(codec.values),
        indices=INDICES.index(codec.indices),
        **others,
    )


def _call(kernel: str, size: int, tile: int, params: TopkParams) -> Call:
    """One launch over ``size`` things, of which a warp takes ``tile``."""
    return Call("topk", f"{NAMESPACE}::topk::{kernel}", -(-size // (WARPS * tile)), params)
