"""What LocalSGD and weighted averages make, threads, descriptors and memory, ends with them."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.local_sgd import Quorum, Streamed

LIVES = 20
FORMS: dict[str, dict[str, Any]] = {
    "stream": {"exchange": Streamed(overlap=2)},
    "stream on a thread": {"exchange": Streamed(overlap=2), "weighted": True},
    "quorum": {"exchange": Quorum(1, grace=0.0)},
}


def held() -> tuple[int, int, int]:
    """Return the number of threads and descriptors, and GiB of address space."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    gib = pages * os.sysconf("SC_PAGE_SIZE") >> 30
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), gib


def local_life(options: dict[str, Any], finishes: bool) -> None:
    model = nn.Linear(64, 64)
    local = pycomm.LocalSGD(model, every=2, codec="int4", **options)
    for _ in range(4):
        model(torch.randn(2, 64)).sum().backward()
        local.step(*(3,) if local.weighted else ())
    if finishes:
        local.finish()


def weighted_life(_: dict[str, Any], __: bool) -> None:
    model = DistributedDataParallel(nn.Linear(64, 64))
    state = pycomm.compress(model, "int4", weighted=True)
    for _ in range(2):
        state.set_weight(3)
        model(torch.randn(2, 64)).sum().backward()


def check_lives(rank: int, size: int, life: Any, options: dict[str, Any], finishes: bool) -> None:
    life(options, finishes)
    before = held()
    for _ in range(LIVES):
        life(options, finishes)
    # What was not finished ends when its thread notices; other ranks may be behind, too.
    until = time.monotonic() + 20.0
    while (after := held()) > before and time.monotonic() < until:
        time.sleep(0.05)
    assert all(now <= then + 1 for now, then in zip(after, before, strict=True)), (before, after)
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks' own group is as it was
    assert total.item() == size


@pytest.mark.parametrize("finishes", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_local_sgd_leaves_nothing_behind(pool, form, finishes):
    pool.run(check_lives, local_life, FORMS[form], finishes)


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_weighted_compression_leaves_nothing_behind(pool, backend):
    pool.run(check_lives, weighted_life, {}, True, backend=backend)


def test_on_other_backends_a_stream_leaves_nothing_behind(pool):
    pool.run(check_lives, local_life, FORMS["stream"], True, backend="gloo")
