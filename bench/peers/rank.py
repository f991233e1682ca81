"""One rank of the peers' table, which trains with one system."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from pycomm.bench.peers.systems import PEERS, Shared, Training
from pycomm.bench.training.corpora import standard_library
from pycomm.bench.training.train import (
    WINDOWS,
    Config,
    Transformer,
    batches,
    loss_of,
    loss_on,
    schedule,
    wire_bytes,
)

SETTLE = 3  # untimed steps
MOST = 40  # timed steps, or two rounds of those that communicate now and then


def take(training: Training, sequences: torch.Tensor) -> None:
    if training.step is not None:
        training.step(sequences)
        return
    loss_of(training.model, sequences).backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def meet(store: dist.TCPStore, name: str, ranks: int) -> None:
    """Wait until so many ranks have come here."""
    store.add(name, 1)
    while int(store.add(name, 0)) < ranks:
        time.sleep(0.01)


def time_of_steps(
    training: Training,
    data: Iterator[torch.Tensor],
    store: dist.TCPStore,
    every: int,
    enough: float,
) -> dict[str, float]:
    """Return the mean seconds and bytes of steps that all ranks take together. Collective.

    Args:
        training, data, store: this rank's.
        every: steps after which communication repeats.
        enough: seconds that steps may take, but at least `every` steps are timed.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    settle = max(SETTLE, every)
    for _ in range(settle - 1):
        take(training, next(data))
    begin = time.perf_counter()
    take(training, next(data))
    if rank == 0:  # all ranks take as many steps
        likely = enough / (time.perf_counter() - begin) / every
        most = MOST if every == 1 else 2
        store.set("count", str(max(1, min(most, int(likely))) * every))
    count = int(store.get("count"))
    meet(store, "settled", ranks)
    before, begin = wire_bytes(), time.perf_counter()
    for _ in range(count):
        take(training, next(data))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds / count, "bytes": (wire_bytes() - before) / count}


def train(peer: str, config: Config, seconds: float) -> Iterator[dict[str, float]]:
    """Yield the loss on held-out text now and then; with `seconds` instead the mean time and bytes
    of the steps that it takes in so long."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1
    torch.set_num_threads(1)
    store = dist.TCPStore(master, port, ranks, rank == 0, timedelta(minutes=10))
    torch.manual_seed(config.seed)
    net = Transformer(config)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        address = str(probe.getsockname()[0])  # from which this process reaches the first rank
    system = next(one for one in PEERS if one.name == peer)
    training = system.start(Shared(net, config, rank, ranks, master, address))
    text, other = standard_library()
    data = batches(text, config, rank, ranks)
    if seconds:
        yield time_of_steps(training, data, store, system.every, seconds)
    else:
        rates = torch.optim.lr_scheduler.LambdaLR(
            training.optimizer, lambda step: schedule(step, config)
        )
        for step in range(1, config.steps + config.steps // 4 + 1):
            take(training, next(data))
            rates.step()
            if step % config.evaluate_every == 0:
                yield {"step": step, "held_out": float(loss_on(other, net, config, WINDOWS))}
    training.close()
    if rank == 0:  # it has the store: it leaves last
        meet(store, "closed", ranks)
    else:
        store.add("closed", 1)
    sys.stdout.flush()
    os._exit(0)  # some systems leave threads and processes that would keep this one
