"""The time of optimizers whose momentum travels coded, beside torch's fused AdamW, without a link.

    python -m pycomm.bench.optimizers --csv bench/results/optimizers-cpu.csv

One rank: nothing travels and nothing is coded, so what is left is arithmetic. The optimizer's own
time is that of its `step()`, as torch's has one. Squares, the momentum and the division by the
denominators are in the communication hook, where a bucket is in the processor's cache, and are
timed apart. The two optimizers take turns. Times are those of this thread's processor, which other
processes disturb less than those of a clock.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.bench.common import tables
from pycomm.bench.common.harness import Origin
from pycomm.bench.training.time_to_loss import MODELS
from pycomm.bench.training.train import Transformer

SETTLE = 17  # steps before the second moments are exchanged every 16 steps at most


def measure(model: str, codec: str, rounds: int) -> dict[str, Any]:
    """Time both optimizers on a model's parameters, in turns; collective of one rank."""
    plain, net = Transformer(MODELS[model]), Transformer(MODELS[model])
    wrapped = DistributedDataParallel(net)
    coded = pycomm.CodedAdamW(wrapped.parameters(), model=wrapped, codec=codec)
    fused = torch.optim.AdamW(plain.parameters(), fused=True)
    named = list(net.named_parameters())
    names, parameters = [name for name, _ in named], [p for _, p in named]
    sizes = [p.numel() for p in parameters]
    gradient = torch.randn(sum(sizes)) * 1e-3
    bucket = torch.empty_like(gradient)
    for p in plain.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    state = coded.compression
    seconds: dict[str, list[float]] = {"fused": [], "hook": [], "step": []}
    for _ in range(SETTLE + rounds):
        begin = time.thread_time()
        fused.step()
        seconds["fused"].append(time.thread_time() - begin)
        bucket.copy_(gradient)
        for p, part in zip(parameters, bucket.split(sizes), strict=True):
            p.grad = part.view_as(p)
        begin = time.thread_time()
        state.begin_step()
        state.reduce(bucket, names).wait()
        state.end_step()
        seconds["hook"].append(time.thread_time() - begin)
        begin = time.thread_time()
        coded.step()
        seconds["step"].append(time.thread_time() - begin)
    turns = list(zip(*(times[SETTLE:] for times in seconds.values()), strict=True))
    return {
        "model": model,
        "parameters": sum(sizes),
        "tensors": len(sizes),
        "fused_seconds": statistics.median(fused for fused, _, _ in turns),
        "hook_seconds": statistics.median(hook for _, hook, _ in turns),
        "step_seconds": statistics.median(step for _, _, step in turns),
        "step_ratio": statistics.median(step / fused for fused, _, step in turns),
        "ratio": statistics.median((hook + step) / fused for fused, hook, step in turns),
        "rounds": rounds,
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pycomm.bench.optimizers", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--models", default="demo,25m", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each optimizer")
    parser.add_argument("--csv", type=Path, help="append all rows to this file")
    options = parser.parse_args(argv)
    origin = Origin.here(shlex.join(["python", "-m", "pycomm.bench.optimizers", *argv]))
    torch.set_num_threads(1)
    records = []
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        for model in options.models.split(","):
            row = measure(model, "sign", options.rounds)
            fused, hook, step = (row[f"{n}_seconds"] * 1e3 for n in ("fused", "hook", "step"))
            print(
                f"{model}: fused AdamW {fused:.2f} ms; CodedAdamW's step {step:.2f} ms, "
                f"{row['step_ratio']:.2f} of that; with its hook {hook + step:.2f} ms, "
                f"{row['ratio']:.2f}"
            )
            records.append(row | vars(origin))
        dist.destroy_process_group()
    if options.csv:
        tables.append(options.csv, records)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
