"""torchtitan's trainer on CPUs, by its own configuration:

PYCOMM_RUN="--codec int4" torchrun --nproc-per-node 2 examples/trainers/train_torchtitan.py

On GPUs nothing of this file is needed:

torchrun --nproc-per-node 8 -m pycomm.run --codec int4 -m torchtitan.train --module ... --config ...

torchtitan chooses CUDA where it finds no accelerator, and asks the device about its memory:
`stand_in_for_cuda` lets it choose the CPU, and answers. The text and the tokenizer, which it would
download, are made here. All else is torchtitan's.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist


def stand_in_for_cuda() -> None:
    """Let torchtitan choose the CPU; before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda _: "CPU"
    torch.cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 40)
    torch.cpu.memory_stats = lambda _: {}
    torch.cpu.current_device = lambda: 0
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None


if not torch.cuda.is_available():
    stand_in_for_cuda()
if not hasattr(dist, "set_timeout"):  # which torch 2.13 has under this name
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.train import main  # noqa: E402

from pycomm.backend import find  # noqa: E402

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def write_assets(folder: Path) -> None:
    """Write a tokenizer of ten words, and texts that count."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: n for n, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    texts = [" ".join(WORDS[(start + n) % 10] for n in range(200)) for start in range(200)]
    (folder / "c4_test").mkdir(exist_ok=True)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "c4_test/data.jsonl").write_text(lines)


def tiny():
    """The configuration: torchtitan's debug model, with fewer and shorter texts."""
    config = llama3_debugmodel()
    config.hf_assets_path = "tests/assets"
    config.training.local_batch_size = 2
    config.training.seq_len = 64
    config.training.steps = 6
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.debug.seed = 0
    config.checkpoint.enable = False
    # In chunks the loss calls the last layer's backward alone: its unit would travel exactly.
    config.loss = config.loss.loss_fn
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a torch after 2.13
    # Flex attention has no backward on CPUs.
    layers = list(config.model_spec.model.traverse(FlexAttention.Config))
    for _, _, parent, name in layers:
        setattr(parent, name, ScaledDotProductAttention.Config())
    return config


def print_losses() -> None:
    """Print each loss with all its digits, and at the end whose group moved the gradients."""
    log, close = MetricsProcessor.log, MetricsProcessor.close

    def log_too(self, step, global_avg_loss, *args, **kwargs):
        if dist.get_rank() == 0:
            print(f"loss {float(global_avg_loss)!r}")
        return log(self, step, global_avg_loss, *args, **kwargs)

    def close_too(self):
        if dist.get_rank() == 0:
            group = find()
            print("group", group.describe() if group else "not pycomm's")
        close(self)

    MetricsProcessor.log, MetricsProcessor.close = log_too, close_too


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.parse_args()
    folder = Path("assets" + os.environ["RANK"]).resolve()
    write_assets(folder / "tests/assets")
    os.chdir(folder)
    print_losses()
    sys.modules["train_torchtitan"] = sys.modules["__main__"]
    sys.argv[1:] = ["--module", "train_torchtitan", "--config", "tiny"]
    main()
