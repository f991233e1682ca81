"""`hvd.elastic`: when torchrun has started all ranks anew, they go on from the last commit."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

import pycomm.horovod as hvd
from pycomm.env import agent_folder
from pycomm.errors import Error
from tests.torch.harness import heard
from tests.torch.pool import on_ranks
from tests.torch.torchrun import joined_by_another, launch

# A rank begins with other weights than the others, since it is rank 0's that count.
SCRIPT = """
import hashlib, os, pathlib, signal, time
import torch
import pycomm.horovod as hvd

hvd.init()
rank, ranks = hvd.rank(), hvd.size()
again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(rank)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model, optimizer, step=0, losses=[])
state.register_reset_callbacks([lambda: print(f"rank {rank} reset to {state.step}.", flush=True)])

def stops():
    if os.environ.get("JOINS"):
        return pathlib.Path("stop").exists() and state.step % 3 == 2
    return state.step == 8

@hvd.elastic.run
def train(state):
    while True:
        if rank == 1 and not again and state.step == int(os.environ.get("DIES", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * state.step + rank))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        state.losses.append(hvd.allreduce(loss.detach()).item())
        state.step += 1
        last = hvd.allreduce(torch.tensor(int(stops())), op=hvd.Max).item()
        if state.step % 3 == 0 or last:
            state.commit()
            if rank == 0:
                pathlib.Path("new").write_text(f"{ranks} {state.step}")
                pathlib.Path("new").rename("committed")
        if last:
            return

train(state)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
text = hashlib.sha256(weights + str(state.losses).encode()).hexdigest()
print(f"rank {rank} of {ranks} ends at {state.step}: {text}.", flush=True)
hvd.barrier()  # one rank of a node removes its file
left = list(pathlib.Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2].glob("pycomm-*"))
print(f"left {left}.", flush=True)
"""
ENDS = r"rank (\d) of (\d) ends at (\d+): ([0-9a-f]{64})\."
RESETS = r"rank (\d) reset to (\d+)\."


def test_a_killed_run_goes_on_from_its_last_commit(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ("--max-restarts", "1", "--monitor-interval", "0.1", "train.py")
    calm = launch(*options, folder=tmp_path)
    assert re.findall(RESETS, calm) == []
    killed = launch(*options, folder=tmp_path, DIES="5")
    assert sorted(re.findall(RESETS, killed)) == [("0", "3"), ("1", "3")]
    ends = sorted(re.findall(ENDS, killed))
    assert [(rank, step) for rank, _, step, _ in ends] == [("0", "8"), ("1", "8")]
    assert ends == sorted(re.findall(ENDS, calm)), "the same bits, of weights and of losses"
    assert calm.count("left [].") == killed.count("left [].") == 2


def test_a_node_that_joins_gets_the_last_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("JOINS", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    committed = tmp_path / "committed"

    def reached() -> tuple[int, int]:
        ranks, steps = committed.read_text().split() if committed.exists() else ("0", "0")
        return int(ranks), int(steps)

    before, text = joined_by_another(tmp_path, 1, reached, more=1)
    resets = re.findall(RESETS, text)
    assert sorted(rank for rank, _ in resets[-2:]) == ["0", "1"], text
    assert len({step for _, step in resets[-2:]}) == 1
    assert int(resets[-1][1]) >= before
    ends = re.findall(ENDS, text)
    assert sorted(rank for rank, *_ in ends) == ["0", "1"], text
    assert len({(step, digest) for _, _, step, digest in ends}) == 1


class Fails(Exception):
    pass


@on_ranks(2)
def test_a_state_is_saved_restored_and_synchronized(rank, size):
    hvd.init()
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1))
    state = hvd.elastic.TorchState(model, optimizer, step=rank, history=[rank])
    calls = []
    state.register_reset_callbacks([lambda: calls.append(state.step)])
    state.sync()
    assert (state.step, state.history) == (0, [0])
    assert optimizer.param_groups[0]["lr"] == 0.1
    whole = hvd.allgather(model.weight.detach().float()[None])
    assert torch.equal(whole[0], whole[1])
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state.step, weights = 7, model.weight.detach().clone()
    state.history.append(7)
    state.commit()
    state.step, moment = 8, optimizer.state[model.weight]["exp_avg"].clone()
    state.history.append(8)
    optimizer.step()
    assert not torch.equal(model.weight, weights)
    state.restore()
    assert (state.step, state.history) == (7, [0, 7])
    assert torch.equal(model.weight, weights)
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment)
    assert calls == []
    state.on_reset()
    assert calls == [7]


@on_ranks(2)
def test_an_error_ends_the_function_and_says_what_follows(rank, size):
    hvd.init()
    state = hvd.elastic.ObjectState(step=rank)
    seen: list[int] = []

    @hvd.elastic.run
    def train(state: Any, more: int) -> int:
        seen.append(state.step)
        if more > 1:
            raise hvd.HorovodInternalError("a rank is gone")
        return more

    assert train(state, 1) == 1
    with heard() as warned, pytest.raises(hvd.HorovodInternalError, match="a rank is gone"):
        train(state, more=2)
    assert seen == [0, 0]
    assert warned == [
        f"rank {rank} ends (Error); nothing starts this job anew: start it with torchrun "
        "--max-restarts"
    ]


@on_ranks(2)
def test_what_no_commit_can_hold_is_refused(rank, size):
    hvd.init()
    state = hvd.elastic.ObjectState(step=0)
    state.step = Fails("of a class that is not read")
    with pytest.raises(Error, match=r"test_elastic\.Fails could not be .*add_safe_glo"):
        state.commit()


def processed(rank: int, sampler: Any, batches: int) -> list[int]:
    done = []
    for batch in range(batches):
        done += sampler.indices[2 * batch : 2 * batch + 2]
        sampler.record_batch(batch, 2)
    return done


@on_ranks(3)
def test_samples_are_divided_and_none_is_taken_twice(rank, size):
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(31), seed=5)
    state = hvd.elastic.TorchState(sampler=sampler)
    assert len(sampler) == 11
    everyone = hvd.allgather_object(list(sampler))
    assert set().union(*everyone) == set(range(31))
    assert everyone[0] != sorted(everyone[0])
    done = processed(rank, sampler, 3)
    state.commit()
    known = set().union(*hvd.allgather_object(done))
    assert sampler.processed_indices == known
    assert len(known) == 18
    assert list(sampler)[:6] == done, "the order stays until a reset"
    processed(rank, sampler, 5)  # lost: it was not committed
    state.restore()
    assert sampler.processed_indices == known
    rest = hvd.allgather_object(list(sampler))
    assert set().union(*rest) == set(range(31)) - known
    assert {len(part) for part in rest} == {5}
    sampler.set_epoch(1)
    assert sampler.processed_indices == set()
    assert set().union(*hvd.allgather_object(list(sampler))) == set(range(31))
    plain = hvd.elastic.ElasticSampler(range(6), shuffle=False)
    assert list(plain) == [rank, rank + 3]


def test_without_torchrun_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert agent_folder() is None
    for file in ("/dev/null", str(tmp_path / "a" / "attempt_0" / "0" / "error.json")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
        assert agent_folder() is None
    os.mkdir(tmp_path / "a")
    assert agent_folder() == tmp_path / "a"
