"""Local SGD with an outer optimizer (DiLoCo): ranks train alone and synchronize every H steps.

Every rank takes H optimizer steps on its own. Then the ranks' movements, start minus end, are
averaged as an outer gradient, and an outer SGD with Nesterov momentum moves the common start by it
(Douillard et al. 2023, "DiLoCo", algorithm 1). With an outer learning rate of 1 and no momentum
that is plain averaging of parameters (local SGD, Stich 2018). The outer gradient is compressed,
with feedback.

With `delayed`, the outer gradient of a round travels while the next round is computed, and is
applied at that round's end (Kale, Douillard, Donchev 2025, "Eager updates for overlapped
communication and computation in DiLoCo", the delayed outer gradient of section 3; Streaming DiLoCo,
Douillard et al. 2025, overlaps in the same way within a round).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pycomm import backend
from pycomm.arguments import number, typed, whole
from pycomm.codecs import Codec
from pycomm.errors import Error
from pycomm.feedback import Feedback
from pycomm.policy import Policy
from pycomm.policy.names import clean
from pycomm.reduction.outer import OuterParameters, Values, broadcast, reals
from pycomm.reduction.state import CompressionState

logger = logging.getLogger("pycomm")

STATE_VERSION = 2


class LocalSGD:
    """Rounds of local training on the ranks of a group, with an outer step after each.

    Collective: every rank makes one, with the same model and options, and all start from the first
    rank's parameters and buffers. After an outer step all ranks have the same parameters, to the
    bit. Only trained parameters are averaged; each rank keeps its own buffers, such as a batch
    norm's statistics, and its own state of the inner optimizer.

    A parameter that is unfrozen, added or replaced during a round is averaged exactly when that
    round ends, and takes part like the others from then on; a parameter that is frozen or removed
    takes part for the last time. Such a round is not delayed. All ranks must make such a change in
    the same round.

    Args:
        model: a model whose wrapper, if any, does not reduce over the same ranks:
            DistributedDataParallel and FSDP2 would synchronize them in every step. The intended use
            is a group of nodes with DDP or FSDP2 inside each node: sharded parameters are averaged
            shard by shard.
        every: local steps in a round.
        codec: codec of the outer gradients, its text ("int4"), or a `pycomm.Policy`.
        lr: outer learning rate.
        momentum: momentum of the outer optimizer; 0 for none.
        nesterov: look ahead by the momentum, as DiLoCo does.
        delayed: apply an outer gradient one round later, so that it travels meanwhile. A smaller
            momentum suits it.
        optimizer: the inner optimizer; needed only if this is used as a context manager, which
            counts the optimizer's steps.
        process_group: the ranks that train apart; None: the default group.
        feedback: error feedback; see `pycomm.compress`.
        seed: seed of random rounding; equal on all ranks.

    Raises:
        ValueError: an option has a value that makes no sense.
        Error: the model's own wrapper reduces over ranks that are to train apart.
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
        typed("model", model, nn.Module)
        typed("optimizer", optimizer, torch.optim.Optimizer, None)
        every = whole("every", every, -math.inf)
        lr, momentum = number("lr", lr), number("momentum", momentum)
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
        """Outer gradients that were applied, or skipped because they were not finite."""
        self.skipped = 0
        """Outer gradients that were skipped."""
        self._optimizer = optimizer
        self._hook: Any = None
        self._model = model
        trained = self._trained()
        if not trained:
            raise ValueError("LocalSGD: the model has no parameters to train: unfreeze some")
        group = process_group or dist.group.WORLD
        on_cpu = reals(next(iter(trained.values()))).is_cpu
        if delayed and group is not None and not (backend.find(group) and on_cpu):
            # A thread uses this group while the caller trains and uses its own groups as before.
            group = dist.new_group(
                dist.get_process_group_ranks(group), use_local_synchronization=True
            )
            self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "pycomm-local-sgd")
        else:
            self._thread = None
        self.state = CompressionState(codec, process_group=group, feedback=feedback, seed=seed)
        """Codecs and feedback: `summary()`, `residual_norms()`."""
        _refuse_meetings(model, self.state.process_group)
        broadcast(model, self.state.process_group)
        self._outer = OuterParameters(trained, momentum=momentum, nesterov=nesterov)
        self._enter(trained)
        self.state.plan.complete()
        self._under_way: Callable[[], Values] | None = None

    # ------------------------------------------------------------------ for users

    def step(self) -> bool:
        """Count one optimizer step; call it after each. Returns whether it ended a round."""
        self.local_steps += 1
        if self.local_steps < self.every:
            return False
        self._end_round()
        return True

    def finish(self) -> None:
        """End the round now and apply all outer gradients; afterwards all ranks are equal."""
        if self.local_steps or self._under_way is not None:
            if self.local_steps:
                self._end_round()
            self._apply()
            self._outer.write()

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
        """Return the state to checkpoint beside model and optimizer. Each rank saves its own."""
        pending = None
        if self._under_way is not None:
            pending = self._under_way()
            self._under_way = _done(pending)
        return {
            "version": STATE_VERSION,
            **self._outer.state_dict(),
            "pending": None if pending is None else _copies(pending),
            "local_steps": self.local_steps,
            "rounds": self.rounds,
            "skipped": self.skipped,
            "compression": self.state.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`; the model is loaded separately.

        Raises:
            ValueError: the state is of another version, model, momentum, rank or number of ranks.
        """
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"LocalSGD's state has version {state['version']}: not {STATE_VERSION}"
            )
        self._outer.load_state_dict(state, self._named())
        self._enter(self._outer.parameters)
        self.state.load_state_dict(state["compression"])
        pending = state["pending"]
        self._under_way = None if pending is None else _done(_copies(pending))
        self.local_steps, self.rounds = state["local_steps"], state["rounds"]
        self.skipped = state["skipped"]

    # ------------------------------------------------------------------ rounds

    def _end_round(self) -> None:
        trained = self._trained()
        renewed = self._outer.differ(trained)
        moved = self._outer.moved()
        if self.delayed:
            self._apply()
        self._send(moved)
        if not self.delayed or renewed:
            self._apply()
        self._outer.write()
        if renewed:
            new = self._outer.renew(trained, self.state.process_group)
            self._enter({name: trained[name] for name in new})
            self._outer.write()
        self.local_steps = 0

    def _send(self, moved: Values) -> None:
        names = self._outer.names

        def exchange() -> Callable[[], Values]:
            self.state.begin_step()
            futures = {width: self.state.reduce(moved[width], names[width]) for width in moved}
            self.state.end_step()
            return lambda: {width: future.wait() for width, future in futures.items()}

        if self._thread is None:
            self._under_way = exchange()
        else:
            self._under_way = self._thread.submit(lambda: exchange()()).result

    def _apply(self) -> None:
        """Move the start by the outer gradient that is in flight, if there is one."""
        if self._under_way is None:
            return
        gradient, self._under_way = self._under_way(), None
        self.rounds += 1
        if not all(part.isfinite().all() for part in gradient.values()):  # on all ranks alike
            self.skipped += 1
            logger.warning(
                "LocalSGD: round %d is not finite on some rank; all go back to its start",
                self.rounds,
            )
            return
        self._outer.apply(gradient, self.lr)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self._named().items() if p.requires_grad}

    def _named(self) -> dict[str, nn.Parameter]:
        return {clean(name): p for name, p in self._model.named_parameters()}

    def _enter(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Decide the codecs of parameters, and check that all ranks have decided alike."""
        for name, parameter in parameters.items():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            self.state.add(name, own.detach())
        self.state.agree()


def _refuse_meetings(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise if the model's own wrapper reduces over ranks that are to train apart."""
    apart = set(dist.get_process_group_ranks(group))

    def refuse(what: str, ranks: set[int]) -> None:
        if len(apart & ranks) > 1:
            raise Error(
                f"LocalSGD: {what} over ranks {sorted(apart & ranks)}, which are to train apart "
                "and would meet in every step: use one of the two, or a group with one rank of "
                "each node"
            )

    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            refuse("the model is wrapped in DistributedDataParallel", set(ranks))
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            for dim in range(mesh.ndim):
                ranks = dist.get_process_group_ranks(mesh.get_group(dim))
                refuse("parameters are distributed", set(ranks))


def _done(values: Values) -> Callable[[], Values]:
    return lambda: values


def _copies(values: Values) -> Values:
    return {width: part.clone() for width, part in values.items()}
