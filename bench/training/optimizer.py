"""The time of `CodedAdamW` and `CodedSGD` beside torch's fused AdamW and SGD, without a link.

    python -m pycomm.bench training --only optimizer --models demo,25m

There is one rank: nothing travels and nothing is coded, so what is left is arithmetic. An
optimizer's own time is that of its `step()`, as torch's has one. Squares, the momentum and the
division by the denominators are in the communication hook, where a bucket is in the processor's
cache, and are timed apart. All take turns. Times are those of one thread's processor, which other
processes disturb less than those of a clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.bench.common import accelerator
from pycomm.bench.common.report import Column, Report
from pycomm.bench.common.timing import in_turns
from pycomm.bench.step.rank import Clock
from pycomm.bench.training.train import MODELS, Config, Transformer

SETTLE = 17  # steps before the second moments are exchanged every 16 steps at most
STEPS = 60  # that are timed


OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "AdamW": (pycomm.CodedAdamW, torch.optim.AdamW, {}),
    "SGD": (pycomm.CodedSGD, torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
}


def measure(optimizer: str, name: str, config: Config, device: str) -> dict[str, Any]:
    """Time a coded optimizer and torch's on a model's parameters, in turns; for one rank."""
    coded_kind, torch_kind, settings = OPTIMIZERS[optimizer]
    plain, net = Transformer(config).to(device), Transformer(config).to(device)
    wrapped = DistributedDataParallel(net)
    coded = coded_kind(wrapped.parameters(), model=wrapped, codec="sign", **settings)
    fused = torch_kind(plain.parameters(), fused=True, **settings)
    named = dict(net.named_parameters())
    sizes = [p.numel() for p in named.values()]
    gradient = torch.randn(sum(sizes), device=device) * 1e-3
    bucket = torch.empty_like(gradient)
    for p in plain.parameters():
        p.grad = torch.randn_like(p) * 1e-3
    state = coded.compression

    def fill(call: str) -> None:
        """Put the next step's gradients where backward would have them."""
        if call == "hook":
            bucket.copy_(gradient)
            for p, part in zip(named.values(), bucket.split(sizes), strict=True):
                p.grad = part.view_as(p)

    def hook() -> None:
        state.begin_step()
        coded.momenta.reduce(bucket, list(named)).wait()
        state.end_step()

    calls = {"fused": fused.step, "hook": hook, "step": coded.step}
    clock = time.thread_time if device == "cpu" else Clock(torch.device(device))
    samples = in_turns(calls, SETTLE + STEPS, settle=0, clock=clock, before=fill)
    turns = list(zip(*(times[SETTLE:] for times in samples.values()), strict=True))
    middle = {f"{call}_seconds": statistics.median(samples[call][SETTLE:]) for call in calls}
    return {
        "optimizer": optimizer,
        "model": name,
        "parameters": sum(sizes),
        "tensors": len(sizes),
        **middle,
        "step_ratio": statistics.median(step / fused for fused, _, step in turns),
        "ratio": statistics.median((hook + step) / fused for fused, hook, step in turns),
        "rounds": STEPS,
    }


COLUMNS = (
    Column("optimizer", -9),
    Column("model", -6),
    Column("fused_seconds", 9, ".2f", "fused ms", 1e3),
    Column("hook_seconds", 9, ".2f", "hook ms", 1e3),
    Column("step_seconds", 9, ".2f", "step ms", 1e3),
    Column("step_ratio", 13, ".2f", "step of fused"),
    Column("ratio", 13, ".2f", "both of fused"),
)


def run(options: argparse.Namespace) -> int:
    """Measure the models that were asked for."""
    torch.set_num_threads(1)
    hidden = ("parameters", "tensors", "rounds")
    report = Report(COLUMNS, options, device=accelerator.describe(), hidden=hidden)
    report.header()
    with tempfile.NamedTemporaryFile() as store:
        device = accelerator.kind() or "cpu"
        group = accelerator.group("pycomm", device)
        dist.init_process_group(**group, init_method=f"file://{store.name}", rank=0, world_size=1)
        for name in options.models:
            for optimizer in OPTIMIZERS:
                report.add(measure(optimizer, name, MODELS[name], device))
        dist.destroy_process_group()
    return 0
