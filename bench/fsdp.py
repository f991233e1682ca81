"""Bytes that FSDP2 moves: the demo's model on two ranks over TCP, with Gloo and with pycomm.

    python -m pycomm.bench.fsdp --csv bench/results/fsdp-cpu.csv

Each rank is a node of netlab.py, whose interface counts every byte that leaves it, including
headers and acknowledgements. The model stays gathered between forward and backward, so that forward
moves only parameters and backward only gradients; a barrier separates the two. Losses must be
equal.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from pycomm.bench import netlab
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin, Row, record
from pycomm.bench.common.timing import quantile
from pycomm.bench.training.corpora import standard_library
from pycomm.bench.training.train import (
    Config,
    Transformer,
    batches,
    loss_of,
    wire_bytes,
)

PHASES = ("forward", "backward", "optimizer")
BACKENDS = ("gloo", "pycomm")


def train(config: Config) -> dict[str, Any]:
    """Train on one rank; return its bytes and seconds by phase and step, and its losses."""
    torch.manual_seed(config.seed)
    model = Transformer(config)
    numel = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, betas=(0.9, 0.95))
    text, _ = standard_library()
    data = batches(text, config, dist.get_rank(), dist.get_world_size())
    sent: dict[str, list[int]] = {phase: [] for phase in PHASES}
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    losses = []

    def part(phase: str, begin: tuple[float, int]) -> tuple[float, int]:
        """End a phase at a barrier, so that no byte of it is still in flight."""
        seconds[phase].append(time.perf_counter() - begin[0])
        dist.barrier()
        sent[phase].append(wire_bytes() - begin[1])
        return time.perf_counter(), wire_bytes()

    for _ in range(config.steps):
        dist.barrier()
        begin = (time.perf_counter(), wire_bytes())
        loss = loss_of(model, next(data))
        begin = part("forward", begin)
        loss.backward()
        begin = part("backward", begin)
        optimizer.step()
        optimizer.zero_grad()
        part("optimizer", begin)
        losses.append(loss.item())
    return {"numel": numel, "sent": sent, "seconds": seconds, "losses": losses}


def run_rank(backend: str, config: Config, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    result = train(config)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    # The sharded model is part of reference cycles that hold the group, see training/train.py.
    gc.collect()
    dist.destroy_process_group()


def measure(lab: netlab.Lab, backend: str, steps: int) -> list[dict[str, Any]]:
    """Run all ranks on the lab's nodes and return each rank's measurements.

    Raises:
        RuntimeError: a rank failed; the text is its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pycomm.bench.fsdp", "--rank-of", backend]
        command += ["--folder", folder, "--steps", str(steps)]
        environment = {**os.environ, "PYCOMM_TAKEOVER": "", "PYCOMM_RUN": ""}
        with Path(folder, "output").open("wb") as output:
            ranks = lab.start(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            status = netlab.wait(ranks)
            lab.stop()
        if status:
            raise RuntimeError(Path(folder, "output").read_text(errors="replace"))
        return [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(lab.nodes)]


def rows(results: dict[str, list[dict[str, Any]]], connection: str) -> list[Row]:
    """Return a row per backend and phase, with the factor by which pycomm moves fewer bytes."""
    found = []
    first = results[BACKENDS[0]]
    for phase in PHASES:
        gloo_bytes = 0.0
        for backend, ranks in results.items():
            # The median excludes the first steps, which allocate, and retransmitted packets.
            sent = statistics.mean(statistics.median(rank["sent"][phase]) for rank in ranks)
            slowest = [
                max(step) * 1e6 for step in zip(*(r["seconds"][phase] for r in ranks), strict=True)
            ]
            pairs = zip(ranks, first, strict=True)
            differing = sum(
                a != b for x, y in pairs for a, b in zip(x["losses"], y["losses"], strict=True)
            )
            gloo_bytes = gloo_bytes or sent
            found.append(
                Row(
                    kind="train",
                    op=f"fsdp2 {phase}",
                    backend=backend,
                    ranks=len(ranks),
                    size=4 * ranks[0]["numel"],
                    count=ranks[0]["numel"],
                    type="float32",
                    vs="" if backend == BACKENDS[0] else BACKENDS[0],
                    iterations=len(slowest),
                    time_p50=quantile(slowest, 0.5),
                    time_p99=quantile(slowest, 0.99),
                    wrong=differing,
                    ratio=gloo_bytes / sent,
                    wire_bytes=sent,
                    connection=connection,
                )
            )
    return found


def show(found: list[Row]) -> None:
    print(
        f"{'phase':<16} {'backend':<8} {'bytes/step':>12} {'less by':>8} {'ms':>8} {'#losses':>8}"
    )
    for row in found:
        print(
            f"{row.op:<16} {row.backend:<8} {row.wire_bytes:>12.0f} {row.ratio:>8.2f} "
            f"{(row.time_p50 or 0) / 1e3:>8.1f} {row.wrong:>8}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pycomm.bench.fsdp", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--rank-of", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        run_rank(args.rank_of, Config(steps=args.steps), args.folder)
        return 0
    try:
        lab = netlab.Netlab(2, args.rate)
    except netlab.Unavailable as error:
        print(f"fsdp: namespaces cannot be made here: {error}", file=sys.stderr)
        return 2
    with lab:
        connection = lab.describe()
        print(f"# {connection}")
        results = {backend: measure(lab, backend, args.steps) for backend in BACKENDS}
    found = rows(results, connection)
    show(found)
    if args.csv:
        origin = Origin.here(" ".join(["python -m pycomm.bench.fsdp", *sys.argv[1:]]))
        tables.append(args.csv, [record(row, origin) for row in found])
    return 1 if any(row.wrong for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
