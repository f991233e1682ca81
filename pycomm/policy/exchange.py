"""What ranks tell each other so that they decide alike, and what they tell people."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from pycomm import backend
from pycomm.policy.rules import Link

logger = logging.getLogger("pycomm")


def tell(text: str) -> None:
    """Let people know, at level INFO; on standard error where no logging is set up at all."""
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        print(f"pycomm: {text}", file=sys.stderr, flush=True)


def gather(
    numbers: Sequence[float], group: dist.ProcessGroup, device: torch.device
) -> list[list[float]]:
    """Return the numbers of every rank, in rank order and to the last bit; collective.

    Args:
        numbers: as many on every rank.
        group: whose ranks.
        device: one that the group moves tensors of.
    """
    if group.size() == 1:
        return [list(numbers)]
    # As bytes: they arrive as they were, on devices without float64, too.
    own = torch.tensor(numbers, dtype=torch.float64).view(torch.uint8).to(device)
    everybody = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everybody, own, group=group)
    return [row.cpu().view(torch.float64).tolist() for row in everybody]


def find_link(group: dist.ProcessGroup) -> Link:
    """Return how the ranks of a group reach each other, the same on all; collective.

    The backend "pycomm" knows which transport leads to each peer; with others ranks that are on
    different hosts count as reached over a network.
    """
    if group.size() == 1:
        return "intra"
    ours = backend.find(group)
    # The boot's number tells hosts of one name apart, and containers of one host together.
    boot = Path("/proc/sys/kernel/random/boot_id")
    here = boot.read_text().strip() if boot.exists() else socket.gethostname()
    mine = ("tcp" in ours.describe() if ours is not None else False, here)
    everybody: list[tuple[bool, str]] = [mine] * group.size()
    dist.all_gather_object(everybody, mine, group=group)
    if ours is not None:
        return "inter" if any(network for network, _ in everybody) else "intra"
    return "intra" if len({host for _, host in everybody}) == 1 else "inter"
