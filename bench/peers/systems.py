"""The systems of the peers' table, each set up as its documentation says, with its defaults.

A system is a function from what all trainings share (`Shared`) to the `Training` on this rank. The
lines that a script with DistributedDataParallel changes for it are counted in `Peer.lines`. `train`
is one rank, which trains with one system.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.training.methods import ONE_BUCKET, TOP_1, Method
from pycomm.bench.training.train import (
    WINDOWS,
    Config,
    Transformer,
    batches,
    loss_of,
    loss_on,
    schedule,
    standard_library,
    wire_bytes,
)

EVERY = 32  # local steps between averages, for all that average parameters


@dataclass
class Shared:
    """What a system gets: the model with its first weights, and this rank's place."""

    net: Transformer
    config: Config
    rank: int
    ranks: int
    master: str
    address: str


@dataclass
class Training:
    """One system's training on this rank."""

    model: nn.Module
    """What computes the loss."""
    optimizer: Any
    step: Callable[[torch.Tensor], object] | None = None
    """Takes a step on sequences; None: backward and the optimizer."""
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Peer:
    """A row of the table."""

    name: str
    start: Callable[[Shared], Training]
    lines: int
    """Lines changed or added in a script with DistributedDataParallel."""
    packages: tuple[str, ...] = ()
    every: int = 1
    """Steps after which communication repeats: times are means over so many."""
    environment: dict[str, str] = field(default_factory=dict)

    def version(self) -> str:
        """Return the packages with their versions.

        Raises:
            PackageNotFoundError: one is not installed.
        """
        return " ".join(f"{name} {importlib.metadata.version(name)}" for name in self.packages)


def ddp(method: Method) -> Callable[[Shared], Training]:
    """Return the system of a method of `pycomm.bench training`."""

    def start(shared: Shared) -> Training:
        dist.init_process_group(method.backend)
        model = method.wrap(shared.net)
        config = shared.config
        optimizer, _ = method.optimizer(model, config.learning_rate, (0.9, 0.95))
        return Training(model, optimizer, close=dist.destroy_process_group)

    return start


def deepspeed(shared: Shared) -> Training:
    """DeepSpeed's ZeRO 2."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    engine, optimizer, *_ = deepspeed.initialize(
        model=shared.net,
        optimizer=_adamw(shared),
        config={
            "train_micro_batch_size_per_gpu": shared.config.batch,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(sequences: torch.Tensor) -> None:
        engine.backward(loss_of(engine, sequences))
        engine.step()

    return Training(engine, optimizer.optimizer, step, close=dist.destroy_process_group)


def detonation(shared: Shared) -> Training:
    """DeMo as DeToNATION has it: SGD by signs of its coded momentum, in place of AdamW."""
    from detonation import DeMoReplicator, DeToSGD

    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(shared.ranks)][shared.rank]
    optimizer = DeToSGD(
        shared.net.parameters(),
        lr=1e-3,
        sharding_parallel_group=alone,
        replication_parallel_group=dist.group.WORLD,
        replicator=DeMoReplicator(),
    )
    return Training(shared.net, optimizer, close=dist.destroy_process_group)


def torchft_diloco(shared: Shared) -> Training:
    """torchft's DiLoCo: each rank is a replica, the first one has the lighthouse."""
    from datetime import timedelta

    import torchft
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    lighthouse = None
    if shared.rank == 0:
        lighthouse = LighthouseServer(bind="[::]:29310", min_replicas=shared.ranks)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{shared.master}:29310"
    store = dist.TCPStore(shared.address, 0, is_master=True, wait_for_workers=False)
    inner = _adamw(shared)
    outer = torch.optim.SGD(shared.net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = torchft.Manager(
        pg=group,
        load_state_dict=lambda _: None,
        state_dict=lambda: {},
        min_replica_size=shared.ranks,
        use_async_quorum=False,
        # All begin with the same weights; else one fetches them from the other's host by its name,
        # which all namespaces of a machine share.
        init_sync=False,
        timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr=shared.address,
        store_port=store.port,
        replica_id=f"peer_{shared.rank}",
        hostname=shared.address,
    )
    diloco = DiLoCo(manager, [shared.net], inner, outer, sync_every=EVERY, pin_memory=False)
    diloco.__enter__()

    def close() -> None:
        diloco.__exit__(None, None, None)
        manager.shutdown()
        group.shutdown()
        kept.clear()

    kept = [lighthouse, store]  # servers, which live as long as their objects
    return Training(shared.net, inner, close=close)


def _adamw(shared: Shared) -> torch.optim.AdamW:
    lr = shared.config.learning_rate
    return torch.optim.AdamW(shared.net.parameters(), lr, (0.9, 0.95))


PEERS = (
    Peer("DDP on Gloo, fp32", ddp(Method("", "gloo")), 0),
    Peer("torch's fp16 hook", ddp(Method("", "gloo", hook="fp16")), 1),
    Peer(
        "torch's PowerSGD",
        # In one bucket: with more its chained collectives start in different orders on Gloo.
        ddp(Method("", "gloo", hook="powersgd:1:10", bucket_mb=ONE_BUCKET)),
        2,
    ),
    Peer(
        "DeepSpeed ZeRO 2",
        deepspeed,
        6,
        ("deepspeed",),
        environment={"DS_ACCELERATOR": "cpu"},
    ),
    Peer("detonation DeMo", detonation, 5, ("detonation",)),
    Peer("torchft DiLoCo", torchft_diloco, 14, ("torchft",), every=EVERY),
    Peer("pycomm, exact", ddp(Method("")), 1),
    Peer("pycomm, int4", ddp(Method("", codec="int4")), 2),
    Peer("pycomm, coded momentum, top-k 1 %", ddp(Method("", momentum=TOP_1)), 2),
    Peer(
        "pycomm, LocalSGD int4",
        ddp(Method("", local={"every": EVERY, "codec": "int4"})),
        3,
        every=EVERY,
    ),
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
