"""DeepSpeed takes the backend by name, and pycomm compresses its engine:

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/trainers/train_deepspeed.py --codec int4
"""

import argparse
import gc
import json

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.backend import find


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO: 0 to 3; with --codec 1 or 2")
    parser.add_argument(
        "--zero", type=json.loads, default={}, help="other options of ZeRO, as JSON"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches for each step")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument(
        "--optimizer", default="", help="one of DeepSpeed's own, such as OneBitAdam"
    )
    parser.add_argument("--codec", default="", help="codec of pycomm for the gradients")
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": args.accumulate,
        # Parameters of this model are so small that ZeRO 3 would not shard them by default.
        "zero_optimization": {
            "stage": args.stage,
            "stage3_param_persistence_threshold": 0,
            **args.zero,
        },
        "zero_allow_untested_optimizer": True,
        args.dtype: {"enabled": True},
    }
    if args.optimizer:
        config["optimizer"] = {"type": args.optimizer, "params": {"lr": 0.01}}
    deepspeed.init_distributed(dist_backend=args.backend)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = None if args.optimizer else torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    if args.codec:
        state = pycomm.compress(engine, args.codec)
    torch.manual_seed(1 + dist.get_rank())
    dtype = next(net.parameters()).dtype
    for _ in range(args.steps * args.accumulate):
        points = torch.randn(8, 16)
        loss = nn.functional.cross_entropy(
            engine(points.to(dtype)).float(), points[:, :4].argmax(1)
        )
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item()!r}")
    if dist.get_rank() == 0:
        if args.codec:
            print(state.summary())
        group = find()
        print("group", group.describe() if group else "not pycomm's")
    # Gloo's threads must not outlive the interpreter, and the engine is in cycles that hold them.
    del engine, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
