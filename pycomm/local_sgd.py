"""Ranks that train by themselves and meet now and then: local SGD with an outer optimizer (DiLoCo).

Every rank takes H optimizer steps on its own. Then what they have moved, start minus end, is
averaged over the ranks as an outer gradient, and an outer SGD with Nesterov momentum moves the
common start by it (Douillard et al. 2023, "DiLoCo", algorithm 1). With an outer learning rate of 1
and no momentum that is plain averaging of parameters (local SGD, Stich 2018). The outer gradient is
compressed, with feedback.

Delayed, the outer gradient of a round travels while the next round is computed, and is applied at
that round's end (Kale, Douillard, Donchev 2025, "Eager updates for overlapped communication and
computation in DiLoCo", the delayed outer gradient of section 3; Streaming DiLoCo, Douillard et al.
2025, overlaps in the same way within a round).
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from pycomm import backend
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.hooks.state import CompressionState
from pycomm.policy import Policy

logger = logging.getLogger("pycomm")

STATE_VERSION = 1


class LocalSGD:
    """Lets the ranks of a group train apart, and brings them together every so many steps.

    Collective: every rank makes one, with the same model and options, and from then on they start
    from the first rank's parameters. After an outer step all ranks have the same parameters, to the
    bit. Only parameters are averaged; buffers, such as a batch norm's statistics, and the inner
    optimizer's state stay each rank's own.

    Args:
        model: not wrapped in DistributedDataParallel over the same group, which would average every
            step. Over a group of nodes, with DDP or FSDP2 inside each of them, is what this is for:
            parameters in shards are averaged shard by shard.
        every: local steps in a round.
        codec: of outer gradients: a codec, its text ("int4"), or a `pycomm.Policy`.
        lr: outer learning rate.
        momentum: of the outer optimizer; 0 for none.
        nesterov: look ahead by the momentum, as DiLoCo does.
        delayed: apply an outer gradient one round later, and let it travel meanwhile. A smaller
            momentum suits it.
        optimizer: the inner one; needed only where this is used as a context manager, to count its
            steps.
        process_group: ranks that train apart; None: the default group.
        feedback: what becomes of what a payload loses; see `pycomm.compress`.
        seed: of random rounding; equal on all ranks.

    Raises:
        ValueError: an option that makes no sense.
        WireMismatch: ranks have different models or codecs.

    Example:
        >>> local = pycomm.LocalSGD(model, every=32, codec="int4")  # doctest: +SKIP
        >>> for batch in batches:  # doctest: +SKIP
        ...     loss(model, batch).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     local.step()
        >>> local.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        codec: str | Codec | Policy = "int8",
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        delayed: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        process_group: dist.ProcessGroup | None = None,
        feedback: bool | str | Feedback | None = True,
        seed: int = 0,
    ) -> None:
        if every < 1 or lr <= 0 or not 0 <= momentum < 1:
            raise ValueError(
                f"LocalSGD: every={every} must be at least 1, lr={lr} above 0 and "
                f"momentum={momentum} from 0 to below 1"
            )
        self.every, self.lr, self.momentum = every, lr, momentum
        self.nesterov, self.delayed = nesterov, delayed
        self.local_steps = 0
        """Optimizer steps in this round."""
        self.rounds = 0
        """Outer gradients that were applied, or dropped because they were not finite."""
        self.skipped = 0
        """Those that were dropped."""
        self._optimizer = optimizer
        self._hook: Any = None
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        locals_ = self._locals()
        if not locals_:
            raise ValueError("LocalSGD: the model has no parameters to train")
        group = process_group or dist.group.WORLD
        if delayed and group is not None and not (backend.find(group) and locals_[0].is_cpu):
            # A thread talks there while the caller trains, and may use its own groups as ever.
            group = dist.new_group(
                dist.get_process_group_ranks(group), use_local_synchronization=True
            )
            self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "pycomm-local-sgd")
        else:
            self._thread = None
        self.state = CompressionState(codec, process_group=group, feedback=feedback, seed=seed)
        """Codecs and feedback: `summary()`, `residual_norms()`."""
        for name, values in zip(self._parameters, locals_, strict=True):
            self.state.add(name, values)
        self.state.agree()
        self._start = torch.cat([values.detach().float().reshape(-1) for values in locals_])
        group = self.state.process_group
        dist.broadcast(self._start, dist.get_global_rank(group, 0), group=group)
        self._velocity = torch.zeros_like(self._start) if momentum else None
        self._under_way: Future[torch.Tensor] | torch.futures.Future[torch.Tensor] | None = None
        self._write(self._start)

    # ------------------------------------------------------------------ for users

    def step(self) -> bool:
        """Count one optimizer step; call it after each. Returns whether the ranks have met."""
        self.local_steps += 1
        if self.local_steps < self.every:
            return False
        self._end_round()
        return True

    def finish(self) -> None:
        """End the round now, with all that is under way; afterwards all ranks are equal."""
        if self.local_steps or self._under_way is not None:
            if self.local_steps:
                self._end_round()
            self._apply()
            self._write(self._start)

    def __enter__(self) -> LocalSGD:
        if self._optimizer is None:
            raise Error("LocalSGD as a context manager counts steps: pass optimizer=")
        self._hook = self._optimizer.register_step_post_hook(self._count)
        return self

    def _count(self, *_: object) -> None:
        self.step()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()
        if kind is None:
            self.finish()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside model and optimizer. Each rank saves its own."""
        pending = None
        if self._under_way is not None:
            pending = _wait(self._under_way)
            self._under_way = _done(pending)
        return {
            "version": STATE_VERSION,
            "start": self._start.clone(),
            "velocity": None if self._velocity is None else self._velocity.clone(),
            "pending": None if pending is None else pending.clone(),
            "local_steps": self.local_steps,
            "rounds": self.rounds,
            "skipped": self.skipped,
            "compression": self.state.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; the model is loaded by itself.

        Raises:
            ValueError: the state is of another version, model, momentum, rank or number of ranks.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"LocalSGD's state has version {state['version']}: not {STATE_VERSION}"
            )
        if state["start"].numel() != self._start.numel():
            raise ValueError(
                f"LocalSGD's state has {state['start'].numel()} values, the model "
                f"{self._start.numel()}: it belongs to another model"
            )
        if (state["velocity"] is None) != (self._velocity is None):
            raise ValueError("LocalSGD's state was saved with momentum or without, unlike this one")
        self.state.load_state_dict(state["compression"])
        self._start.copy_(state["start"])
        if self._velocity is not None:
            self._velocity.copy_(state["velocity"])
        pending = state["pending"]
        self._under_way = None if pending is None else _done(pending.clone())
        self.local_steps, self.rounds = state["local_steps"], state["rounds"]
        self.skipped = state["skipped"]

    # ------------------------------------------------------------------ rounds

    def _end_round(self) -> None:
        moved = self._start - torch.cat([v.float().reshape(-1) for v in self._locals()])
        if self.delayed:
            self._apply()
        self._send(moved)
        if not self.delayed:
            self._apply()
        self._write(self._start)
        self.local_steps = 0

    def _send(self, moved: torch.Tensor) -> None:
        def exchange() -> torch.Tensor:
            self.state.begin_step()
            future = self.state.reduce(moved, tuple(self._parameters))
            self.state.end_step()
            return future.wait()

        if self._thread is not None:
            self._under_way = self._thread.submit(exchange)
            return
        self.state.begin_step()
        self._under_way = self.state.reduce(moved, tuple(self._parameters))
        self.state.end_step()

    def _apply(self) -> None:
        """Move the start by the outer gradient that is under way, if there is one."""
        if self._under_way is None:
            return
        gradient, self._under_way = _wait(self._under_way), None
        self.rounds += 1
        if not gradient.isfinite().all():  # on all ranks alike
            self.skipped += 1
            logger.warning(
                "LocalSGD: round %d is not finite on some rank; all go back to its start",
                self.rounds,
            )
            return
        update = gradient
        if self._velocity is not None:
            self._velocity.mul_(self.momentum).add_(gradient)
            update = self._velocity
            if self.nesterov:
                update = gradient.add_(self._velocity, alpha=self.momentum)
        self._start.add_(update, alpha=-self.lr)

    @torch.no_grad()
    def _write(self, values: torch.Tensor) -> None:
        locals_ = self._locals()
        parts = torch.split(values, [p.numel() for p in locals_])
        for parameter, part in zip(locals_, parts, strict=True):
            parameter.copy_(part.view_as(parameter))

    def _locals(self) -> list[torch.Tensor]:
        """What this rank has of each parameter."""
        return [
            (p.to_local() if isinstance(p, DTensor) else p).detach()
            for p in self._parameters.values()
        ]


def _wait(under_way: Future[torch.Tensor] | torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    return under_way.result() if isinstance(under_way, Future) else under_way.wait()


def _done(values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(values)
    return future
