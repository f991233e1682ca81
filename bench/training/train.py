"""Data-parallel training of a small language model, written as a user of DDP would.

A byte-level transformer learns Python from the standard library's own sources. All runs share
weights, data and their order, and differ only in the backend and the codec, so two exact runs have
equal losses. Several runs take turns in one job, ten steps each, so that what else the machine does
meets all of them alike.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pycomm.bench.common import accelerator
from pycomm.bench.lab.base import interface_counts
from pycomm.bench.training.methods import Method

WINDOWS, FINAL_WINDOWS = 256, 2048  # of held-out text: on the way, and at the schedule's end


@dataclass(frozen=True)
class Config:
    """The training's settings, which all runs of a comparison share."""

    layers: int = 2
    width: int = 224
    heads: int = 4
    context: int = 32  # bytes per sequence
    vocabulary: int = 256  # tokens; of bytes, unless only times count
    batch: int = 16  # sequences per rank and step
    steps: int = 200
    extra: int = 0  # steps after the schedule's end, at its last learning rate
    warmup: int = 20
    learning_rate: float = 2e-3
    beta1: float = 0.9  # AdamW's momentum
    evaluate_every: int = 10
    seed: int = 0


_GPT = Config(width=768, heads=12, layers=12, context=1024, batch=4, vocabulary=50257)
MODELS = {
    "tiny": Config(layers=1, width=32, heads=2, context=8, batch=2, vocabulary=300),
    "demo": Config(),
    "demo-2000": Config(steps=2000, evaluate_every=100, warmup=100),
    "25m": Config(layers=8, width=512, heads=8, batch=4, steps=160, learning_rate=6e-4),
    "124m": _GPT,
    "201m": replace(_GPT, width=1024, heads=16),
}


# --------------------------------------------------------------------- model


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and with a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A model that predicts the next token, a byte. The output weights are the embedding's."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.context, config.width)
        blocks = [Block(config.width, config.heads) for _ in range(config.layers)]
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(config.width)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                skips = 2 * config.layers if "join" in name or "down" in name else 1
                nn.init.normal_(weight, std=0.05 / math.sqrt(skips))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens [batch, length] to the logits of each next one [batch, length, vocabulary]."""
        places = torch.arange(x.shape[1], device=x.device)
        hidden = self.norm(self.blocks(self.bytes(x) + self.places(places)))
        return F.linear(hidden, self.bytes.weight)


def shapes(config: Config) -> list[tuple[int, ...]]:
    """Return the shapes of a model's parameters, in its order."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in Transformer(config).parameters()]


def parameters(config: Config) -> int:
    """Return the number of a model's parameters."""
    return sum(map(math.prod, shapes(config)))


# ---------------------------------------------------------------------- data


def windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Cut `length` + 1 bytes at each start: inputs and, shifted by one, targets (int64)."""
    return torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()


def batches(text: torch.Tensor, config: Config, rank: int, ranks: int) -> Iterator[torch.Tensor]:
    """Yield random windows, different on each rank, in an order that only the seed determines."""
    order = torch.Generator().manual_seed(config.seed)
    while True:
        starts = torch.randint(
            text.numel() - config.context, (ranks, config.batch), generator=order
        )
        yield windows(text, starts[rank], config.context)


def loss_of(model: nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy in nats per byte."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor, config: Config, count: int) -> float:
    """Return the loss on `count` windows spread over the text; each rank takes its share, and tells
    it in the default group, of the CPU."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    starts = torch.linspace(0, text.numel() - config.context - 1, count).long()[rank::ranks]
    parts = [loss_of(model, windows(text, part, config.context)) for part in starts.split(16)]
    mean = torch.stack(parts).mean().cpu()
    dist.all_reduce(mean)
    return float(mean) / ranks


# ------------------------------------------------------------------ training


def wire_bytes() -> int:
    """Return the bytes this rank has sent: by its interface's counter, else by pycomm's groups.

    LocalSGD may have made one of its own.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if interface != "lo":
        return interface_counts()[interface][0]
    from pycomm.backend import find

    found = map(find, list(dist.distributed_c10d._world.pg_map))
    return sum(backend.wire_bytes for backend in found if backend)


def schedule(step: int, steps: int, warmup: int, least: float = 0.1) -> float:
    """Return the learning rate's factor: a linear warm-up, then a cosine to one that stays."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return (1 + least) / 2 + (1 - least) / 2 * math.cos(math.pi * done)


def train(
    config: Config,
    method: Method,
    group: dist.ProcessGroup | None = None,
    device: str = "cpu",
) -> Iterator[dict[str, float]]:
    """Train; yield a record of each step, and at the end the result.

    Args:
        config: the settings.
        method: how gradients are averaged.
        group: all ranks, with the method's backend; None: the default group.
        device: of the model: "cpu", or the type of an accelerator.
    """
    torch.manual_seed(config.seed)
    net = Transformer(config).to(device)
    system = method.start(net, config.learning_rate, (config.beta1, 0.95), group)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        system.optimizer, lambda step: schedule(step, config.steps, config.warmup)
    )
    text, held_out = (part.to(device) for part in standard_library())
    data = batches(text, config, dist.get_rank(), dist.get_world_size())

    seconds: list[float] = []
    sent: list[int] = []
    for step in range(1, config.steps + config.extra + 1):
        start, before = time.perf_counter(), wire_bytes()
        loss = loss_of(system.model, next(data))
        system.backward(loss)
        system.apply()
        scheduler.step()
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
        sent.append(wire_bytes() - before)
        row = {"step": step, "seconds": sum(seconds), "sent": sum(sent), "loss": loss.item()}
        if step % config.evaluate_every == 0 or step == 1:
            row["held_out"] = evaluate(net, held_out, config, WINDOWS)
        sent[-1] = wire_bytes() - before  # streams go on while the loss is judged
        if step == config.steps:
            row["mean_wire_bytes"] = sum(sent) / len(sent)  # codecs may change on the way
            system.finish()
            row["final"] = evaluate(net, held_out, config, FINAL_WINDOWS)
        yield row
    settled = len(seconds) // 10  # the first steps allocate, and DDP rebuilds its buckets
    result = {
        "step_seconds": statistics.median(seconds[settled:]),
        "wire_bytes": statistics.median(sent[settled:]),
        "held_out": evaluate(net, held_out, config, FINAL_WINDOWS),
    }
    system.close()
    yield result


def take_turns(
    config: Config, methods: Sequence[Method], device: str = "cpu"
) -> Iterator[dict[str, float]]:
    """Train with several methods, `evaluate_every` steps at a time; records name the `turn`."""
    groups = [dist.new_group(**accelerator.group(m.backend, device)) for m in methods]
    running = [train(config, *one, device) for one in zip(methods, groups, strict=True)]
    order = [*range(len(methods))]
    while order:
        for turn in list(order):
            rows = [*islice(running[turn], config.evaluate_every)]
            yield from ({"turn": turn, **row} for row in rows)
            if len(rows) < config.evaluate_every:
                order.remove(turn)
        order = [*order[1:], *order[:1]]  # another one begins


def ranks_train(
    config: Config, methods: Sequence[Method], device: str = "cpu"
) -> Iterator[dict[str, float]]:
    """Be a rank of `jobs.ask` that trains with several methods in turns."""
    torch.set_num_threads(1)
    if device != "cpu":
        accelerator.take(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo")
    yield from take_turns(config, methods, device)
    dist.destroy_process_group()


def standard_library(limit: int = 8 << 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Python's own sources as bytes (uint8): for training, and every 16th file held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests and tables that repeat each other are excluded: they would leak held-out text.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    skipped |= {"encodings", "pydoc_data"}
    paths = [p for p in sorted(root.rglob("*.py")) if not set(p.relative_to(root).parts) & skipped]
    paths = [p for p in paths if not p.name.startswith("_sysconfigdata")]
    random.Random(0).shuffle(paths)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for i, path in enumerate(paths):
        text = path.read_bytes()
        parts[i % 16 == 0].append(text)
        size += len(text)
        if size > limit:
            break
    train, held_out = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts)
    return train, held_out
