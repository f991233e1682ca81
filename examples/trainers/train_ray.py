"""Ray Train takes the backend by name and starts the ranks itself:

python examples/trainers/train_ray.py
"""

import argparse
import os
import secrets
import tempfile
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn


def train(config: dict[str, str]) -> None:
    import torch.distributed as dist

    from pycomm.backend import find

    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(6):
        points = torch.randn(8, 16)
        loss = nn.functional.cross_entropy(model(points), points[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        group = find()
        said = group.describe() if group else "not pycomm's"
        lines = [*(f"loss {loss!r}" for loss in losses), f"group {said}"]
        Path(config["report"]).write_text("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    backend = parser.parse_args().backend
    with tempfile.TemporaryDirectory() as folder:
        # Each job has a secret of its own, by which its ranks know each other. Workers read it from
        # a file: Ray's dashboard, its state API and its logs show a job's environment to anybody.
        file = Path(folder, "secret")
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as secret:
            secret.write(secrets.token_urlsafe(32))
        environment = {"env_vars": {"PYCOMM_SECRET": f"file:{file}"}}
        ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment)
        trainer = TorchTrainer(
            train,
            train_loop_config={"report": f"{folder}/report"},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
        print(Path(folder, "report").read_text())  # of rank 0, which ran on this machine
        ray.shutdown()


if __name__ == "__main__":
    main()
