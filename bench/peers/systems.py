"""The systems of the peers' table, each set up as its documentation says, with its defaults.

A system is a method of `bench training`; other packages are functions that make a `System`. The
lines that a script with DistributedDataParallel changes for it are counted in `Peer.lines`.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from pycomm.bench.training.methods import ONE_BUCKET, TOP_1, Method, System
from pycomm.bench.training.train import Config

EVERY = 32  # local steps between averages, for all that average parameters


@dataclass(frozen=True)
class Peer:
    """A row of the table."""

    name: str
    method: Method
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


def deepspeed(net: nn.Module, lr: float) -> System:
    """DeepSpeed's ZeRO 2."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    engine, optimizer, *_ = deepspeed.initialize(
        model=net,
        optimizer=_adamw(net, lr),
        config={
            "train_micro_batch_size_per_gpu": Config.batch,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    return System(engine, optimizer.optimizer, backward=engine.backward, step=engine.step)


def detonation(net: nn.Module, lr: float) -> System:
    """DeMo as DeToNATION has it: SGD by signs of its coded momentum, in place of AdamW."""
    from detonation import DeMoReplicator, DeToSGD

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    optimizer = DeToSGD(
        net.parameters(),
        lr=1e-3,
        sharding_parallel_group=alone,
        replication_parallel_group=dist.group.WORLD,
        replicator=DeMoReplicator(),
    )
    return System(net, optimizer)


def torchft_diloco(net: nn.Module, lr: float) -> System:
    """torchft's DiLoCo: each rank is a replica, the first one has the lighthouse."""
    from datetime import timedelta

    import torchft
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    rank, ranks, master = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        address = str(probe.getsockname()[0])  # from which this process reaches the first rank
    lighthouse = None
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:29310", min_replicas=ranks)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{master}:29310"
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    inner = _adamw(net, lr)
    outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = torchft.Manager(
        pg=group,
        load_state_dict=lambda _: None,
        state_dict=lambda: {},
        min_replica_size=ranks,
        use_async_quorum=False,
        # All begin with the same weights; else one fetches them from the other's host by its name,
        # which all namespaces of a machine share.
        init_sync=False,
        timeout=timedelta(seconds=60),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        replica_id=f"peer_{rank}",
        hostname=address,
    )
    diloco = DiLoCo(manager, [net], inner, outer, sync_every=EVERY, pin_memory=False)
    diloco.__enter__()

    def close() -> None:
        diloco.__exit__(None, None, None)
        manager.shutdown()
        group.shutdown()
        dist.barrier()  # the first rank has the servers of all
        kept.clear()

    kept = [lighthouse, store]  # servers, which live as long as their objects
    return System(net, inner, close=close)


def _adamw(net: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr, (0.9, 0.95))


PEERS = (
    Peer("DDP on Gloo, fp32", Method("", "gloo"), 0),
    Peer("torch's fp16 hook", Method("", "gloo", hook="fp16"), 1),
    Peer(
        "torch's PowerSGD",
        # In one bucket: with more its chained collectives start in different orders on Gloo.
        Method("", "gloo", hook="powersgd:1:10", bucket_mb=ONE_BUCKET),
        2,
    ),
    Peer(
        "DeepSpeed ZeRO 2",
        Method("", "gloo", system=deepspeed),
        6,
        ("deepspeed",),
        environment={"DS_ACCELERATOR": "cpu"},
    ),
    Peer("detonation DeMo", Method("", "gloo", system=detonation), 5, ("detonation",)),
    Peer(
        "torchft DiLoCo", Method("", "gloo", system=torchft_diloco), 14, ("torchft",), every=EVERY
    ),
    Peer("pycomm, exact", Method(""), 1),
    Peer("pycomm, int4", Method("", codec="int4"), 2),
    Peer("pycomm, coded momentum, top-k 1 %", Method("", momentum=TOP_1), 2),
    Peer(
        "pycomm, LocalSGD int4",
        Method("", local={"every": EVERY, "codec": "int4"}),
        3,
        every=EVERY,
    ),
)
