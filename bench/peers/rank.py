"""One rank of the peers' table: trains with one system, and writes what it has measured.

With `--steps-only` it takes a few steps, of which it writes the mean time and bytes; else it trains
by the whole schedule, and writes the loss on held-out text now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.netlab import interface_bytes
from pycomm.bench.peers.systems import PEERS, Shared, Training, learning_rate, own_address
from pycomm.bench.training.corpora import standard_library
from pycomm.bench.training.train import (
    WINDOWS,
    Config,
    Transformer,
    batches,
    loss_of,
    windows,
)

SETTLE = 3  # untimed steps
AVERAGE_LIMIT = 100.0  # seconds until an average of peers that do not step together


@torch.no_grad()
def held_out(model: nn.Module, text: torch.Tensor, config: Config) -> float:
    """Return the loss of this rank's model on held-out text."""
    starts = torch.linspace(0, text.numel() - config.context - 1, WINDOWS).long()
    losses = [loss_of(model, windows(text, part, config.context)) for part in starts.split(16)]
    return float(torch.stack(losses).mean())


def take(training: Training, sequences: torch.Tensor) -> float:
    if training.step is not None:
        return training.step(sequences)
    loss = loss_of(training.model, sequences)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return loss.item()


def sent_bytes() -> int:
    """Return the bytes that this rank's interface has sent; 0 where the ranks share one."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return interface_bytes(interface) if interface != "lo" else 0


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
        enough: seconds, after which no more steps begin.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for _ in range(max(SETTLE, every)):
        take(training, next(data))
    store.add("settled", 1)
    while int(store.add("settled", 0)) < ranks:
        time.sleep(0.01)
    before, begin, taken, goes = sent_bytes(), time.perf_counter(), 0, True
    while goes:
        for _ in range(every):
            take(training, next(data))
        taken += every
        # The ranks stop after the same step. Others wait for rank 0, as in their averages.
        if rank == 0:
            done = taken >= 40 if every == 1 else taken >= 2 * every
            goes = not done and time.perf_counter() - begin < enough
            store.set(f"goes{taken}", str(int(goes)))
        else:
            goes = bool(int(store.get(f"goes{taken}")))
    seconds = time.perf_counter() - begin
    return {"seconds": seconds / taken, "bytes": (sent_bytes() - before) / taken}


def time_of_averages(training: Training, data: Iterator[torch.Tensor]) -> dict[str, float]:
    """Return the mean seconds and bytes of the steps from one average to the next.

    Raises:
        RuntimeError: the peers do not average in time.
    """
    average_is_made(training, data)
    before, begin = sent_bytes(), time.perf_counter()
    taken = average_is_made(training, data)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds / taken, "bytes": (sent_bytes() - before) / taken}


def average_is_made(training: Training, data: Iterator[torch.Tensor]) -> int:
    """Take steps until the peers have averaged once more; return their number."""
    assert training.averages is not None
    so_far, until, taken = training.averages(), time.monotonic() + AVERAGE_LIMIT, 0
    while training.averages() == so_far:
        take(training, next(data))
        taken += 1
        if time.monotonic() > until:
            raise RuntimeError(
                f"the peers have averaged {so_far} times, and not again in {AVERAGE_LIMIT:.0f} s"
            )
    return taken


def follow(
    training: Training, data: Iterator[torch.Tensor], rates: Any, store: dist.TCPStore
) -> NoReturn:
    """Take steps until the first rank has ended, which this process does not wait for in a step.

    Ranks that average whenever enough samples are there cannot stop after the same step: one that
    waits for the other between two steps would be missing in its average.
    """

    def leave() -> None:
        store.wait(["ends"])
        store.add("closed", 1)
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    while True:
        take(training, next(data))
        if rates is not None:
            rates.step()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pycomm.bench.peers.rank", description=__doc__)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--width", type=int, default=Config.width)
    parser.add_argument("--steps-only", type=float, default=0.0, help="seconds, at most")
    parser.add_argument("--log", required=True, help="of the first rank")
    options = parser.parse_args()
    peer = next(peer for peer in PEERS if peer.name == options.peer)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    master = os.environ["MASTER_ADDR"]
    torch.set_num_threads(1)
    config = replace(Config(), layers=options.layers, width=options.width, steps=options.steps)
    port = int(os.environ["MASTER_PORT"]) + 1
    store = dist.TCPStore(master, port, ranks, rank == 0, timedelta(minutes=10))
    torch.manual_seed(config.seed)
    net = Transformer(config)
    shared = Shared(net, config, rank, ranks, master, own_address(master), store)
    training = peer.start(shared)
    rates = learning_rate(training, config)
    text, other = standard_library()
    data = batches(text, config, rank, ranks)
    if training.averages is not None and rank:
        follow(training, data, rates, store)
    rows = []
    if not options.steps_only:
        for step in range(1, options.steps + options.steps // 4 + 1):
            take(training, next(data))
            if rates is not None:
                rates.step()
            if step % config.evaluate_every == 0 and rank == 0:
                rows.append({"step": step, "held_out": held_out(net, other, config)})
        if training.averages is not None and not training.averages():
            raise RuntimeError("the peers have not averaged once in this training")
    elif training.averages is not None:
        rows = [time_of_averages(training, data)]
    else:
        rows = [time_of_steps(training, data, store, peer.every, options.steps_only)]
    if rank == 0:
        with open(options.log, "w") as file:
            print(json.dumps(rows), file=file)
    if training.averages is not None:  # the others step on, and wait for an average
        store.set("ends", "")
    else:
        training.close()
    store.add("closed", 1)
    while rank == 0 and int(store.add("closed", 0)) < ranks:  # it has the store: it leaves last
        time.sleep(0.01)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # some systems leave threads and processes that would keep this one
