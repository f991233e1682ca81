"""The first minute on a GPU: two ranks, an exact and a compressed average, by the path that default
options take, with the bits of the CPU.

    python -m pycomm.bench.gpu.smoke JOB

JOB is JSON, the arguments of `main`; each process is one rank.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.doctor.gpu import join
from pycomm.feedback.rule import LARGE

PATHS = ("kernels", "peers")
"""The paths that default options may take on a device."""
STEPS = 3


class Chosen(nn.Module):
    """A matrix of the size from which residuals are kept in bf16, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = (
            nn.Parameter(torch.zeros(LARGE // 256, 256)),
            nn.Parameter(torch.zeros(50)),
        )

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a loss with these gradients."""
        return sum((p * given[name]).sum() for name, p in self.named_parameters())  # type: ignore[return-value]


def reduced(device: str) -> tuple[list[torch.Tensor], str]:
    """Return averages of three steps in int4, and the lines of `summary()` on paths. Collective."""
    model = DistributedDataParallel(Chosen().to(device))
    state = pycomm.compress(model, "int4")
    numbers = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(STEPS):
        given = {
            name: torch.randn(p.shape, generator=numbers).to(device)
            for name, p in model.module.named_parameters()
        }
        model.zero_grad()
        model(given).backward()
        found += [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    state.settle()
    paths = [line for line in state.summary().splitlines() if line.startswith("path of")]
    return found, "; ".join(paths)


def check(device: str, allowed: tuple[str, ...]) -> str:
    """Average on a device and on the CPU; return the path that was taken. Collective.

    Raises:
        RuntimeError: the path is not among the allowed ones, or results are not those of the CPU.
    """
    values = torch.full((1 << 16,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(values)
    ranks = dist.get_world_size()
    if not bool((values == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"rank {dist.get_rank()}: an exact all-reduce on {device} is wrong")
    (found, path), (want, _) = reduced(device), reduced("cpu")
    if not any(f"values: {name} (" in path for name in allowed):
        raise RuntimeError(f"default options on {device} take no path of {allowed}: {path}")
    if not all(torch.equal(a, b) for a, b in zip(found, want, strict=True)):
        raise RuntimeError(f"averages in int4 on {device} have other bits than on the CPU: {path}")
    return path


def main(rank: int, ranks: int, store: str, device: str) -> str:
    """Meet the other ranks, check, and return the path."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    join(rank, ranks, store, device)
    try:
        return check(device, PATHS)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    print(main(**json.loads(sys.argv[1])))
