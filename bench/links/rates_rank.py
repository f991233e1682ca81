"""A rank that moves tensors by several backends in turns, for rates.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm._build import load_c10d
from pycomm.bench.lab.jobs import answer
from pycomm.bench.links.turns import slowest

CODEC = "quant:bits=8"


def coded(group: Any, whole: torch.Tensor) -> Callable[[], Any]:
    """Return an all-reduce with a codec, which groups of pycomm have."""
    native = group._get_backend(torch.device("cpu"))
    if not hasattr(native, "compressed_all_reduce"):
        raise NotImplementedError
    layout = load_c10d().Layout(owner_residuals=False)
    layout.add(0, whole.numel(), CODEC, 0)
    return lambda: native.compressed_all_reduce(whole, layout, [(0, 0)], 0, 0).wait()


def send_and_receive(group: Any, whole: torch.Tensor) -> None:
    """Send to the next rank, and receive from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(whole)
    works = [
        dist.irecv(received, (rank - 1) % ranks, group=group),
        dist.isend(whole, (rank + 1) % ranks, group=group),
    ]
    for work in works:
        work.wait()


def calls_of(group: Any, size: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return the operations; `size` counts the bytes of the tensor that all parts make."""
    whole = torch.ones(max(ranks, size // 4))
    part = torch.ones(max(1, size // 4 // ranks))
    parts = [torch.empty_like(part) for _ in range(ranks)]
    inputs = [part.clone() for _ in range(ranks)]
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_reduce_int8": lambda: coded(group, whole)(),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "sendrecv": lambda: send_and_receive(group, whole),
        "all_gather": lambda: dist.all_gather(parts, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(part, inputs, group=group),
        "all_to_all": lambda: dist.all_to_all(parts, inputs, group=group),
    }


def main(
    operations: list[str],
    sizes: list[int],
    repeats: int,
    backends: list[str],
    log: str,
    folder: str,
) -> None:
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", timeout=limit)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.new_group(backend=name, timeout=limit) for name in backends}
    for size in sizes:
        by_backend = {name: calls_of(groups[name], size, ranks) for name in backends}
        for operation in operations:
            calls = {}
            for backend in backends:
                call = by_backend[backend][operation]
                try:
                    call()
                except (RuntimeError, NotImplementedError):  # Gloo lacks some
                    continue
                calls[backend] = call
            for backend, seconds in slowest(calls, repeats).items():
                if rank == 0:
                    answer(log, operation=operation, bytes=size, backend=backend, seconds=seconds)
    dist.barrier()
    for name in backends:
        dist.destroy_process_group(groups[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
