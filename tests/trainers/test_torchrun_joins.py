"""torchrun's own elasticity: a node joins, all ranks start again, and go on from a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.torch.interpreter import ROOT, free_port

LIMIT = 240  # seconds; a process takes a minute to start on a busy machine

SCRIPT = """
import hashlib, pathlib
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import pycomm

torch.set_num_threads(1)
dist.init_process_group("pycomm")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(250, 250), find_unused_parameters=True)
state = pycomm.compress(model, "int4")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
latest = pathlib.Path("latest")

def owed():
    state.settle()
    mine = state.residuals.added("weight", 0, 250 * 250)
    mine = torch.zeros(250 * 250) if mine is None else mine.clone()  # a new rank owes nothing
    dist.all_reduce(mine)
    return mine

if latest.exists():
    folder = latest.read_text()
    saved = {"model": model.module.state_dict(), "owed": torch.zeros(250 * 250)}
    dcp.load(saved, checkpoint_id=folder)
    model.module.load_state_dict(saved["model"])
    state.load_checkpoint(folder)
    torch.testing.assert_close(owed(), saved["owed"], rtol=1e-5, atol=1e-8)
    assert saved["owed"].abs().max() > 0
    print(f"rank {rank} of {ranks} goes on after step {state.step}", flush=True)
while True:
    torch.manual_seed(100 * state.step + rank)
    optimizer.zero_grad()
    model(torch.randn(8, 250)).square().mean().backward()
    optimizer.step()
    stop = torch.tensor(float(pathlib.Path("stop").exists()))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    folder = f"checkpoint{ranks}.{state.step}"
    saved = {"model": model.module.state_dict(), "owed": owed(), "pycomm": state.state_dict()}
    dcp.save(saved, checkpoint_id=folder)
    if rank == 0:
        pathlib.Path("new").write_text(folder)
        pathlib.Path("new").rename(latest)
    if stop:
        break
text = hashlib.sha256(model.module.weight.detach().numpy().tobytes()).hexdigest()
print(f"rank {rank} of {ranks} ends at step {state.step}: {text}", flush=True)
dist.destroy_process_group()
"""


def agent(folder: Path, port: int, ranks: int) -> subprocess.Popen[bytes]:
    """Start one of up to four agents of torchrun, each with ranks of its own, on train.py.

    They meet at a port, whenever they come. Their output goes to the file `output`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4"]
    command += ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "joins"]
    command += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=1"]
    command += ["--max-restarts", "5", "--monitor-interval", "0.2", "train.py"]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                # Else agents of one machine wait for each other after a change of members.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """End an agent, which ends its ranks."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


@pytest.mark.timeout(900)
def test_a_node_joins_and_all_go_on_with_what_they_owe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    latest, output = tmp_path / "latest", tmp_path / "output"
    output.touch()
    agents: list[subprocess.Popen[bytes]] = []

    def wait(ranks: int, least: int) -> int:
        """Wait until so many ranks train, and have taken so many steps; return how many."""
        until = time.monotonic() + LIMIT
        while True:
            text = latest.read_text() if latest.exists() else ""
            found = re.fullmatch(rf"checkpoint{ranks}\.(\d+)", text)
            if found and int(found[1]) >= least:
                return int(found[1])
            assert time.monotonic() < until, output.read_text()[-4000:]
            assert agents[0].poll() is None, output.read_text()[-4000:]
            time.sleep(0.05)

    port = free_port()
    try:
        agents.append(agent(tmp_path, port, 2))
        before = wait(2, 5)
        agents.append(agent(tmp_path, port, 1))
        wait(3, before + 5)
        (tmp_path / "stop").touch()
        for process in agents:
            assert process.wait(LIMIT) == 0, output.read_text()[-4000:]
    finally:
        for process in agents:
            end(process)
    text = output.read_text()
    went_on = re.findall(r"rank (\d) of 3 goes on after step (\d+)", text)
    assert sorted(rank for rank, _ in went_on) == ["0", "1", "2"], text
    assert len({step for _, step in went_on}) == 1
    ends = re.findall(r"rank (\d) of 3 ends at step (\d+): ([0-9a-f]{64})", text)
    assert sorted(rank for rank, *_ in ends) == ["0", "1", "2"], text
    assert len({(step, digest) for _, step, digest in ends}) == 1
