"""A rank is killed during training: the others shrink the group, continue, and keep residuals."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.harness import batch, network, train_step
from tests.torch.torchrun import launch

KILLED, END = 3, 8
# Residuals are kept in bf16, with 8 bits of mantissa.
ROUNDING = 2.0**-8


def owed(state: Any, ranks: int) -> dict[str, torch.Tensor]:
    """Return this rank's residuals as parts of the average, by parameter."""
    assert state.residuals.ranks == ranks
    entries = state.state_dict()[f"rank{dist.get_rank()}"][1]
    return {
        name: state.residuals.added(name, 0, entry["about"][0]).double()
        for name, entry in entries.items()
    }


def shrink(error: pycomm.PeerLost) -> set[int]:
    """Shrink the group to the survivors; return the lost ranks, which may have become more."""
    gone = set(error.ranks)
    while True:
        try:
            dist.shrink_group(sorted(gone), shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
            return gone
        except pycomm.PeerLost as another:
            more = set(another.ranks)
        assert not gone & more
        gone |= more


def train(rank: int, size: int, codec: str, feedback: str, victims: set[int]) -> list[torch.Tensor]:
    """Return the final parameters, on ranks that have lost others on the way."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.02)
    state = pycomm.compress(model, codec, feedback=feedback)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(KILLED):
        train_step(model, optimizer, rank, number)
    if rank in victims:  # during backward, while some buckets are being reduced
        model.module[3].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(pycomm.PeerLost) as caught:
        train_step(model, optimizer, rank, KILLED)
    error = pycomm.PeerLost(str(caught.value), caught.value.rank, caught.value.ranks)
    del caught

    before = owed(state, size)
    assert shrink(error) == victims
    module = model.module
    del model
    model = DistributedDataParallel(module, bucket_cap_mb=0.02)
    state, old = pycomm.compress(model, codec, feedback=feedback), state
    state.adopt_state(old)
    assert state.step == KILLED + 1
    after = owed(state, size - len(victims))
    assert before.keys() == after.keys() != set()
    for name in before:
        sums = torch.stack([before[name], after[name]])
        dist.all_reduce(sums)
        torch.testing.assert_close(sums[1], sums[0], rtol=ROUNDING, atol=ROUNDING)
        assert sums[0].abs().max() > 0
    for number in range(KILLED, END):
        train_step(model, optimizer, dist.get_rank(), number)
    assert state.overflows == 0
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("victims", [{1}, {1, 2}])
def test_survivors_train_on_with_their_residuals(pool, victims):
    feedback = "residual:storage=bf16"
    ends = pool.run(train, "int4", feedback, victims, ranks=2 + len(victims), dies=victims)
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[-1], strict=True))


def until_lost(numbers: torch.Tensor) -> None:
    while True:
        dist.all_reduce(numbers)


def go_on_without_two(rank: int, size: int, store: Any) -> list[float]:
    options = pycomm.Options(transport="tcp")  # the test above uses the other one
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, pg_options=options)
    dist.barrier()
    if rank in (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    numbers = torch.full((1000,), rank + 1)
    with pytest.raises(pycomm.PeerLost) as caught:
        until_lost(numbers)
    assert caught.value.rank in caught.value.ranks
    assert set(caught.value.ranks) <= {1, 2}
    with pytest.raises(pycomm.PeerLost, match="rank 2 of the group that shrinks") as caught:
        dist.shrink_group([1], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    assert (caught.value.rank, caught.value.ranks) == (2, [2])
    dist.shrink_group([1, 2], shrink_flags=dist.distributed_c10d.SHRINK_ABORT)
    numbers = torch.tensor([1.0 + rank])
    dist.all_reduce(numbers)
    return numbers.tolist()


def test_two_deaths_at_once_are_both_named(pool):
    sums = pool.run(go_on_without_two, ranks=4, backend=None, dies={1, 2})
    assert sums == [[5.0], None, None, [5.0]]


SCRIPT = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import pycomm

dist.init_process_group("pycomm")
rank, again = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(64, 64))
state = pycomm.compress(model, "int8")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first = 0
if again:
    saved = [torch.load(f"saved{r}", weights_only=False) for r in range(dist.get_world_size())]
    model.module.load_state_dict(saved[0]["model"])
    state.load_state_dict(*(one["state"] for one in saved))
    first = state.step
for step in range(first, 6):
    if step == 4 and rank == 1 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(100 * step + rank)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        saved = {"model": model.module.state_dict(), "state": state.state_dict()}
        torch.save(saved, f"saved{rank}")
        dist.barrier()
total = sum(p.detach().double().sum() for p in model.parameters())
print(f"rank {rank} after {again} restarts: step {state.step}, {total.item():.12f}", flush=True)
dist.destroy_process_group()
"""


def test_torchrun_restarts_from_a_checkpoint(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    text = launch("--max-restarts", "1", "--monitor-interval", "0.1", "train.py", folder=tmp_path)
    # Lines are not compared, since the output of two ranks may share a line.
    ends = sorted(re.findall(r"rank (\d) after (\d) restarts: step (\d+), (-?\d+\.\d{12})", text))
    assert [end[:3] for end in ends] == [("0", "1", "6"), ("1", "1", "6")], text
    assert ends[0][3] == ends[1][3]


# ------------------------------------------------------------------------------------ checkpoints
# A rank is killed during training: the run resumes from its checkpoint, with the same bits.


SAVED, DIES, LAST = 4, 6, 10


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


def train_and_save(
    rank: int, size: int, path: str, first: int, spec: str, feedback: str, dies: bool = False
) -> list[torch.Tensor]:
    """Return the final parameters; a checkpoint is saved on the way."""
    model, state, optimizer = begin(path, first, spec, feedback)
    for step in range(first, LAST):
        if dies and step == DIES and rank == 1:
            # The rank dies during backward, while some buckets are being reduced.
            model.module[3].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if dies and step == DIES:
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
    calm = pool.run(train_and_save, str(tmp_path / "calm"), 0, *how)
    cut = str(tmp_path / "cut")
    assert pool.run(train_and_save, cut, 0, *how, True, dies={1}) == [[], None]
    again = pool.run(train_and_save, cut, SAVED, *how)
    for before, after in zip(calm, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
