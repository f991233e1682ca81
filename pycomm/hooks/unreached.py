"""Warnings about gradients that no hook compresses, under `pycomm.run --codec` or `--optimizer`.

Without them only its speed would show that a script's gradients are not compressed. A warning names
the reason and the line to write.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pycomm import monitor
from pycomm.hooks import deepspeed
from pycomm.log import logger

_STEPS = 3  # optimizer steps, after which a script with several ranks has wrapped its model

TRAINERS = ". docs/trainers.md has the line for Accelerate, Lightning and HF Trainer"
FSDP1 = (
    "FullyShardedDataParallel (FSDP1) reduces the gradients itself, in flat parameters that no "
    "codec sees: they travel exactly. Shard with FSDP2 instead: from torch.distributed.fsdp import "
    "fully_shard; fully_shard(model)" + TRAINERS
)
DEEPSPEED = (
    "DeepSpeed has taken steps without the reductions that pycomm replaces in its engine: "
    "gradients travel exactly. Instead of deepspeed.initialize write "
    "model = DistributedDataParallel(model), or fully_shard(model) for sharded parameters"
    + TRAINERS
)
OWN = (
    "no model of this script is in DistributedDataParallel or fully_shard so far: gradients that "
    "it averages itself, with dist.all_reduce, travel exactly. Write "
    "model = DistributedDataParallel(model) in place of its all-reduces, or "
    "pycomm.LocalSGD(model, every=...) to average parameters now and then"
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
    _watch()


@cache
def _watch() -> None:
    _GroupWatch()


def tell(reason: str) -> None:
    """Warn on the first rank, once for each reason, that gradients are not compressed."""
    if reason not in _told and dist.get_rank() == 0:
        logger.warning("run: %s compresses nothing here: %s", _option, reason)
    _told.add(reason)


class _GroupWatch:
    def __init__(self) -> None:
        self._steps = 0
        construct = FullyShardedDataParallel.__init__

        @functools.wraps(construct)
        def __init__(wrapped: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
            construct(wrapped, *args, **kwargs)
            if wrapped.process_group is not None and wrapped.process_group.size() > 1:
                tell(FSDP1)

        FullyShardedDataParallel.__init__ = __init__  # type: ignore[assignment,method-assign]
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: object) -> None:
        if self._steps == _STEPS:
            return
        self._steps += 1
        if self._steps < _STEPS or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if "deepspeed" in set(_callers()):  # a part of the script, beside models in DDP
            if not deepspeed.reducing() and not _told:
                tell(DEEPSPEED)
        elif not _told and not monitor.snapshot():
            tell(OWN)


def _callers() -> Iterator[str]:
    """Yield the top-level package of each function that has led here, from the inside out."""
    frame = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back  # type: ignore[assignment]
