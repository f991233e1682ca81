"""All-reduces over links that differ, against the lower bound, beside equal shares and Gloo.

    python -m pycomm.bench links unequal --rates 20mbit,100mbit,100mbit,100mbit

One rank of a lab has each of these links, "sent/received" where the ways differ. In turns run
pycomm with the rates declared (PYCOMM_RATE), so that owners' shares follow them, with shares by the
rates that the ranks have measured, with equal shares, and Gloo; declared and equal ones also coded.
Medians are printed beside the bound that docs/networks.md derives, with the bytes of the payload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from pycomm.bench.lab.jobs import answer, ask
from pycomm.bench.lab.shape import Shape, bits, seconds
from pycomm.bench.lab.wan import WanLab

COLUMNS = (("call", -16, ""), ("ms", 9, ""), ("bound_ms", 9, ""), ("ratio", 6, ""))


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rates", default="20mbit,100mbit,100mbit,100mbit", help="of each node, comma-separated")
    add("--round-trip", default="20ms", help="between all nodes (20ms)")
    add("--bytes", type=int, default=1 << 24, help="of a rank's buffer of float32 (16777216)")
    add("--codec", default="quant:bits=8", help="of the coded calls (quant:bits=8)")
    add("--repeats", type=int, default=5, help="calls of each kind, in turns (5)")


def bound(rates: Sequence[str]) -> float:
    """Return the least seconds of an all-reduce, for each byte of a rank's buffer."""
    n, each = len(rates), []
    for rate in rates:
        sent, _, received = rate.partition("/")
        each.append((bits(sent) / 8, bits(received or sent) / 8))
    least = [1 / way for link in each for way in link]
    total = [2 * (n - 1) / sum(link[i] for link in each) for i in range(2)]
    return max(*least, *total)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each call.

    Raises:
        Failed: a rank failed.
    """
    rates = options.rates.split(",")
    least = bound(rates)
    shape = Shape(delay=seconds("round trip", options.round_trip) / 2)
    job = {"size": options.bytes, "repeats": options.repeats, "codec": options.codec}
    with WanLab(len(rates), "unlimited", shape=shape, node_rates=dict(enumerate(rates))) as lab:
        found = ask(lab, "pycomm.bench.links.unequal", rates=rates, **job)
    for one in found:
        middle, best = statistics.median(one["seconds"]), least * one["bytes"]
        row = {"rates": options.rates, "round_trip": options.round_trip, "call": one["call"]}
        row |= {"bytes": one["bytes"], "ms": f"{1e3 * middle:.1f}", "bound_ms": f"{1e3 * best:.1f}"}
        yield row | {"ratio": f"{middle / best:.3f}"}


def rank_main(rates: list[str], size: int, repeats: int, codec: str, log: str, folder: str) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    from pycomm import _C
    from pycomm.bench.links.turns import slowest
    from pycomm.communicator import Communicator, Piece, Store
    from pycomm.stores import TorchStore

    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # The first rank's store, by which the ranks learn that they are far from each other. Those that
    # share a folder take themselves for near: they measure no rates, and their shares stay equal.
    requests = TorchStore(dist.distributed_c10d._get_default_store())
    far, near = Store.of(requests), Store.file(f"{folder}/store")
    groups = {
        kind: Communicator(store, rank, ranks, group=kind, transport="tcp", rate=rate)
        for kind, store, rate in (
            ("declared", far, rates[rank]),
            ("measured", far, ""),
            ("equal", near, ""),
        )
    }
    values, whole = np.zeros(size // 4, np.float32), torch.zeros(size // 4)  # sums of zeros stay
    pieces = [Piece(values.size, codec)]
    calls: dict[str, Callable[[], object]] = {}
    for kind, group in groups.items():
        calls[kind] = lambda group=group: group.all_reduce(values)
        if kind != "measured":  # coded shares follow declared rates alone
            calls[f"{kind}, coded"] = lambda group=group: group.all_reduce_coded(values, pieces)
    calls["gloo"] = lambda: dist.all_reduce(whole)
    slowest(calls, 1)  # warms up
    for _ in range(8):  # so many collectives, then they tell what they have measured
        groups["measured"].barrier()
    coded = _C.Codec(codec).encoded_bytes(values.size)
    for call, times in slowest(calls, repeats).items():
        if rank == 0:
            answer(log, call=call, bytes=coded if "coded" in call else size, seconds=times)
    dist.barrier()
    for group in groups.values():
        group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(**json.loads(sys.argv[1]))
