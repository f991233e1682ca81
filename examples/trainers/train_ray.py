"""Ray Train takes the backend as a word, and starts the ranks itself:

python examples/trainers/train_ray.py
"""

import argparse

import ray
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn


def train() -> None:
    import torch.distributed as dist

    from pycomm.backend import find

    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(6):
        points = torch.randn(8, 16)
        loss = nn.functional.cross_entropy(model(points), points[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item()!r}", flush=True)
    if dist.get_rank() == 0:
        group = find()
        print("group", group.describe() if group else "not pycomm's", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    backend = parser.parse_args().backend
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        train,
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
