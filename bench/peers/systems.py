"""The systems of the peers' table, each set up as its documentation says, with its defaults.

A system is a function from what all trainings share (`Shared`) to the `Training` on this rank. The
lines that a script with DistributedDataParallel changes for it are counted in `Peer.lines`.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.training.methods import ONE_BUCKET, TOP_1, Method
from pycomm.bench.training.train import Config, Transformer, loss_of

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
