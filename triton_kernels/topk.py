"""topk in Triton. Wire format: docs/wire/topk.md. The kernels of topk_select.py find the values
to send; those of topk_pack.py and topk_unpack.py write and read payloads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from pycomm.triton_kernels._launch import as_int32, launch
from pycomm.triton_kernels._math import INF_BITS
from pycomm.triton_kernels.topk_pack import GROUP, pack_kernel
from pycomm.triton_kernels.topk_select import (
    BINS,
    STATE,
    choose_kernel,
    chunks_kernel,
    count_kernel,
    histogram_kernel,
    sample_kernel,
    scan_kernel,
)
from pycomm.triton_kernels.topk_unpack import decode_bitmaps_kernel, fill_kernel, scatter_kernel

TILE = 2048  # values that a program processes together: 16 per thread of four warps
# Limits of magnitudes by format of the values; Inf for the others.
LIMITS = {"float16": 0x7F000000, "int8": 0x7F000000, "bins2": 0x7F000000}


def _views(payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the payload as bytes, as halves of words and as words."""
    return payload, payload.view(torch.int16), payload.view(torch.int32)


def _shape(codec: Any, numel: int) -> tuple[int, int, int, int]:
    """Return (values of a record, records, values sent of a record, values sent of the last)."""
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
    p = torch.empty(records * groups * GROUP.value, device=device, dtype=torch.float32)
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
    """Return the constants of all kernels of the selection, and the limit of magnitudes."""
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
    asked = codec.count(numel)
    stages = [(args.x, args.residual, asked)]
    if codec.sample:
        sample = _sample(codec, args)
        stages.insert(0, (sample, None, codec.count(sample.numel())))
    for x, residual, place in stages:
        sampled = x is not args.x
        bins = torch.zeros(3 * BINS.value, dtype=torch.int32, device=args.x.device)
        for level in range(3):
            launch(
                histogram_kernel,
                triton.cdiv(x.numel(), TILE),
                *(x, residual, state, bins, x.numel(), place),
                LEVEL=level,
                **(common | {"FEEDBACK": residual is not None}),
            )
        launch(
            count_kernel,
            tiles,
            *(args.x, args.residual, state, bins, around, tiles, numel, place),
            SAMPLED=sampled,
            **limit,
            **common,
        )
        launch(
            scan_kernel,
            1,
            *(state, around, tiles, asked, codec.least(numel), k),
            SAMPLED=sampled,
            SIZE=1024,
        )
    launch(
        choose_kernel,
        tiles,
        *(args.x, args.residual, args.new_residual, state, around, tiles, p, index, numel),
        p.numel(),
        **common,
    )


def _sample(codec: Any, args: Any) -> torch.Tensor:
    """Return the sample whose k-th largest is the threshold, one value of each stretch."""
    numel, key = args.x.numel(), args.key
    sample = torch.empty(codec.sampled(numel), device=args.x.device, dtype=torch.float32)
    words = (key.seed & 0xFFFFFFFF, key.seed >> 32, key.step, key.tensor)
    launch(
        sample_kernel,
        triton.cdiv(sample.numel(), 4 * 256),
        *(args.x, args.residual, sample, numel, sample.numel(), codec.sample),
        *map(as_int32, words),
        FEEDBACK=args.residual is not None,
        SIZE=4 * 256,
    )
    return sample


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
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
