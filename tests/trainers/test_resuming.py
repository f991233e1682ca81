"""Ranks that train by a trainer with coded momentum, and once more from a checkpoint of the middle.

    torchrun --nproc-per-node 2 -m tests.trainers.test_resuming TRAINER DIR

TRAINER is accelerate, transformers or lightning. The momentum is coded by the line that
docs/trainers.md has, with residuals in the checkpoints. Runs have the trainer's scheduler, clip
gradients and accumulate them; an exact one comes first. Rank 0 prints a line of JSON: of each run
the losses, rates, optimizer and last weights. At the end, a node joins under torchrun.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import pycomm
from tests.torch.interpreter import ROOT, free_port

STEPS, MIDDLE = 8, 4
ACCUMULATED, CLIP, RATE = 2, 0.5, 0.01
SAMPLES = 2 * 8 * ACCUMULATED * MIDDLE
"""An epoch is half of the steps: Lightning goes on at the start of one."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    points = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return [(x, x[:4].argmax()) for x in points]


class Residuals:
    """What this rank keeps of coded momentum, beside a trainer's checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, optimizer: Any) -> None:
        torch.save(optimizer.compression.state_dict(), self.folder / f"{dist.get_rank()}.pt")

    def load(self, optimizer: Any) -> None:
        dist.barrier()
        parts = (self.folder / f"{rank}.pt" for rank in range(dist.get_world_size()))
        optimizer.compression.load_state_dict(*(torch.load(p, weights_only=False) for p in parts))


Run = tuple[nn.Module, Any, list[float], list[float]]
"""Model, optimizer, losses of this rank's batches, rates."""


def accelerate(folder: Path, coded: bool, resumes: bool) -> Run:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    net, residuals = Net(), Residuals(folder)
    inner = torch.optim.AdamW(net.parameters(), RATE)
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    scheduler = CosineAnnealingLR(inner, 2 * STEPS)  # its wrapper steps once for each rank
    model, optimizer, loader, scheduler = accelerator.prepare(net, inner, loader, scheduler)
    if coded:
        pycomm.code_optimizer(optimizer, model, "sign")
    if resumes:
        accelerator.load_state(str(folder / "state"))
        if coded:
            residuals.load(optimizer.optimizer)
    losses, rates = [], []
    for epoch in range(int(resumes), 2):
        if epoch == 1 and not resumes:
            accelerator.save_state(str(folder / "state"))
            if coded:
                residuals.save(optimizer.optimizer)
        for x, labels in loader:
            with accelerator.accumulate(model):
                rates.append(optimizer.param_groups[0]["lr"])
                loss = model(x, labels)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return net, optimizer.optimizer, losses, rates


def transformers(folder: Path, coded: bool, resumes: bool) -> Run:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    residuals = Residuals(folder)

    class CodedMomentum(TrainerCallback):
        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            pycomm.code_optimizer(optimizer, trainer.model_wrapped, "sign")
            if resumes:
                residuals.load(optimizer.optimizer)

        def on_save(self, _: Any, state: Any, *__: Any, optimizer: Any, **___: Any) -> None:
            if state.global_step == MIDDLE:
                residuals.save(optimizer.optimizer)

    net = Net()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=ACCUMULATED,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        max_grad_norm=CLIP,
        logging_steps=1,
        save_steps=MIDDLE,
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"x": x, "labels": labels} for x, labels in samples()]
    trainer = Trainer(model=net, args=arguments, train_dataset=data)
    if coded:
        trainer.add_callback(CodedMomentum())
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{MIDDLE}") if resumes else None)
    logged = [one for one in trainer.state.log_history if "loss" in one]
    logged = logged[MIDDLE:] if resumes else logged
    optimizer = trainer.optimizer.optimizer
    return net, optimizer, [one["loss"] for one in logged], [one["learning_rate"] for one in logged]


def lightning(folder: Path, coded: bool, resumes: bool) -> Run:
    import lightning as li
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    losses, rates, residuals = [], [], Residuals(folder)

    class Module(li.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.net(*batch)["loss"]
            losses.append(loss.item())
            rates.append(self.optimizers().param_groups[0]["lr"])
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), RATE)
            if coded:
                optimizer = pycomm.code_optimizer(optimizer, self.trainer.strategy.model, "sign")
            scheduler = {"scheduler": CosineAnnealingLR(optimizer, STEPS), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def on_train_start(self) -> None:
            if coded and resumes:
                residuals.load(self.trainer.optimizers[0])

        def on_save_checkpoint(self, _: Any) -> None:  # on every rank
            if coded and self.trainer.global_step == MIDDLE:
                residuals.save(self.trainer.optimizers[0])

    keeps = ModelCheckpoint(folder, "{epoch}", every_n_epochs=1, save_top_k=-1)
    trainer = li.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="pycomm"),
        max_epochs=2,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=CLIP,
        callbacks=[keeps],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    path = folder / "epoch=0.ckpt" if resumes else None
    trainer.fit(module, loader, ckpt_path=path, weights_only=False)
    return module.net, trainer.optimizers[0], losses, rates


TRAINERS: dict[str, Callable[[Path, bool, bool], Run]] = {
    one.__name__: one for one in (accelerate, transformers, lightning)
}


def main(trainer: str, folder: str) -> None:
    found = {}
    for kind, resumes in (("exact", False), ("whole", False), ("resumed", True)):
        room = Path(folder) / ("exact" if kind == "exact" else "coded")
        room.mkdir(exist_ok=True)
        net, optimizer, losses, rates = TRAINERS[trainer](room, kind != "exact", resumes)
        weights = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
        found[kind] = {"losses": losses, "rates": rates, "weights": weights}
        found[kind]["optimizer"] = type(optimizer).__name__
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------- tests
# Coded momentum under trainers with schedulers, clipping, accumulation, and from checkpoints.


def train(trainer: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what rank 0 prints."""
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed: make trainers")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *ranks, "-m", __name__, trainer, str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYCOMM_TAKEOVER": "gloo",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("policy: sign") == 2  # both runs
    (found,) = (line for line in done.stdout.splitlines() if line.startswith('{"'))
    runs = json.loads(found)
    for kind in ("whole", "resumed"):
        assert runs[kind]["optimizer"] == "CodedAdamW"
    return runs


def half(numbers: list[float]) -> list[float]:
    return numbers[len(numbers) // 2 :]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_line_of_code_resumes_to_the_bit(trainer, tmp_path):
    runs = train(trainer, tmp_path)
    exact, whole, resumed = (runs[kind] for kind in ("exact", "whole", "resumed"))
    assert exact["optimizer"] == "AdamW"
    assert whole["rates"] == exact["rates"]
    assert whole["losses"] != exact["losses"]
    assert whole["losses"] == pytest.approx(exact["losses"], rel=0.15)
    for name in ("rates", "losses"):
        assert resumed[name] == half(whole[name])
    assert resumed["weights"] == whole["weights"]


# -------------------------------------------------------------------------------------- torchrun
# torchrun's own elasticity: a node joins or is lost, and all ranks start again.

LIMIT = 240  # seconds; a process takes a minute to start on a busy machine


def agent(
    folder: Path, port: int, ranks: int, *script: str, nodes: str = "1:4", **variables: str
) -> subprocess.Popen[bytes]:
    """Start one of the agents of torchrun, each with ranks of its own, on a script.

    They meet at a port, whenever they come. Their output goes to the file `output`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
    command += ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", "joins"]
    command += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=1"]
    command += ["--max-restarts", "5", "--monitor-interval", "0.2"]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            [*command, *script],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                **variables,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )


Agents = list[subprocess.Popen[bytes]]


@pytest.fixture
def agents() -> Iterator[Agents]:
    """A list for those that a test starts."""
    started: Agents = []
    yield started
    for process in started:
        process.terminate()  # it ends its ranks
    for process in started:
        process.wait(60)


def wait(agents: Agents, output: Path, found: Callable[[], Any]) -> Any:
    """Return what is found at last, while all agents run."""
    until = time.monotonic() + LIMIT
    while not (result := found()):
        assert time.monotonic() < until, output.read_text()[-4000:]
        assert all(one.poll() is None for one in agents), output.read_text()[-4000:]
        time.sleep(0.05)
    return result


@pytest.mark.timeout(900)
def test_a_node_joins_and_all_go_on_from_the_checkpoint(tmp_path: Path, agents: Agents) -> None:
    latest, output = tmp_path / "latest", tmp_path / "output"
    script = [str(ROOT / "examples/resume.py"), "--checkpoints", str(tmp_path)]
    script += ["--steps", "100000", "--pause", "0.02"]
    # Else agents of one machine wait for each other after a change of members.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def saved(after: int) -> int:
        """Return the latest step that was saved, if it is after this one."""
        step = int(latest.read_text()) if latest.exists() else 0
        return step * (step > after)

    port = free_port()
    agents.append(agent(tmp_path, port, 2, *script, **variables))
    before = wait(agents, output, lambda: saved(0))
    agents.append(agent(tmp_path, port, 1, *script, **variables))
    begins = re.compile(r"begin at step (\d+) on 3 ranks")
    begun = wait(agents, output, lambda: begins.search(output.read_text()))
    assert int(begun[1]) >= before
    wait(agents, output, lambda: saved(int(begun[1])))


MEETS = """
import os, time
import numpy as np
from pycomm import Communicator, Error
try:
    with Communicator.from_env(timeout=150) as group:
        print(f"rank {os.getpid()} of agent {os.getppid()} has met {group.size}", flush=True)
        while True:
            group.all_reduce(np.ones(9, np.float32))
            time.sleep(0.02)
except Error as error:
    print(f"rank {os.getpid()} has lost the other: {error}", flush=True)
    time.sleep(600)  # its agent ends it
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", ["rank", "node"])
def test_communicators_meet_again(tmp_path: Path, agents: Agents, lost: str) -> None:
    """Each agent counts the restarts by itself, those alone that follow from its own ranks."""
    script, output, port = tmp_path / "meets.py", tmp_path / "output", free_port()
    script.write_text(MEETS)
    # Only so do agents of one machine get another node.
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(lost == "node"))}

    def start() -> None:
        agents.append(agent(tmp_path, port, 1, str(script), nodes="2", **variables))

    def met(ranks: int) -> list[tuple[str, str]]:
        pattern = r"^rank (\d+) of agent (\d+) has met 2$"
        found = re.findall(pattern, output.read_text(), re.MULTILINE)
        return found if len(found) == ranks else []

    start()
    wait(agents, output, lambda: is_listening(port))  # the first one lends the store
    start()
    pairs = wait(agents, output, lambda: met(2))
    gone = agents.pop() if lost == "node" else agents[1]
    (rank,) = (int(rank) for rank, of in pairs if int(of) == gone.pid)
    for process in [gone.pid] * (lost == "node") + [rank]:
        os.kill(process, signal.SIGKILL)
    if lost == "node":
        gone.wait(60)
        start()
    wait(agents, output, lambda: met(4))


def is_listening(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
