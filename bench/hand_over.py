"""What a new member gets over a slow link: `pycomm.elastic.hand_over` beside Gloo's broadcast.

    python -m pycomm.bench.hand_over --nodes 2,3 --rate 200mbit

In each lab of so many nodes (netlab.py), rank 0 has a model of float32 with the state of AdamW, and
the others are new. They get it by `hand_over` on pycomm, coded and not, and by torch's broadcast of
as many bytes in one tensor on Gloo, in turns. Parameters and averages of gradients are normally
distributed. The time is that of the slowest rank, from a barrier on; what has arrived is compared
with `==`. Medians are printed; Mbit/s count the bytes of the state, so a coded one can be faster
than its link.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from pycomm import elastic
from pycomm.bench import netlab
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin

METHODS = ("pycomm, lossless", "pycomm, none", "Gloo, broadcast")


class State:
    """A model and its optimizer, with values only where `has` says so."""

    def __init__(self, megabytes: int, has: bool) -> None:
        width = 512
        layers = max(1, megabytes * 2**20 // (3 * 4 * width * width))
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.has = has
        random = torch.Generator().manual_seed(1)
        for parameter in self.model.parameters() if has else ():
            values = [torch.randn(parameter.shape, generator=random) for _ in range(3)]
            parameter.data = values[0] * 0.02
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1000.0),
                "exp_avg": values[1] * 1e-4,
                "exp_avg_sq": (values[2] * 1e-4) ** 2,
            }

    def flat(self) -> torch.Tensor:
        """Return all values; float32 [3 * parameters]."""
        found = []
        for parameter in self.model.parameters():
            state = self.optimizer.state.get(parameter, {})
            empty = torch.zeros_like(parameter)
            found += [parameter.detach(), *(state.get(k, empty) for k in ("exp_avg", "exp_avg_sq"))]
        return torch.cat([one.reshape(-1) for one in found])


def rank_main(file: Path, megabytes: int, repeats: int) -> None:
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", timeout=limit)
    rank = dist.get_rank()
    ours = dist.new_group(backend="pycomm", timeout=limit)
    wanted = State(megabytes, True).flat()
    took: dict[str, list[float]] = {method: [] for method in METHODS}
    for turn in range(repeats + 1):  # the first one warms up, and is left out
        for method in METHODS:
            state = State(megabytes, rank == 0)
            flat = state.flat()
            dist.barrier()
            start = time.perf_counter()
            call(method, state, flat, ours)()
            seconds = torch.tensor([time.perf_counter() - start])
            arrived = flat if method.startswith("Gloo") else state.flat()
            if not torch.equal(arrived, wanted):
                raise AssertionError(f"rank {rank}: {method}: what has arrived is not the state")
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if turn > 0:
                took[method].append(seconds.item())
    if rank == 0:
        file.write_text(json.dumps({"bytes": wanted.nbytes, "seconds": took}))
    dist.barrier()
    dist.destroy_process_group()


def call(
    method: str, state: State, flat: torch.Tensor, ours: dist.ProcessGroup
) -> Callable[[], object]:
    if method.startswith("Gloo"):
        return lambda: dist.broadcast(flat, 0)
    codec = method.partition(", ")[2]
    return lambda: elastic.hand_over(
        state.model, state.optimizer, has=state.has, group=ours, codec=codec
    )


def measure(nodes: int, options: argparse.Namespace, origin: Origin) -> list[dict[str, object]]:
    """Return a row for each method.

    Raises:
        RuntimeError: a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        file = Path(folder) / "found"
        words = ["rank", str(file), str(options.megabytes), str(options.repeats)]
        command = [sys.executable, "-m", "pycomm.bench.hand_over", *words]
        with netlab.Netlab(nodes, options.rate) as lab:
            ranks = lab.start(command, stdout=printed, stderr=subprocess.STDOUT)
            status = netlab.wait(ranks)
        if status != 0:
            printed.seek(0)
            raise RuntimeError(f"a rank failed:\n{printed.read().decode(errors='replace')}")
        found = json.loads(file.read_text())
    middle = {method: statistics.median(times) for method, times in found["seconds"].items()}
    return [
        {
            "rate": options.rate,
            "nodes": nodes,
            "method": method,
            "bytes": found["bytes"],
            "repeats": options.repeats,
            "ms": f"{1e3 * seconds:.1f}",
            "mbit_per_s": f"{8 * found['bytes'] / seconds / 1e6:.1f}",
            "times_as_fast_as_gloo": f"{middle[METHODS[-1]] / seconds:.2f}",
            **vars(origin),
        }
        for method, seconds in middle.items()
    ]


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["rank"]:
        rank_main(Path(argv[1]), int(argv[2]), int(argv[3]))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.hand_over",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--nodes", default="2,3", help="comma-separated; one of them has the state (2,3)")
    add("--rate", default="200mbit", help="of each node (200mbit)")
    add("--megabytes", type=int, default=24, help="of the state (24)")
    add("--repeats", type=int, default=5, help="of each method, in turns (5)")
    add("--csv", type=Path, help="append all rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.hand_over", *argv]))
    print(f"{'rate':>8} {'nodes':>5}  {'method':<17} {'ms':>8} {'Mbit/s':>7} {'of Gloo':>7}")
    try:
        for nodes in map(int, options.nodes.split(",")):
            rows = measure(nodes, options, origin)
            for row in rows:
                print(
                    f"{row['rate']:>8} {row['nodes']:>5}  {row['method']:<17} {row['ms']:>8} "
                    f"{row['mbit_per_s']:>7} {row['times_as_fast_as_gloo']:>7}",
                    flush=True,
                )
            if options.csv:
                tables.append(options.csv, rows)
    except (RuntimeError, ValueError) as error:
        print(f"hand_over: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
