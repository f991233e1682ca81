"""Train locally and average every ten steps: torchrun --nproc-per-node 2 examples/local_sgd.py"""

import torch
import torch.distributed as dist
from torch import nn

import pycomm


def main() -> None:
    dist.init_process_group("pycomm")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)

    centres = torch.randn(10, 64)  # the same on all ranks; their batches differ
    torch.manual_seed(1 + dist.get_rank())
    local = pycomm.LocalSGD(model, every=10, codec="int4")
    for step in range(60):
        labels = torch.randint(10, (32,))
        points = centres[labels] + torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local.step()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    local.finish()

    if dist.get_rank() == 0:
        print(f"ranks met {local.rounds} times")
        print(local.state.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
