"""Hugging Face Trainer knows a fixed list of backends, so pycomm takes over the name of one:

PYCOMM_TAKEOVER=gloo torchrun --nproc-per-node 2 examples/trainers/train_transformers.py

With --momentum sign the momentum of AdamW travels, in one bit a value, in place of the gradients.
"""

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import pycomm
from pycomm.backend import find


class CodedMomentum(TrainerCallback):
    """Lets the trainer's optimizer exchange coded momentum."""

    def __init__(self, trainer: Trainer, codec: str) -> None:
        self.trainer, self.codec = trainer, codec

    def on_train_begin(self, *_: Any, optimizer: torch.optim.Optimizer, **__: Any) -> None:
        pycomm.code_optimizer(optimizer, self.trainer.model_wrapped, self.codec)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--momentum", default="", help="codec of AdamW's momentum: sign")
    codec = parser.parse_args().momentum
    torch.manual_seed(0)
    net = Net()
    points = torch.randn(96, 16)
    data = [{"x": x, "labels": x[:4].argmax()} for x in points]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=8,
            max_steps=6,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=net, args=arguments, train_dataset=data)
        if codec:
            trainer.add_callback(CodedMomentum(trainer, codec))  # pycomm
        trainer.train()
    if dist.get_rank() == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print("loss", entry["loss"])
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
        print(f"loss ends with weights of norm {weights.double().norm().item()!r}")
        group = find()
        print("group", group.describe() if group else "not pycomm's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
