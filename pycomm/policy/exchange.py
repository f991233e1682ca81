"""Messages: numbers that ranks exchange so that they decide alike, and lines for people."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist


def gather(
    numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Return the numbers of every rank, in rank order and bit-exact; collective.

    Args:
        numbers: the numbers of this rank, equally many on every rank.
        group: the ranks.
        device: a device whose tensors the group moves.
    """
    return start_gather(numbers, group, device)()


def gather_in_mesh(
    numbers: Sequence[float], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> list[list[float]]:
    """Return the numbers of every rank of a mesh, in one order on all of them; collective.

    Args:
        numbers, device: as for `gather`.
        groups: the group; for a mesh the groups along its dimensions, the last one first.
    """
    rows = [list(numbers)]
    for group in groups:
        sent = [number for row in rows for number in row]
        size, came = len(numbers), gather(sent, group, device)
        rows = [row[at : at + size] for row in came for at in range(0, len(sent), size)]
    return rows


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU, without numpy, which torch does not bring."""
    flat = tensor.contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes)


def answer(work: dist.Work, result: torch.Tensor) -> torch.Tensor:
    """Wait for an operation on the host; return its result there.

    For tensors of a device wait() may only order streams, and an operation that then fails leaves
    bytes of ones, which are no NaN in an integer: its error is raised here.
    """
    work.wait()
    there = result.cpu()
    if not result.is_cpu:
        work.wait()
    return there


def start_gather(
    numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device
) -> Callable[[], list[list[float]]]:
    """Send numbers as `gather` does; return a function that waits for those of every rank."""
    if group.size() == 1:
        return lambda: [list(numbers)]
    # Sent as bytes, which also works on devices without float64.
    own = torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.uint8)
    wait = _start_gather_of_bytes(own, group, device)
    return lambda: [row.view(torch.float64).tolist() for row in wait()]


def _start_gather_of_bytes(
    own: torch.Tensor, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], list[torch.Tensor]]:
    own = own.to(device)
    everybody = [torch.empty_like(own) for _ in range(group.size())]
    work = dist.all_gather(everybody, own, group=group, async_op=True)

    @cache
    def wait() -> list[torch.Tensor]:
        return [answer(work, row) for row in everybody]

    return wait


def gather_json(
    value: Any, group: dist.ProcessGroup, device: torch.device | None = None
) -> list[Any]:
    """Return the value of every rank, in rank order; collective, two small all-gathers.

    JSON instead of pickle, as torch's object collectives use: reading a pickle runs code that
    its sender chooses.

    Args:
        value: what JSON holds: numbers, texts, None, lists and dicts of them.
        group: the ranks.
        device: a device whose tensors the group moves; None: `device_of(group)`.
    """
    if group.size() == 1:
        return [value]
    device = device or device_of(group)
    written = json.dumps(value).encode()
    sizes = [int(row[0]) for row in gather([len(written)], group, device)]
    own = torch.frombuffer(bytearray(written.ljust(max(sizes), b" ")), dtype=torch.uint8)
    return [json.loads(bytes_of(row)) for row in _start_gather_of_bytes(own, group, device)()]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors the group moves: the CPU if it does, else the current one."""
    cpu = torch.device("cpu")
    try:
        group._get_backend(cpu)
    except RuntimeError:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return cpu
