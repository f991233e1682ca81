"""A model that is dropped leaves the monitor at once, not when the garbage collector runs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import monitor


def check_states(rank: int, size: int) -> None:
    gc.collect()
    gc.disable()
    try:
        before = set(monitor.snapshot())
        for codec in ("int4", "auto", "powersgd:2"):
            state = pycomm.CompressionState(codec)
            assert len(set(monitor.snapshot()) - before) == 1
            state.set_policy("int8")
            assert len(set(monitor.snapshot()) - before) == 1
            del state
            assert set(monitor.snapshot()) == before, codec
    finally:
        gc.enable()


def test_a_state_that_is_dropped_leaves_the_monitor(pool):
    pool.run(check_states)


def check_a_model(rank: int, size: int) -> None:
    DistributedDataParallel(nn.Linear(2, 2))  # torch keeps the first one of a process alive
    gc.collect()
    gc.disable()
    try:
        before = set(monitor.snapshot())
        model = DistributedDataParallel(nn.Linear(64, 64))
        state = pycomm.compress(model, codec="int4")
        model(torch.ones(2, 64)).sum().backward()
        assert state.step == 1
        assert len(set(monitor.snapshot()) - before) == 1
        del model, state
        assert set(monitor.snapshot()) == before
    finally:
        gc.enable()


def test_a_model_that_is_dropped_leaves_the_monitor(pool):
    pool.run(check_a_model)


def check_refusals(rank: int, size: int) -> None:
    state = pycomm.CompressionState("int4", feedback="momentum")
    with pytest.raises(
        ValueError, match="powersgd has feedback of the kind residual, not momentum"
    ):
        state.set_policy("powersgd:2")


def test_a_state_still_refuses_what_it_cannot_use(pool):
    pool.run(check_refusals, ranks=1)
