"""Hugging Face Trainer knows a fixed list of backends, so pycomm takes over the name of one:

PYCOMM_TAKEOVER=gloo torchrun --nproc-per-node 2 examples/trainers/train_transformers.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

from pycomm.backend import find


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
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
            learning_rate=0.1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=net, args=arguments, train_dataset=data)
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
