"""Train with compressed gradients under any scheduler; a run that was cut goes on from its save.

torchrun --nproc-per-node 2 examples/resume.py --checkpoints runs/a
srun --ntasks 4 python examples/resume.py --checkpoints runs/a

examples/slurm and examples/kubernetes start it.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import pycomm


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save model, optimizer and residuals; the name `latest` changes when all of it is there."""
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments}
    state = pycomm.state_of(model)
    if state is not None:
        saved["pycomm"] = state.state_dict()
    dcp.save(saved, checkpoint_id=folder / f"step{step}")
    if dist.get_rank() == 0:
        (folder / "latest.new").write_text(str(step))
        os.replace(folder / "latest.new", folder / "latest")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the latest checkpoint, and return the step to go on with."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step{step}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    state = pycomm.state_of(model)
    if state is not None:
        state.load_checkpoint(folder / f"step{step}")
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoints", type=Path, required=True, help="folder shared by all ranks"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits")
    options = parser.parse_args()

    pycomm.launch_env()  # what srun and mpirun have set, by the names that torch reads
    dist.init_process_group("pycomm")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net)
    pycomm.compress(model, options.codec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = load(options.checkpoints, model, optimizer)
    if rank == 0:
        print(f"begin at step {first} on {pycomm.backend.find().describe()}", flush=True)

    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    for step in range(first, options.steps):
        data = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        labels = torch.randint(10, (32,), generator=data)
        points = centres[labels] + torch.randn(32, 64, generator=data)
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(options.pause)
        if (step + 1) % options.every == 0:
            save(options.checkpoints, step + 1, model, optimizer)

    if rank == 0:
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
        print(f"end at step {options.steps}, norm of the weights {weights.norm().item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
