"""A rank that moves tensors by several backends in turns, for rates.py."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from pycomm.bench.common.timing import in_turns
from pycomm.bench.lab.jobs import answer
from pycomm.bench.ops.operations import OPERATIONS, make_case
from pycomm.bench.ops.torch_backends import coded_run

CODEC = "quant:bits=8"
CODED = "_int8"
"""ending of the operations with this codec, which groups of pycomm have"""


def begin(_: object = None) -> None:
    """Wait for an instant that rank 0 chooses. The nodes of a lab share one clock.

    A barrier would release ranks half a round trip apart. A rank that hears of the instant too late
    begins later, and the others wait for it.
    """
    before = time.monotonic()
    dist.barrier()
    lead = 0.25 + 2 * (time.monotonic() - before)  # one packet may be lost and repeated
    instant = torch.tensor([time.monotonic() + lead], dtype=torch.float64)
    dist.broadcast(instant, 0)
    time.sleep(max(0.0, instant.item() - time.monotonic()))


def slowest(calls: Mapping[str, Callable[[], object]], count: int) -> dict[str, list[float]]:
    """Return the seconds of each call on the slowest rank, `count` of each. Collective."""
    found = {}
    for name, samples in in_turns(calls, count, settle=0, before=begin).items():
        most = torch.tensor(samples, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found[name] = most.tolist()
    return found


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
    for size, operation in itertools.product(sizes, operations):
        op = OPERATIONS[operation.removesuffix(CODED)]
        case = make_case(op, size, dtype="float32", redop="sum", rank=rank, ranks=ranks)
        if case is None:
            raise ValueError(f"{size} bytes are too few for {operation} of {ranks} ranks")
        calls = {}
        for name, group in groups.items():
            x, y = map(torch.from_numpy, case.buffers())
            if not operation.endswith(CODED):
                call = op.torch(dist, group, case, x, y)
            elif name == "pycomm":
                call = coded_run(group, case, x, y, CODEC)
            else:
                continue
            try:
                call()
            except RuntimeError:  # Gloo lacks some
                continue
            calls[name] = call
        for name, seconds in slowest(calls, repeats).items():
            if rank == 0:
                answer(log, operation=operation, bytes=size, backend=name, seconds=seconds)
    dist.barrier()
    for group in groups.values():
        dist.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
