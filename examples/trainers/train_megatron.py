"""Megatron-Core on CPUs: its GPT, DistributedDataParallel and optimizer, compressed by pycomm:

torchrun --nproc-per-node 2 examples/trainers/train_megatron.py --distributed-optimizer --codec int4

Megatron-Core is written for CUDA, and calls it by name. `CudaIsCpu` and `stand_in_for_cuda` answer
for those calls; on a GPU leave both out. All else is Megatron's own.
"""

import argparse
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

import pycomm
from pycomm.backend import find

VOCABULARY, LENGTH = 128, 16


class CudaIsCpu(TorchFunctionMode):
    """Makes tensors for "cuda" on the CPU, whose types have CUDA's names."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return found.replace("torch.", "torch.cuda.")
        return found


def stand_in_for_cuda():
    """Answer for the functions of torch.cuda that Megatron-Core calls."""
    state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda: None,
        "get_rng_state": lambda *_: state,
        "manual_seed": lambda _: None,
    }
    for name, answer in answers.items():
        mock.patch.object(torch.cuda, name, answer).start()
    tensor_parallel.random._get_cuda_rng_state = lambda *_, **__: state
    tensor_parallel.random._set_cuda_rng_state = lambda *_, **__: None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--overlap", action="store_true", help="reduce while backward runs")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches for each step")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--codec", default="", help="codec of pycomm for the gradients")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    if not torch.cuda.is_available():
        stand_in_for_cuda()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    net = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=args.distributed_optimizer,
            overlap_grad_reduce=args.overlap,
            grad_reduce_in_fp32=args.bf16,
            bucket_size=20_000,
        ),
        net.bfloat16() if args.bf16 else net,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.005,
            bf16=args.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.distributed_optimizer,
            clip_grad=1.0,
        ),
        [model],
    )
    if args.codec:
        state = pycomm.compress(model, args.codec)  # the one new line

    torch.manual_seed(1 + dist.get_rank())
    positions = torch.arange(LENGTH).expand(8, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for _ in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for micro in range(args.accumulate):
            start = torch.randint(VOCABULARY, (8, 1))
            tokens = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
            last = micro == args.accumulate - 1
            with nullcontext() if last else model.no_sync():
                losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
                loss = losses.float().mean() / args.accumulate
                loss.backward()
            total += loss.item()
        finalize_model_grads([model])
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss {total!r}")
    if dist.get_rank() == 0:
        if args.codec:
            print(state.summary())
        group = find()
        print("group", group.describe() if group else "not pycomm's")
    dist.destroy_process_group()


if __name__ == "__main__":
    with nullcontext() if torch.cuda.is_available() else CudaIsCpu():
        main()
