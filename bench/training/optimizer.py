"""The time of `CodedAdamW` and `CodedSGD` beside torch's fused AdamW and SGD, without a link.

    python -m pycomm.bench training --only optimizer --models demo,25m

CodedAdamW has one rank: nothing travels and nothing is coded, so what is left is arithmetic. The
optimizer's own time is that of its `step()`, as torch's has one. Squares, the momentum and the
division by the denominators are in the communication hook, where a bucket is in the processor's
cache, and are timed apart. CodedSGD has two ranks, since one codes nothing: its step exchanges the
momenta, and what this takes, coding included, stands in place of the hook's time. All take turns.
Times are those of one thread's processor, which other processes disturb less than those of a clock.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.bench.common import accelerator
from pycomm.bench.common.report import Column, Report
from pycomm.bench.common.timing import in_turns
from pycomm.bench.lab import jobs
from pycomm.bench.lab.base import Paced
from pycomm.bench.lab.rates import UNLIMITED
from pycomm.bench.training.train import MODELS, Config, Transformer

SETTLE = 17  # steps before the second moments are exchanged every 16 steps at most
STEPS = 60  # that are timed


def measure(name: str, config: Config, device: str) -> dict[str, Any]:
    """Time both optimizers on a model's parameters, in turns; collective of one rank."""
    plain, net = Transformer(config).to(device), Transformer(config).to(device)
    wrapped = DistributedDataParallel(net)
    coded = pycomm.CodedAdamW(wrapped.parameters(), model=wrapped, codec="sign")
    fused = torch.optim.AdamW(plain.parameters(), fused=True)
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
    clock = time.thread_time if device == "cpu" else _device_time
    samples = in_turns(calls, SETTLE + STEPS, settle=0, clock=clock, before=fill)
    turns = list(zip(*(times[SETTLE:] for times in samples.values()), strict=True))
    middle = {f"{call}_seconds": statistics.median(samples[call][SETTLE:]) for call in calls}
    return {
        "optimizer": "AdamW",
        "model": name,
        "parameters": sum(sizes),
        "tensors": len(sizes),
        **middle,
        "step_ratio": statistics.median(step / fused for fused, _, step in turns),
        "ratio": statistics.median((hook + step) / fused for fused, hook, step in turns),
        "rounds": STEPS,
    }


def ranks_measure_sgd(names: list[str]) -> Iterator[dict[str, Any]]:
    """Be a rank of `jobs.ask` that times `CodedSGD` and torch's SGD in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("pycomm")
    for name in names:
        plain, net = Transformer(MODELS[name]), Transformer(MODELS[name])
        wrapped = DistributedDataParallel(net)
        options = {"lr": 1e-3, "momentum": 0.9}
        coded = pycomm.CodedSGD(wrapped.parameters(), model=wrapped, codec="sign", **options)
        fused = torch.optim.SGD(plain.parameters(), fused=True, **options)
        for p in [*plain.parameters(), *net.parameters()]:
            p.grad = torch.randn_like(p) * 1e-3
        within: list[float] = []
        coded._exchange = _timed(coded._exchange, within)
        calls = {"fused": fused.step, "step": coded.step}
        samples = in_turns(calls, SETTLE + STEPS, settle=0, clock=time.thread_time)
        turns = list(zip(samples["fused"], within, samples["step"], strict=True))[SETTLE:]
        yield {
            "optimizer": "SGD",
            "model": name,
            "parameters": sum(p.numel() for p in net.parameters()),
            "tensors": sum(1 for _ in net.parameters()),
            "fused_seconds": statistics.median(fused for fused, _, _ in turns),
            "hook_seconds": statistics.median(within for _, within, _ in turns),
            "step_seconds": statistics.median(step - within for _, within, step in turns),
            "step_ratio": statistics.median(
                (step - within) / fused for fused, within, step in turns
            ),
            "ratio": statistics.median(step / fused for fused, _, step in turns),
            "rounds": STEPS,
        }
    dist.destroy_process_group()


def _timed(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a call that adds what it takes of its thread's processor to a list."""

    def timed(*values: Any) -> Any:
        begin = time.thread_time()
        result = call(*values)
        seconds.append(time.thread_time() - begin)
        return result

    return timed


def _device_time() -> float:
    """Return the time at which the GPU has done its work."""
    torch.accelerator.synchronize()
    return time.perf_counter()


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
    """Measure the models that were asked for; `CodedSGD` on the CPU alone."""
    torch.set_num_threads(1)
    report = Report(COLUMNS, options, device=accelerator.describe())
    report.header()
    with tempfile.NamedTemporaryFile() as store:
        device = accelerator.kind() or "cpu"
        group = accelerator.group("pycomm", device)
        dist.init_process_group(**group, init_method=f"file://{store.name}", rank=0, world_size=1)
        for name in options.models:
            report.add(measure(name, MODELS[name], device))
        dist.destroy_process_group()
    if device == "cpu":
        with Paced(2, UNLIMITED) as lab:
            lab.timed = False  # the processor's time does not depend on the link
            jobs.ask(lab, ranks_measure_sgd, options.models, heard=report.add)
    return 0
