"""`--gpu`: two ranks that average on the GPU.

The averages are exact ones, and compressed ones by the path that default options take, which have
the bits of the CPU. Ranks share the GPU, with NCCL_HOSTID as it wants it; each is a process, so
that a crash becomes a line of the report. It is also the first stage of `make gpu`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from pycomm.doctor.finding import Finding, Topic
from pycomm.doctor.installed import KERNELS
from pycomm.doctor.self_test import outcomes_of_ranks
from pycomm.env import given

TOPIC = Topic("GPU")
RANKS, STEPS = 2, 3
LIMIT = 180.0  # seconds of a rank; NVRTC and Triton compile their kernels at first use
CODEC = "int4"
FAST = ("kernels", "peers")
"""The paths of device tensors on which kernels do all of the coding."""


def has_mps() -> bool:
    """Return whether NVIDIA's multi-process service runs, by which processes share a GPU."""
    name = "CUDA_MPS_PIPE_DIRECTORY"
    folder = given(name).get(name, "/tmp/nvidia-mps")
    return Path(folder, "control").exists()


def run(device: str = "cuda", limit: float = LIMIT) -> list[Finding]:
    """Start the ranks; return what rank 0 has found, or why a rank has ended.

    Args:
        device: type of the device.
        limit: seconds of a rank.
    """
    with tempfile.TemporaryDirectory(prefix="pycomm-doctor-") as folder:
        found = outcomes_of_ranks(__name__, RANKS, [f"{folder}/store", device], limit)
    for rank, (_, why) in enumerate(found):
        if why:
            text = f"rank {rank} of {RANKS} on the GPU: {why}"
            cure = "see what stands above of CUDA; `nvidia-smi` and the kernel's log have more"
            return [TOPIC.problem("ranks", text, cure)]
    said, _ = found[0]
    return list(judge(said[-1]))


def judge(found: dict[str, Any]) -> Iterator[Finding]:
    """Yield the findings of what rank 0 has found."""
    if found["mps"]:
        yield TOPIC.ok("MPS", "runs: processes share a GPU at the same time")
    else:
        text = "does not run: processes on one GPU take turns, which a kernel that waits fills"
        yield TOPIC.note("MPS", text, "nvidia-cuda-mps-control -d, to share a GPU")
    path = found["path"]
    if any(f"values: {name} (" in path for name in FAST):
        yield TOPIC.ok("ranks", f"{RANKS} ranks average right; {path}")
    else:
        text = f"{RANKS} ranks average right, and default options take a slow path: {path}"
        yield TOPIC.note("ranks", text, KERNELS)


# ------------------------------------------------------------------------ one rank


def averages(device: str) -> tuple[list[Any], str]:
    """Return averages of a few steps, and the lines of `summary()` on paths. Collective."""
    import torch
    import torch.distributed as dist

    from pycomm.feedback.rule import LARGE
    from pycomm.reduction.state import CompressionState

    state = CompressionState(CODEC)
    shapes = {"matrix": (LARGE // 256, 256), "bias": (50,)}  # residuals in int8, and in float32
    for name, shape in shapes.items():
        state.add(name, torch.empty(shape, dtype=torch.float32, device=device))
    numbers, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        flat = torch.randn(LARGE + 50, dtype=torch.float32, device="cpu", generator=numbers)
        flat = flat.to(device)
        state.begin_step()
        state.wait(state.reduce(flat, list(shapes)))
        state.end_step()
        found.append(flat.cpu())
    state.settle()
    paths = [line for line in state.summary().splitlines() if line.startswith("path of")]
    return found, "; ".join(paths)


def check(device: str) -> str:
    """Average on a device and on the CPU; return the path that was taken. Collective.

    Raises:
        RuntimeError: the results are not right, or not those of the CPU.
    """
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = torch.full((1 << 16,), float(rank + 1), dtype=torch.float32, device=device)
    dist.all_reduce(values)
    if not bool((values == ranks * (ranks + 1) / 2).all()):
        raise RuntimeError(f"rank {rank}: an exact all-reduce on {device} is wrong")
    (found, path), (want, _) = averages(device), averages("cpu")
    if not all(torch.equal(a, b) for a, b in zip(found, want, strict=True)):
        raise RuntimeError(
            f"rank {rank}: averages in {CODEC} on {device} have other bits than on the CPU: {path}"
        )
    return path


def main(rank: int, store: str, device: str) -> None:
    """Be one rank, on a GPU that ranks may share.

    Args:
        rank: this one.
        store: path of a file that all ranks name.
        device: type of the device, such as "cuda".
    """
    import torch
    import torch.distributed as dist

    gpu = torch.get_device_module(device)
    gpu.set_device(rank % gpu.device_count())
    dist.init_process_group(
        f"cpu:pycomm,{device}:pycomm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=20),
    )
    path = check(device)
    if rank == 0:
        print(json.dumps({"mps": has_mps(), "path": path}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
