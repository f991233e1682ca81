"""torchft: replicas that may die and come back, whose gradients travel compressed.

    python examples/trainers/train_torchft.py --replicas 3

starts torchft's lighthouse and three replicas on this machine. Kill one (its process id is in its
first line) and the others go on without it; start it again, by the command that was printed, and it
takes over their parameters at the next step. On several machines, start `torchft_lighthouse` on one
of them and a replica on each, with TORCHFT_LIGHTHOUSE set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn
from torchft.coordination import LighthouseServer

import pycomm
from pycomm.torchft import DistributedDataParallel, ProcessGroupPycomm


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a step's inputs of one participant: the same whoever it is, and however often."""
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(1000 * step + rank + 1)
    labels = torch.randint(10, (32,), generator=random)
    return centres[labels] + torch.randn(32, 64, generator=random), labels


def digest(model: nn.Module) -> str:
    text = hashlib.sha256()
    for value in model.parameters():
        text.update(value.detach().numpy().tobytes())
    return text.hexdigest()[:16]


def replica(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def save() -> dict[str, Any]:
        return {"net": net.state_dict(), "adam": adam.state_dict()}

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupPycomm(timedelta(seconds=10), pycomm.Options(transport=arguments.transport))
    manager = torchft.Manager(
        pg=group,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=arguments.least,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=f"replica_{arguments.replica}",
        hostname="localhost",
    )
    model = DistributedDataParallel(manager, net, codec=arguments.codec)
    optimizer = torchft.Optimizer(manager, adam)
    print(json.dumps({"replica": arguments.replica, "process": os.getpid()}), flush=True)
    while manager.current_step() < arguments.steps:
        optimizer.zero_grad()  # the quorum is found meanwhile
        step, rank = manager.current_step(), manager.participating_rank()
        inputs, labels = batch(step, rank or 0)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()  # if all participants vote for it
        after = manager.current_step()
        line = {"step": after, "committed": after > step, "loss": loss.item()}
        line |= {"participants": manager.num_participants(), "digest": digest(net)}
        print(json.dumps({**line, "time": time.time()}), flush=True)
        if arguments.pause:
            time.sleep(arguments.pause)
    manager.shutdown()
    group.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, help="start a lighthouse and so many replicas")
    parser.add_argument("--replica", type=int, default=0, help="number of this replica")
    parser.add_argument("--least", type=int, default=2, help="replicas that a step needs")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    if arguments.replicas is None:
        return replica(arguments)
    # A replica that sends no heartbeat for half a second is left out of the next quorum.
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=arguments.least,
        join_timeout_ms=1000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=500,
    )
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    processes = []
    for number in range(arguments.replicas):
        command = [sys.executable, __file__, "--replica", str(number)]
        for name in ("least", "steps", "codec", "transport", "pause"):
            command += [f"--{name}", str(getattr(arguments, name))]
        print(f"TORCHFT_LIGHTHOUSE={lighthouse.address()} {shlex.join(command)}", flush=True)
        processes.append(subprocess.Popen(command))
    failed = [process.wait() for process in processes]
    lighthouse.shutdown()
    sys.exit(max(map(abs, failed)))


if __name__ == "__main__":
    main()
