"""One rank of the peers' table: trains with one system, and writes what it has measured.

With `--steps-only` it takes a few steps, of which it writes the mean time and bytes; else it trains
by the whole schedule, and writes the loss on held-out text now and then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.netlab import interface_bytes
from pycomm.bench.peers.systems import PEERS, Shared, Training, learning_rate, own_address
from pycomm.bench.training.train import (
    WINDOWS,
    Config,
    Transformer,
    batches,
    loss_of,
    standard_library,
    windows,
)

SETTLE = 3  # untimed steps


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
    store = dist.TCPStore(master, port, ranks, rank == 0)
    torch.manual_seed(config.seed)
    net = Transformer(config)
    shared = Shared(net, config, rank, ranks, master, own_address(master), store)
    training = peer.start(shared)
    rates = learning_rate(training, config)
    text, other = standard_library()
    data = batches(text, config, rank, ranks)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    rows = []

    def count() -> int:
        return interface_bytes(interface) if interface != "lo" else 0

    def meet(name: str) -> None:
        store.add(name, 1)
        while int(store.add(name, 0)) < ranks:
            time.sleep(0.01)

    if options.steps_only:
        for _ in range(max(SETTLE, peer.every)):
            take(training, next(data))
        meet("settled")
        before, begin, taken, goes = count(), time.perf_counter(), 0, True
        while goes:
            for _ in range(peer.every):
                take(training, next(data))
            taken += peer.every
            # The ranks stop after the same step. Others wait for rank 0, as in their averages.
            if rank == 0:
                enough = taken >= 40 if peer.every == 1 else taken >= 2 * peer.every
                goes = not enough and time.perf_counter() - begin < options.steps_only
                store.set(f"goes{taken}", str(int(goes)))
            else:
                goes = bool(int(store.get(f"goes{taken}")))
        seconds = time.perf_counter() - begin
        rows.append({"seconds": seconds / taken, "bytes": (count() - before) / taken})
    else:
        for step in range(1, options.steps + options.steps // 4 + 1):
            take(training, next(data))
            if rates is not None:
                rates.step()
            if step % config.evaluate_every == 0 and rank == 0:
                rows.append({"step": step, "held_out": held_out(net, other, config)})
    if rank == 0:
        with open(options.log, "w") as file:
            print(json.dumps(rows), file=file)
    training.close()
    store.add("closed", 1)
    while rank == 0 and int(store.add("closed", 0)) < ranks:  # it has the store: it leaves last
        time.sleep(0.01)
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # some systems leave threads and processes that would keep this one
