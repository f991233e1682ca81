"""Ray Train with as many workers as there are nodes for, which a failure does not end.

    python examples/trainers/train_ray_elastic.py --workers 1 4

A worker that dies ends its group. Ray starts another with the workers that it can have, at least
the first number; they go on from the last checkpoint: weights, optimizer, and what the codec still
owes to the gradients (residuals), also where the number of workers has changed. pycomm's metrics
are among Ray's (`ray_pycomm_...`). `RAY_ADDRESS` names a cluster; without it Ray starts one here.
"""

import argparse
import functools
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.util.metrics
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm


def save(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> Checkpoint:
    """Write this worker's part of a checkpoint, which Ray puts together with the others'."""
    rank = dist.get_rank()
    torch.save(pycomm.state_of(model).state_dict(), f"{folder}/residuals{rank}.pt")
    if rank == 0:
        whole = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(whole, f"{folder}/whole.pt")
    return Checkpoint.from_directory(folder)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, saved by any number of workers; return the step to go on with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        whole = torch.load(f"{folder}/whole.pt")
        parts = [torch.load(path) for path in sorted(Path(folder).glob("residuals*.pt"))]
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    pycomm.state_of(model).load_state_dict(*parts)
    return int(whole["step"])


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(net)  # Ray's prepare_model does not wrap it for one worker
    pycomm.compress(model, config["codec"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first = load(model, optimizer)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    owed = sum(worker for worker, _ in pycomm.state_of(model).residual_norms().values())
    note(
        config,
        rank,
        f"begin at step {first} on {ranks} workers, residuals {owed:.4g}, process {os.getpid()}",
    )

    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    for step in range(first, config["steps"]):
        data = torch.Generator().manual_seed(step * ranks + rank)
        labels = torch.randint(10, (32,), generator=data)
        points = centres[labels] + torch.randn(32, 64, generator=data)
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(config["pause"])
        if (step + 1) % config["every"] == 0:
            publish()
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = save(step + 1, model, optimizer, folder)
                ray.train.report({"step": step + 1, "loss": loss.item()}, checkpoint=checkpoint)
            note(config, rank, f"saved step {step + 1} on {ranks} workers, loss {loss.item():.4f}")
    note(config, rank, f"end at step {config['steps']} on {ranks} workers")


gauge = functools.cache(ray.util.metrics.Gauge)


def publish() -> None:
    """Set Ray's metrics to what the monitor has measured of the model."""
    for name, value in pycomm.monitor.snapshot()[0].numbers("pycomm_").items():
        gauge(name).set(value)


def note(config: dict[str, Any], rank: int, line: str) -> None:
    """Add a line to the report of the run, which all nodes of this machine share."""
    if rank == 0:
        with open(config["report"], "a") as report:
            report.write(f"{line}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2), metavar=("MIN", "MAX"))
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--look-every", type=float, default=60.0, help="seconds, for more nodes")
    parser.add_argument("--storage", type=Path, default=Path("runs").resolve())
    options = parser.parse_args()
    options.storage.mkdir(parents=True, exist_ok=True)
    # Each job has a secret of its own, by which its ranks know each other. Workers read it from a
    # file beside the checkpoints, which only this user can read: Ray's dashboard, its state API and
    # its logs show a job's environment to anybody who reaches them.
    descriptor, file = tempfile.mkstemp(prefix="secret-", dir=options.storage)
    with open(descriptor, "w") as secret:
        secret.write(secrets.token_urlsafe(32))
    environment = {"env_vars": {"PYCOMM_SECRET": f"file:{file}"}}
    here = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": options.workers[1]}
    try:
        ray.init(**here, runtime_env=environment)
        fit(options)
    finally:
        os.unlink(file)


def fit(options: argparse.Namespace) -> None:
    """Train on the cluster, until the last step or the last of the allowed failures."""
    trainer = TorchTrainer(
        train,
        train_loop_config={
            **{key: getattr(options, key) for key in ("codec", "steps", "every", "pause")},
            "report": str(options.storage / "report"),
        },
        torch_config=TorchConfig(backend="pycomm"),
        scaling_config=ScalingConfig(
            num_workers=tuple(options.workers),
            elastic_resize_monitor_interval_s=options.look_every,
        ),
        run_config=RunConfig(
            storage_path=str(options.storage), failure_config=FailureConfig(max_failures=5)
        ),
    )
    result = trainer.fit()
    print(f"ended with {result.metrics}")
    ray.shutdown()


if __name__ == "__main__":
    main()
