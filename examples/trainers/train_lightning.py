"""Lightning takes the backend by name:

torchrun --nproc-per-node 2 examples/trainers/train_lightning.py

With --momentum sign the momentum of AdamW travels, in one bit a value, in place of the gradients.
"""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import pycomm
from pycomm.backend import find


class Net(lightning.LightningModule):
    def __init__(self, codec: str) -> None:
        super().__init__()
        self.codec = codec
        self.layers = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, labels = batch
        loss = nn.functional.cross_entropy(self.layers(x), labels)
        self.log("mean", loss, sync_dist=True)
        if self.trainer.is_global_zero:
            print(f"loss {loss.item()!r}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.codec:  # the strategy has wrapped the module in DDP by now
            model = self.trainer.strategy.model
            optimizer = pycomm.code_optimizer(optimizer, model, self.codec)  # pycomm
        return optimizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    parser.add_argument("--momentum", default="", help="codec of AdamW's momentum: sign")
    args = parser.parse_args()
    lightning.seed_everything(0)
    net = Net(args.momentum)
    points = torch.randn(96, 16)
    data = torch.utils.data.TensorDataset(points, points[:, :4].argmax(1))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=args.backend),
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
