"""A rank behind a link of its own, for unequal.py.

    python -m pycomm.bench.wan.unequal_rank FILE RATES BYTES REPEATS CODEC

Rank 0 writes the seconds of each call, those of the slowest rank, into FILE as JSON. Calls begin on
all ranks at one instant (together.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pycomm import _C
from pycomm.backend.python.store import TorchStore
from pycomm.bench.wan.together import timed
from pycomm.communicator import Communicator, Piece, Store


def main(file: Path, rates: list[str], size: int, repeats: int, codec: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # The first rank's store, by which the ranks learn that they are far from each other. Those that
    # share a folder take themselves for near: they measure no rates, and their shares stay equal.
    requests = TorchStore(dist.distributed_c10d._get_default_store())
    requests.add("begun", 1)  # and how far that is
    far, near = Store.of(requests), Store.file(f"{file}-store")
    groups = {
        kind: Communicator(store, rank, ranks, group=kind, transport="tcp", rate=rate)
        for kind, store, rate in (
            ("declared", far, rates[rank]),
            ("measured", far, ""),
            ("equal", near, ""),
        )
    }
    values, whole = np.ones(size // 4, np.float32), torch.ones(size // 4)
    pieces = [Piece(values.size, codec)]
    calls: dict[str, Callable[[], object]] = {}
    for kind, group in groups.items():
        calls[kind] = lambda group=group: group.all_reduce(values)
        if kind != "measured":  # coded shares follow declared rates alone
            calls[f"{kind}, coded"] = lambda group=group: group.all_reduce_coded(values, pieces)
    calls["gloo"] = lambda: dist.all_reduce(whole)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):  # the first one warms up, and is left out
        for name, call in calls.items():
            values[:], whole[:] = 1, 1
            took = timed(call)
            if turn > 0:
                found[name].append(took)
        for _ in range(8 if turn == 0 else 0):  # so many collectives, then they tell what they have
            groups["measured"].barrier()
    if rank == 0:
        coded = _C.Codec(codec).encoded_bytes(values.size)
        text = groups["measured"].describe()
        record = {"describe": text, "seconds": found, "bytes": size, "coded bytes": coded}
        file.write_text(json.dumps(record))
    dist.barrier()
    for group in groups.values():
        group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        sys.argv[2].split(","),
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5],
    )
