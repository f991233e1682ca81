"""Calls of each operation in torch.distributed, for any backend.

Each function takes torch.distributed, the group, the case, and the input and output tensor, and
returns a callable that runs the operation once. The caller imports torch.
"""

from __future__ import annotations

from typing import Any

from pycomm.bench.ops.cases import Case, Run


def _redop(dist: Any, case: Case) -> Any:
    return {"prod": dist.ReduceOp.PRODUCT}.get(case.redop) or getattr(
        dist.ReduceOp, case.redop.upper()
    )


def _newer(dist: Any, name: str, old: str) -> Any:
    """Return the function torch 2.13 renamed, or the old one; the old names warn there."""
    return getattr(dist, name, None) or getattr(dist, old)


def all_reduce(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    op = _redop(dist, case)
    return lambda: dist.all_reduce(x, op, group)


def reduce_scatter(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    op = _redop(dist, case)
    call = _newer(dist, "reduce_scatter_single", "reduce_scatter_tensor")
    return lambda: call(y, x, op, group)


def all_gather(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    call = _newer(dist, "all_gather_single", "all_gather_into_tensor")
    return lambda: call(y, x, group)


def broadcast(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    return lambda: dist.broadcast(x, 0, group)


def all_to_all(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    return lambda: dist.all_to_all_single(y, x, group=group)


def reduce(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    op = _redop(dist, case)

    def run() -> None:  # torch's call is in place, so the copy preserves the input
        y.copy_(x)
        dist.reduce(y, 0, op, group)

    return run


def gather(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    parts = list(y.chunk(case.ranks)) if case.rank == 0 else None
    return lambda: dist.gather(x, parts, 0, group)


def scatter(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    parts = list(x.chunk(case.ranks)) if case.rank == 0 else None
    return lambda: dist.scatter(y, parts, 0, group)


def sendrecv(dist: Any, group: Any, case: Case, x: Any, y: Any) -> Run:
    after, before = (case.rank + 1) % case.ranks, (case.rank - 1) % case.ranks

    def run() -> None:
        receive = dist.irecv(y, before, group)
        send = dist.isend(x, after, group)
        send.wait()
        receive.wait()

    return run
