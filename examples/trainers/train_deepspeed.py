"""DeepSpeed with ZeRO stage 2 takes the backend by name:

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/trainers/train_deepspeed.py
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from pycomm.backend import find

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    parser.add_argument("--local_rank", type=int, default=0)
    deepspeed.init_distributed(dist_backend=parser.parse_args().backend)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters(), lr=0.01), config=CONFIG
    )
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(6):
        points = torch.randn(8, 16)
        loss = nn.functional.cross_entropy(engine(points), points[:, :4].argmax(1))
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item()!r}")
    if dist.get_rank() == 0:
        group = find()
        print("group", group.describe() if group else "not pycomm's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
