"""A rank is killed during training: the run resumes from its checkpoint, with the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.harness import batch, network

SAVED, KILLED, END = 4, 6, 10


def begin(path: str, first: int, spec: str, feedback: str) -> tuple[Any, Any, Any]:
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    state = pycomm.compress(model, spec, feedback=feedback)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if first > 0:
        model(batch(0, 0)[0]).sum().backward()  # creates the optimizer's state to load into
        optimizer.step()
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(saved, checkpoint_id=Path(path))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_checkpoint(Path(path))
    return model, state, optimizer


def train(
    rank: int, size: int, path: str, first: int, spec: str, feedback: str, dies: bool = False
) -> list[torch.Tensor]:
    """Return the final parameters; a checkpoint is saved on the way."""
    model, state, optimizer = begin(path, first, spec, feedback)
    for step in range(first, END):
        if dies and step == KILLED and rank == 1:
            # The rank dies during backward, while some buckets are being reduced.
            model.module[3].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if dies and step == KILLED:
            with pytest.raises(pycomm.PeerLost, match="rank 1"):
                loss.backward()
            return []
        loss.backward()
        optimizer.step()
        if step + 1 == SAVED:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.save({**saved, "pycomm": state.state_dict()}, checkpoint_id=Path(path))
    return [p.detach() for p in model.parameters()]


def test_a_killed_run_goes_on_to_the_same_bits(pool, tmp_path):
    how = ("int4:rounding=stochastic", "momentum:0.9,storage=int8")
    calm = pool.run(train, str(tmp_path / "calm"), 0, *how)
    cut = str(tmp_path / "cut")
    assert pool.run(train, cut, 0, *how, True, dies={1}) == [[], None]
    again = pool.run(train, cut, SAVED, *how)
    for before, after in zip(calm, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
