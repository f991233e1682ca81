"""LocalSGD where one rank has a gradient that is not finite, or takes fewer steps than others."""

from __future__ import annotations

import gc
import logging
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
from pycomm.local_sgd import Blocking, Quorum, Streamed
from tests.torch.harness import alike, batch, heard, network
from tests.torch.local_sgd.test_local_sgd import values
from tests.torch.pool import on_ranks

FORMS = {
    "blocking": {"exchange": Blocking()},
    "fragments": {"exchange": Streamed(2, overlap=0)},
    "overlapped fragments": {"exchange": Streamed(2, overlap=1)},
    "a round later": {"exchange": Streamed(overlap=4)},
    "on a thread": {"exchange": Streamed(2, overlap=2), "weighted": True},
    "quorum": {"exchange": Quorum(2)},
}


@on_ranks(2)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_one_gradient_of_nan_costs_one_round(rank, size, options):
    """Rank 1 has one gradient of NaN; with AdamW that once cost all rounds that followed."""
    with heard(logging.WARNING) as lines:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        local = pycomm.LocalSGD(model, every=4, codec="int8", **options)
        for step in range(32):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if rank == 1 and step == 5:
                model[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
            local.step(*(len(x),) if local.weighted else ())
        local.finish()
    assert 1 <= local.skipped <= 2 < local.rounds  # two fragments may have it
    assert all(value.isfinite().all() for value in values(model))
    assert alike(*values(model))
    skipped = [text for text in lines if "LocalSGD skips round" in text]
    assert len(skipped) == local.skipped
    assert all("the outer gradient of rank 1 is not" in text for text in skipped)
    reset = [text for text in lines if "has reset the inner optimizer's state" in text]
    assert [text.partition(":")[0] for text in reset] == (["rank 1"] if rank else [])
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())
        assert state["step"] > 0


def check_scaler(rank: int, size: int, options: dict[str, Any], overflows: tuple[int, ...]) -> None:
    """A GradScaler skips steps of rank 1, which the context manager does not count."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pycomm.LocalSGD(model, every=4, codec="int8", optimizer=optimizer, **options) as local:
        for step in range(9):
            x, y = batch(rank, step)
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss * float("inf" if rank == 1 and step in overflows else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert local.local_steps == 0
    assert local.skipped == 0
    assert alike(*values(model))
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size


@pytest.mark.parametrize(
    ("form", "overflows"),
    [
        ("blocking", (0,)),
        ("blocking", (0, 2, 3, 5, 6)),
        ("fragments", (3,)),
        ("overlapped fragments", (0, 2, 3, 5, 6)),
        ("a round later", (0,)),
    ],
)
def test_ranks_that_skip_steps_finish_with_the_others(pool, form, overflows):
    pool.run(check_scaler, FORMS[form], overflows)


@on_ranks(3)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_ranks_of_different_numbers_of_steps_end_equal(rank, size, options):
    model = network()
    local = pycomm.LocalSGD(model, every=4, codec="fp32", **options)
    for _ in range((0, 3, 14)[rank]):
        with torch.no_grad():
            model[0].weight += 0.1 * (1 + rank)
        local.step(*(1,) if local.weighted else ())
    local.finish()
    assert alike(*values(model))
    local.finish()  # with nothing to do
    assert alike(*values(model))


# -------------------------------------------------------------------------------------- what ends
# What LocalSGD and weighted averages make, threads, descriptors and memory, ends with them.


LIVES = 20
ENDING: dict[str, dict[str, Any]] = {
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
@pytest.mark.parametrize("form", ENDING)
def test_local_sgd_leaves_nothing_behind(pool, form, finishes):
    pool.run(check_lives, local_life, ENDING[form], finishes)


@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_weighted_compression_leaves_nothing_behind(pool, backend):
    pool.run(check_lives, weighted_life, {}, True, backend=backend)


def test_on_other_backends_a_stream_leaves_nothing_behind(pool):
    pool.run(check_lives, local_life, ENDING["stream"], True, backend="gloo")
