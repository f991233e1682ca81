"""Shards, coded gradients and weights in bf16: torchrun --nproc-per-node 2 examples/fsdp2.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import pycomm


def main() -> None:
    dist.init_process_group("pycomm")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 10))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=half)
    fully_shard(model, mp_policy=half)
    state = pycomm.compress(model, codec="int4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    centres = torch.randn(10, 64)  # the same on all ranks; their batches differ
    torch.manual_seed(1 + dist.get_rank())
    for step in range(50):
        labels = torch.randint(10, (32,))
        points = centres[labels] + torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")

    if dist.get_rank() == 0:
        print(state.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
