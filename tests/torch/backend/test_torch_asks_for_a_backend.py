"""Torch's own function for the timeout of a group that exists."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pycomm


def check_timeout(rank: int, size: int) -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's is that nothing was set
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(pycomm.Error):
            dist.all_reduce(torch.ones(1), group=group)
        assert time.monotonic() - begin < 8  # of the 20 s that the group was made with
        dist.distributed_c10d._get_default_store().set("tried", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["tried"])


def test_torchs_function_sets_the_timeout_of_a_group(pool):
    pool.run(check_timeout)
