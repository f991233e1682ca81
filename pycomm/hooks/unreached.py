"""Warnings about gradients that no hook compresses, under `pycomm.run --codec` or `--optimizer`.

Without them only its speed would show that a script's gradients are not compressed. A warning names
the reason and the line to write.
"""

from __future__ import annotations

from functools import cache
from itertools import count

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from pycomm import monitor
from pycomm.log import logger

_STEPS = 3  # optimizer steps, after which a script with several ranks has wrapped its model

NOTHING = (
    "no model of this script is in DistributedDataParallel, fully_shard, or an engine of DeepSpeed "
    "or Megatron whose reductions pycomm replaces: gradients that FullyShardedDataParallel (FSDP1) "
    "or the script's own dist.all_reduce averages travel exactly. Write "
    "model = DistributedDataParallel(model) in place of its all-reduces or of "
    "deepspeed.initialize, fully_shard(model) in place of FSDP1, or "
    "pycomm.LocalSGD(model, every=...) to average parameters now and then. docs/trainers.md has "
    "the line for Accelerate, Lightning and HF Trainer"
)

_told: set[str] = set()
_option = "--codec"


def watch(option: str) -> None:
    """Warn on the first rank, once for each reason, about gradients that are not compressed.

    Args:
        option: the one of `pycomm.run` that was to compress them.
    """
    global _option
    _option = option
    _watch_steps()


@cache
def _watch_steps() -> None:
    numbers = count(1)

    def stepped(*_: object) -> None:
        if next(numbers) != _STEPS or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if not _told and not monitor.snapshot():
            tell(NOTHING)

    register_optimizer_step_post_hook(stepped)


def tell(reason: str) -> None:
    """Warn on the first rank, once for each reason, that gradients are not compressed."""
    if reason not in _told and dist.get_rank() == 0:
        logger.warning("run: %s compresses nothing here: %s", _option, reason)
    _told.add(reason)
