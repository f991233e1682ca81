"""The accelerator on which measurements run: that of torch, by torch's own names for it.

It is a GPU of NVIDIA, "cuda". In tests it is the stand-in device, which has a part of `torch.cuda`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

import pycomm
from pycomm.bench.common import harness
from pycomm.doctor.gpu import has_mps
from pycomm.env import given

SHARED = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
"""What lets NCCL use a GPU that ranks share, by their links; each has an NCCL_HOSTID, too."""


@cache
def kind() -> str:
    """Return the type of this process's accelerator, such as "cuda"; "" without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None or found.type == "mps" else found.type


@cache
def api() -> Any:
    """Return `torch.cuda`, or what another accelerator has in its place."""
    return torch.get_device_module(kind())


def driver() -> str:
    """Return the version of NVIDIA's driver."""
    words = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    return harness.output(*words).partition("\n")[0] or "unknown"


def describe() -> str:
    """Return the name of this process's GPU, with its driver; "" without one."""
    return f"{api().get_device_name()} (driver {driver()})" if kind() else ""


def take(rank: int, ranks: int) -> torch.device:
    """Make a GPU this rank's, also for NCCL where ranks share it; before groups are made."""
    count = api().device_count()
    if count < ranks:
        os.environ.update(SHARED | {"NCCL_HOSTID": f"rank{rank}"})
    api().set_device(rank % count)
    return torch.device(kind(), rank % count)


def seconds(call: Callable[[], object], stream: Any = None) -> float:
    """Return the time of a call by events on a stream, the current one by default; wait for it."""
    begin, end = (api().Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def sharing(ranks: int) -> str:
    """Return how ranks share GPUs; "" if each has one."""
    gpus = api().device_count()
    if gpus >= ranks:
        return ""
    mps = "with MPS" if has_mps() else "without MPS"
    return f"{ranks} ranks share {gpus} GPU{'s' * (gpus > 1)} {mps}"


def group(backend: str, device: str) -> dict[str, Any]:
    """Return arguments of `new_group` for ranks whose tensors are on a type of device.

    pycomm's groups take those of the CPU, too. Where it paces its links (PYCOMM_LINK), ranks of one
    machine stand for those of several: they do not reach each other's memory.
    """
    if device == "cpu" or backend != "pycomm":
        return {"backend": backend}
    options = pycomm.Options(device_path="host") if given().get("PYCOMM_LINK") else None
    return {"backend": f"cpu:pycomm,{device}:pycomm", "pg_options": options}
