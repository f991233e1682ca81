"""Residuals of sharded gradients (FSDP2), resumed on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import pycomm
from tests.torch.fsdp.test_compress import SHAPES, Odd, average, chosen, gradients, reduced

STEPS = 4


def owed(state: Any, size: int) -> dict[str, torch.Tensor]:
    """Return the sum of all ranks' residuals, as a part of the average."""
    residuals, result = state.state_dict()[f"rank{dist.get_rank()}"][1], {}
    for name in ("big", "small"):
        result[name] = torch.zeros(SHAPES[name])
        if name in residuals:  # otherwise it has taken over nothing
            flat = residuals[name]["worker"][: result[name].numel()]
            result[name] = flat.view(SHAPES[name]) / size
        dist.all_reduce(result[name])
    return result


def check_world(
    rank: int, size: int, path: str, first: int, spec: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Load, take some steps, save; return residuals before, the averages, and residuals after."""
    model, state = chosen(size, spec)
    began = {}
    if first > 0:
        state.load_checkpoint(Path(path) / str(first))
        began = owed(state, size)
    lost = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(first, first + STEPS):
        want = average(size, step)
        for name, g in reduced(model, gradients(rank, step)).items():
            lost[name] += want[name] - g
    dcp.save({"pycomm": state.state_dict()}, checkpoint_id=Path(path) / str(first + STEPS))
    return began, lost, owed(state, size)


# sign also has errors in the padding; the third is a codec of tests/torch/harness.py
@pytest.mark.parametrize("spec", ["int4", "sign", "multiples"])
def test_other_numbers_of_shards_owe_the_same(pool, tmp_path, spec):
    before: dict[str, torch.Tensor] = {}
    for i, ranks in enumerate((3, 2, 4)):
        answers = pool.run(check_world, str(tmp_path), i * STEPS, spec, ranks=ranks)
        began, lost, ended = answers[0]
        for name in ended:
            # The tolerance is the round-off of a few dozen float32 additions of values around 1.
            if before:
                torch.testing.assert_close(began[name], before[name], rtol=0, atol=1e-5)
            paid = ended[name] - began[name] if before else ended[name]
            torch.testing.assert_close(lost[name], paid, rtol=0, atol=2e-5)
        before = ended


def check_other_cuts(rank: int, size: int, path: str) -> None:
    """Two ranks that share columns save; others, which share rows, cannot load."""
    columns = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)} if size == 2 else {}
    model = fully_shard(Odd(), mesh=init_device_mesh("cpu", (size,)), **columns)
    state = pycomm.compress(model, "int4")
    if size == 2:
        reduced(model, gradients(rank, 0))
        dcp.save({"pycomm": state.state_dict()}, checkpoint_id=Path(path))
        return
    if rank == 2:  # takes over no rank's residuals
        state.load_checkpoint(Path(path))
        return
    with pytest.raises(
        ValueError, match=r"saved by 2 ranks that share it \(FSDP\), and it had 2 x"
    ):
        state.load_checkpoint(Path(path))


def test_what_cannot_be_cut_anew_is_refused(pool, tmp_path):
    for ranks in (2, 3):
        pool.run(check_other_cuts, str(tmp_path), ranks=ranks)
