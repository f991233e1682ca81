"""topk in Triton. Wire format: docs/wire/topk.md. The kernels of topk_select.py find the values
to send; those of topk_pack.py and topk_unpack.py write and read payloads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from pycomm.triton_kernels._launch import launch
from pycomm.triton_kernels._math import INF_BITS
from pycomm.triton_kernels.topk_pack import GROUP, HUGE_BITS, pack_kernel
from pycomm.triton_kernels.topk_select import (
    BINS,
    STATE,
    choose_kernel,
    chunks_kernel,
    count_kernel,
    histogram_kernel,
    scan_kernel,
)
from pycomm.triton_kernels.topk_unpack import fill_kernel, scatter_kernel

TILE = 2048  # values that a program processes together: 16 per thread of four warps


def _views(payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload as bytes and as words."""
    return payload, payload.view(torch.int32)


def _shape(codec: Any, numel: int) -> tuple[int, int, int, int]:
    """Return (values of a record, records, values sent of a record, values sent of the last)."""
    length = codec.granule or numel
    k = codec.count(length)
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
    if codec.granule:
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
        FEEDBACK=args.residual is not None,
    )


def _constants(codec: Any, args: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the constants of all kernels of the selection, and the limit of magnitudes."""
    limit = INF_BITS.value if codec.values == "float32" else HUGE_BITS.value
    return {"FEEDBACK": args.residual is not None, "TILE": TILE}, {"LIMIT": limit}


def _choose_chunks(
    codec: Any, args: Any, state: torch.Tensor, p: torch.Tensor, index: torch.Tensor
) -> None:
    numel = args.x.numel()
    length, records, k, last_k = _shape(codec, numel)
    common, limit = _constants(codec, args)
    launch(
        chunks_kernel,
        records,
        *(args.x, args.residual, args.new_residual, state, p, index),
        *(numel, k, last_k, p.numel() // records),
        LENGTH=length,
        **limit,
        **common,
    )


def _choose(
    codec: Any, args: Any, state: torch.Tensor, p: torch.Tensor, index: torch.Tensor
) -> None:
    numel = args.x.numel()
    k = codec.count(numel)
    tiles = triton.cdiv(numel, TILE)
    common, limit = _constants(codec, args)
    around = torch.empty(2 * tiles, dtype=torch.int32, device=args.x.device)
    bins = torch.zeros(3 * BINS.value, dtype=torch.int32, device=args.x.device)
    for level in range(3):
        launch(
            histogram_kernel,
            tiles,
            *(args.x, args.residual, bins, numel, k),
            LEVEL=level,
            **common,
        )
    launch(
        count_kernel,
        tiles,
        *(args.x, args.residual, state, bins, around, tiles, numel, k),
        **limit,
        **common,
    )
    launch(scan_kernel, 1, around, tiles, SIZE=1024)
    launch(
        choose_kernel,
        tiles,
        *(args.x, args.residual, args.new_residual, state, around, tiles, p, index, numel),
        p.numel(),
        **common,
    )


def decode(codec: Any, payload: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Store the decoded payload in ``out``, or add it to ``out``."""
    numel = out.numel()
    if numel == 0:
        return
    length, records, k, last_k = _shape(codec, numel)
    void = torch.zeros(records, dtype=torch.int32, device=out.device)
    groups = triton.cdiv(k, 1024)

    def scatter(check: bool) -> None:
        launch(
            scatter_kernel,
            records * groups,
            *(void, *_views(payload), out, numel, length, groups, k, last_k),
            VALUES=codec.values,
            INDICES=codec.indices,
            SIZE=1024,
            CHECK=check,
            ADD=add,
        )

    scatter(check=True)
    launch(fill_kernel, triton.cdiv(numel, 1024), void, out, numel, length, SIZE=1024, ADD=add)
    scatter(check=False)
