"""topk in Triton. Wire format: docs/wire/topk.md. Which values travel is found by the kernels of
topk_select.py; those of topk_pack.py and topk_unpack.py write and read them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import INF_BITS
from pycomm.triton_kernels.topk_pack import GROUP, pack_kernel
from pycomm.triton_kernels.topk_select import (
    BINS,
    STATE,
    choose_kernel,
    chunks_kernel,
    count_kernel,
    histogram_kernel,
    scan_kernel,
)
from pycomm.triton_kernels.topk_unpack import decode_bitmaps_kernel, fill_kernel, scatter_kernel

TILE = 2048  # values that a program looks at together: 16 per thread of four warps
LIMITS = {"int8": 0x7F000000}  # of magnitudes, by form of the values; else Inf


def _views(payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The payload as bytes, as halves of words and as words."""
    return payload, payload.view(torch.int16), payload.view(torch.int32)


def _shape(codec: Any, numel: int) -> tuple[int, int, int, int]:
    """Return (values of a record, records, how many travel of one, of the last one)."""
    length = codec.chunk or numel
    k = codec.most(numel) if codec.sample else codec.count(length)
    rest = numel % length
    return length, triton.cdiv(numel, length), k, codec.count(rest) if rest else k


def encode(codec: Any, args: Any) -> None:
    """Write the payload and, if there is one, the new residual: pycomm.codecs.base.EncodeArgs."""
    numel = args.x.numel()
    if numel == 0:
        return
    length, records, k, last_k = _shape(codec, numel)
    groups = triton.cdiv(k, GROUP.value)
    device = args.x.device
    state = torch.zeros(records * STATE.value, dtype=torch.int32, device=device)
    p = torch.empty(records * groups * GROUP.value, device=device)
    index = torch.empty_like(p, dtype=torch.int32)
    if codec.chunk:
        _choose_chunks(codec, args, state, p, index)
    else:
        _choose(codec, args, state, p, index)
    launch(
        pack_kernel,
        records * groups,
        *(state, p, index, args.residual, args.new_residual, *_views(args.out)),
        *(numel, length, groups, k, last_k),
        VALUES=codec.values,
        INDICES=codec.indices,
        SAMPLED=codec.sample > 0,
        FEEDBACK=args.residual is not None,
    )


def _constants(codec: Any, args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all kernels of the selection must know, and the limit of magnitudes."""
    limit = LIMITS.get(codec.values, INF_BITS.value)
    return {"FEEDBACK": args.residual is not None, "TILE": TILE}, {"LIMIT": limit}


def _choose_chunks(
    codec: Any, args: Any, state: torch.Tensor, p: torch.Tensor, index: torch.Tensor
) -> None:
    numel = args.x.numel()
    length, records, k, last_k = _shape(codec, numel)
    common, limit = _constants(codec, args)
    last = numel - (records - 1) * length
    launch(
        chunks_kernel,
        records,
        *(args.x, args.residual, args.new_residual, state, p, index, args.out.view(torch.int32)),
        *(numel, k, last_k, p.numel() // records, codec.encoded_bytes(length) // 4),
        *(codec.indices_at(length) // 4, codec.indices_at(last) // 4),
        LENGTH=length,
        BITMAP=codec.indices == "bitmap",
        **limit,
        **common,
    )


def _choose(
    codec: Any, args: Any, state: torch.Tensor, p: torch.Tensor, index: torch.Tensor
) -> None:
    numel = args.x.numel()
    *_, k, _ = _shape(codec, numel)
    tiles = triton.cdiv(numel, TILE)
    common, limit = _constants(codec, args)
    around = torch.empty(2 * tiles, dtype=torch.int32, device=args.x.device)
    stages = [(codec.sample, codec.count(triton.cdiv(numel, codec.sample)))] if codec.sample else []
    for stride, place in [*stages, (0, k)]:
        n = triton.cdiv(numel, stride or 1)
        bins = torch.zeros(3 * BINS.value, dtype=torch.int32, device=args.x.device)
        for level in range(3):
            launch(
                histogram_kernel,
                triton.cdiv(n, TILE),
                *(args.x, args.residual, state, bins, n, stride or 1, place),
                LEVEL=level,
                **common,
            )
        launch(
            count_kernel,
            tiles,
            *(args.x, args.residual, state, bins, around, tiles, numel, place),
            SAMPLED=stride > 0,
            **limit,
            **common,
        )
        launch(scan_kernel, 1, state, around, tiles, k, SAMPLED=stride > 0, SIZE=1024)
    launch(
        choose_kernel,
        tiles,
        *(args.x, args.residual, args.new_residual, state, around, tiles, p, index, numel),
        **common,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor) -> None:
    """out = decode(payload)."""
    _decode(codec, payload, out, add=False)


def decode_add(codec: Any, payload: torch.Tensor, out: torch.Tensor) -> None:
    """out = out + decode(payload)."""
    _decode(codec, payload, out, add=True)


def _decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    numel = out.numel()
    if numel == 0:
        return
    length, records, k, last_k = _shape(codec, numel)
    if codec.indices == "bitmap":
        launch(
            decode_bitmaps_kernel,
            records,
            *(*_views(payload), out, numel, length, k, last_k),
            VALUES=codec.values,
            TILE=TILE,
            ADD=add,
        )
        return
    void = torch.zeros(records, dtype=torch.int32, device=out.device)
    groups = triton.cdiv(k, 1024)

    def scatter(check: bool) -> None:
        launch(
            scatter_kernel,
            records * groups,
            *(void, *_views(payload), out, numel, length, groups, k, last_k),
            VALUES=codec.values,
            INDICES=codec.indices,
            SAMPLED=codec.sample > 0,
            SIZE=1024,
            CHECK=check,
            ADD=add,
        )

    scatter(check=True)
    launch(fill_kernel, triton.cdiv(numel, 1024), void, out, numel, length, SIZE=1024, ADD=add)
    scatter(check=False)
