"""Lightning takes the backend by name:

torchrun --nproc-per-node 2 examples/trainers/train_lightning.py
"""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from pycomm.backend import find


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, labels = batch
        loss = nn.functional.cross_entropy(self.layers(x), labels)
        self.log("mean", loss, sync_dist=True)
        if self.trainer.is_global_zero:
            print(f"loss {loss.item()!r}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    backend = parser.parse_args().backend
    lightning.seed_everything(0)
    net = Net()
    points = torch.randn(96, 16)
    data = torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=8))
    if trainer.is_global_zero:
        group = find()
        print(f"loss at the end {trainer.callback_metrics['mean'].item()!r}")
        print("group", group.describe() if group else "not pycomm's")


if __name__ == "__main__":
    main()
