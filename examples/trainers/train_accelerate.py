"""Hugging Face Accelerate asks for "gloo" by name on CPUs, so pycomm takes over that name:

PYCOMM_TAKEOVER=gloo torchrun --nproc-per-node 2 examples/trainers/train_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn

from pycomm.backend import find


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    points = torch.randn(96, 16)
    data = torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), loader
    )
    for x, labels in loader:
        loss = nn.functional.cross_entropy(model(x), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item()!r}")
    group = find()
    accelerator.print("group", group.describe() if group else "not pycomm's")
    accelerator.end_training()


if __name__ == "__main__":
    main()
