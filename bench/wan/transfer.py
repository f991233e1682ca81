"""A rank that moves large and small tensors by two backends in turns, for throughput.py.

    python -m pycomm.bench.wan.transfer FILE OPERATIONS SIZES REPEATS BACKENDS

Rank 0 writes the seconds of each call, those of the slowest rank, into FILE as JSON: a list for
each of "operation/bytes/backend". Calls begin on all ranks at one instant (together.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pycomm._build import load_c10d
from pycomm.bench.wan.together import timed

CODEC = "quant:bits=8"


def coded(group: Any, whole: torch.Tensor) -> Callable[[], Any]:
    """Return an all-reduce with a codec, which groups of pycomm have."""
    native = group._get_backend(torch.device("cpu"))
    if not hasattr(native, "compressed_all_reduce"):
        raise NotImplementedError
    layout = load_c10d().Layout(owner_residuals=False)
    layout.add(0, whole.numel(), CODEC, 0)
    return lambda: native.compressed_all_reduce(whole, layout, [(0, 0)], 0, 0).wait()


def calls(group: Any, size: int, ranks: int) -> dict[str, Callable[[], Any]]:
    """Return the operations; `size` counts the bytes of the tensor that all parts make."""
    whole = torch.ones(max(ranks, size // 4))
    part = torch.ones(max(1, size // 4 // ranks))
    parts = [torch.empty_like(part) for _ in range(ranks)]
    inputs = [part.clone() for _ in range(ranks)]
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_reduce_int8": lambda: coded(group, whole)(),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather(parts, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(part, inputs, group=group),
        "all_to_all": lambda: dist.all_to_all(parts, inputs, group=group),
    }


def main(
    file: Path, operations: list[str], sizes: list[int], repeats: int, backends: list[str]
) -> None:
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", timeout=limit)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = {name: dist.new_group(backend=name, timeout=limit) for name in backends}
    found: dict[str, list[float]] = {}
    for size in sizes:
        ops = {name: calls(groups[name], size, ranks) for name in backends}
        for operation in operations:
            for turn in range(repeats + 1):  # the first one warms up, and is left out
                for backend in backends:
                    try:
                        took = timed(ops[backend][operation])
                    except (RuntimeError, NotImplementedError):  # Gloo lacks some
                        continue
                    if turn > 0:
                        found.setdefault(f"{operation}/{size}/{backend}", []).append(took)
    if rank == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    for name in backends:
        dist.destroy_process_group(groups[name])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2].split(","),
        [int(size) for size in sys.argv[3].split(",")],
        int(sys.argv[4]),
        sys.argv[5].split(","),
    )
