"""`--gpu`: which implementations of codecs work on the GPU, and two ranks on it for a second.

Ranks share the GPU, with NCCL_HOSTID as it wants it; each is a process, so that a crash becomes a
line of the report.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from pycomm.doctor.finding import Finding
from pycomm.env import given, variables_of_rank

TOPIC = "GPU"
RANKS, SECONDS = 2, 1.0
LIMIT = 180.0  # seconds of a rank; NVRTC and Triton compile their kernels at first use
KINDS = ("native", "nvrtc", "triton", "reference")
CODEC, VALUES = "int4", 1 << 18
CURES = {
    "native": "pip install pycomm-cuda13, or build pycomm where nvcc is found",
    "nvrtc": 'pip install "pycomm[cuda13]" (or cuda12, as the driver has it)',
    "triton": "install the Triton that this torch asks for",
}


def has_mps() -> bool:
    """Return whether NVIDIA's multi-process service runs, by which processes share a GPU."""
    name = "CUDA_MPS_PIPE_DIRECTORY"
    folder = given(name).get(name, "/tmp/nvidia-mps")
    return Path(folder, "control").exists()


def run(device: str = "cuda") -> list[Finding]:
    """Start the ranks; return what rank 0 has found, or why a rank has ended."""
    with tempfile.TemporaryDirectory(prefix="pycomm-doctor-") as folder:
        command = [sys.executable, "-m", __name__]
        started = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/store", device],
                env=variables_of_rank(rank, RANKS) | {"NCCL_HOSTID": f"rank{rank}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        said = []
        for process in started:
            try:
                said.append(process.communicate(timeout=LIMIT))
            except subprocess.TimeoutExpired:
                process.kill()
                said.append((process.communicate()[0], f"did not end within {LIMIT:.0f} s"))
    for rank, (process, (_, cried)) in enumerate(zip(started, said, strict=True)):
        if process.returncode:
            last = (cried.strip().splitlines() or ["without a word"])[-1]
            text = f"rank {rank} of {RANKS} on the GPU ended: {last}"
            cure = "see what stands above of CUDA; `nvidia-smi` and the kernel's log have more"
            return [Finding("problem", TOPIC, "ranks", text, cure)]
    return list(judge(json.loads(said[0][0].splitlines()[-1])))


def judge(found: dict[str, Any]) -> Iterator[Finding]:
    """Yield the findings of what rank 0 has found."""
    for kind, why in found["kinds"].items():
        if not why:
            yield Finding("ok", TOPIC, kind, f"codes {CODEC} with the reference's bytes")
            continue
        level = "problem" if "bytes" in why else "note"
        cure = CURES.get(kind, "report it, with this line")
        yield Finding(level, TOPIC, kind, why, cure)
    if found["mps"]:
        yield Finding("ok", TOPIC, "MPS", "runs: processes share a GPU at the same time")
    else:
        text = "does not run: processes on one GPU take turns, which a kernel that waits fills"
        yield Finding("note", TOPIC, "MPS", text, "nvidia-cuda-mps-control -d, to share a GPU")
    if found["equal"]:
        text = f"{RANKS} ranks: {found['averages']} averages in a second; {found['path']}"
        yield Finding("ok", TOPIC, "ranks", text)
    else:
        text = f"{RANKS} ranks have different averages; {found['path']}"
        yield Finding("problem", TOPIC, "ranks", text, "report it, with this line")


# ------------------------------------------------------------------------ one rank


def join(rank: int, ranks: int, store: str, device: str) -> None:
    """Make the default group of ranks that may share a GPU.

    Args:
        store: path of a file that all ranks name.
        device: type of the device, such as "cuda".
    """
    import torch
    import torch.distributed as dist

    if device != "cpu":
        gpu = torch.get_device_module(device)
        gpu.set_device(rank % gpu.device_count())
    dist.init_process_group(
        "pycomm" if device == "cpu" else f"cpu:pycomm,{device}:pycomm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=20),
    )


def main(rank: int, store: str, device: str) -> None:
    import torch
    import torch.distributed as dist

    from pycomm.reduction.state import CompressionState

    join(rank, RANKS, store, device)
    state = CompressionState(CODEC)
    values = torch.ones(VALUES // 256, 256, dtype=torch.float32, device=device)
    state.add("values", values)
    averages, until, equal = 0, time.monotonic() + SECONDS, True
    goes_on = torch.ones(1, dtype=torch.float32, device=device)
    while goes_on:
        flat = (values * (rank + 1)).view(-1)
        state.begin_step()
        state.wait(state.reduce(flat, ["values"]))
        state.end_step()
        both = torch.stack([flat.sum(), -flat.sum()])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        equal &= bool(both[0] == -both[1])
        averages += 1
        goes_on.fill_(time.monotonic() < until)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
    state.settle()
    path = state.summary().rpartition("path of all_reduce, ")[2].splitlines()[0]
    if rank == 0:
        kinds = {kind: trial(kind, device) for kind in KINDS}
        found = {"kinds": kinds, "mps": has_mps(), "equal": equal}
        print(json.dumps(found | {"averages": averages, "path": path}))
    dist.destroy_process_group()


def trial(kind: str, device: str) -> str:
    """Return why an implementation does not work on a device; "" if it does."""
    import torch

    import pycomm
    from pycomm.codecs.args import EncodeArgs, RandomKey
    from pycomm.codecs.implementations import implementation

    codec = pycomm.codec(CODEC)
    x = torch.linspace(-1.0, 1.0, 4096, dtype=torch.float32, device=device)
    payloads = []
    for each in ("reference", kind):
        out = torch.zeros(codec.encoded_bytes(x.numel()), dtype=torch.uint8, device=device)
        try:
            args = EncodeArgs(x, out, None, None, RandomKey(), 0)
            implementation(codec.name, each, device).encode(codec, args)
            payloads.append(out.cpu())
        except Exception as error:  # compilers and CUDA raise their own types
            return f"{type(error).__name__}: {error}".splitlines()[0]
    return "" if torch.equal(*payloads) else "its bytes are not those of the reference"


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
