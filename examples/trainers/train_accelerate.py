"""Hugging Face Accelerate asks for "gloo" by name on CPUs, so pycomm takes over that name:

PYCOMM_TAKEOVER=gloo torchrun --nproc-per-node 2 examples/trainers/train_accelerate.py

With --momentum sign the momentum of AdamW travels, in one bit a value, in place of the gradients.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import pycomm
from pycomm.backend import find


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--momentum", default="", help="codec of AdamW's momentum: sign")
    codec = parser.parse_args().momentum
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    points = torch.randn(96, 16)
    data = torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    if codec:
        pycomm.code_optimizer(optimizer, model, codec)  # pycomm
    for x, labels in loader:
        loss = nn.functional.cross_entropy(model(x), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item()!r}")
    group = find()
    accelerator.print("group", group.describe() if group else "not pycomm's")
    accelerator.end_training()


if __name__ == "__main__":
    main()
