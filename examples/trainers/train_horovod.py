"""A script for Horovod, in the shape of its MNIST example, whose import has changed:

torchrun --nproc-per-node 2 examples/trainers/train_horovod.py --codec int4

The digits are those of scikit-learn (8 x 8 pixels), which need no download.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import pycomm.horovod as hvd  # in place of: import horovod.torch as hvd
from pycomm.backend import find


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, kernel_size=3)
        self.fc1 = nn.Linear(8 * 3 * 3, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--codec", default="", help="codec of pycomm for the gradients")
    parser.add_argument("--backend", default="pycomm", help="of torch.distributed")
    args = parser.parse_args()

    if args.backend != "pycomm":
        dist.init_process_group(args.backend)
    hvd.init()
    torch.manual_seed(hvd.rank())  # broadcast_parameters makes the models equal

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
    train = torch.utils.data.Subset(data, range(1500))
    test = torch.utils.data.Subset(data, range(1500, len(data)))
    sampler = torch.utils.data.distributed.DistributedSampler(
        train, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    if args.codec:
        compression = hvd.Compression.codec(args.codec)  # the one new line
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
    )

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for batch, (x, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), labels)
            loss.backward()
            optimizer.step()
            if batch % 10 == 0 and hvd.rank() == 0:
                print(f"loss {loss.item()!r}")

    model.eval()
    images, labels = (torch.stack(list(part)) for part in zip(*test, strict=True))
    right = (model(images).argmax(1) == labels).float().mean().item()
    right = metric_average(right, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"accuracy {right}")
        group = find()
        print("group", group.describe() if group else "not pycomm's")
    hvd.shutdown()


if __name__ == "__main__":
    main()
