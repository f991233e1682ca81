"""Warnings about gradients that no hook compresses, under `pycomm.run --codec`.

Without them only its speed would show that a script's gradients are not compressed.
"""

from __future__ import annotations

import functools
import logging
import sys
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pycomm import monitor

logger = logging.getLogger("pycomm")

_STEPS = 3  # optimizer steps, after which a script with several ranks has wrapped its model

FSDP1 = (
    "FullyShardedDataParallel (FSDP1) reduces the gradients itself, in flat parameters that no "
    "codec sees: they travel exactly. Shard with FSDP2 instead: "
    "from torch.distributed.fsdp import fully_shard; fully_shard(model)"
)
DEEPSPEED = (
    "DeepSpeed reduces the gradients itself, without communication hooks: they travel exactly. "
    "Instead of deepspeed.initialize write model = DistributedDataParallel(model), or "
    "fully_shard(model) for sharded parameters"
)
OWN = (
    "no model of this script is in DistributedDataParallel or fully_shard so far: gradients that "
    "it averages itself, with dist.all_reduce, travel exactly. Write "
    "model = DistributedDataParallel(model) in place of its all-reduces, or "
    "pycomm.LocalSGD(model, every=...) to average parameters now and then"
)


@cache
def watch() -> None:
    """Warn on the first rank, once for each reason, about gradients that are not compressed."""
    _Watch()


class _Watch:
    def __init__(self) -> None:
        self._told: set[str] = set()
        self._steps = 0
        construct = FullyShardedDataParallel.__init__

        @functools.wraps(construct)
        def __init__(wrapped: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> None:
            construct(wrapped, *args, **kwargs)
            if wrapped.process_group is not None and wrapped.process_group.size() > 1:
                self._tell(FSDP1)

        FullyShardedDataParallel.__init__ = __init__  # type: ignore[assignment,method-assign]
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: object) -> None:
        if self._steps == _STEPS:
            return
        self._steps += 1
        if self._steps < _STEPS:
            return
        several = dist.is_initialized() and dist.get_world_size() > 1
        if several and not self._told and not monitor.snapshot():
            self._tell(DEEPSPEED if "deepspeed" in sys.modules else OWN)

    def _tell(self, text: str) -> None:
        if text not in self._told and dist.get_rank() == 0:
            logger.warning("run: --codec compresses nothing here: %s", text)
        self._told.add(text)
