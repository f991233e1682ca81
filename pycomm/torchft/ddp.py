"""DistributedDataParallel for torchft's Manager: codecs and residuals of its replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import parallel
from torchft.process_group import ProcessGroupDummy, ProcessGroupWrapper

from pycomm.arguments import typed
from pycomm.codecs import Codec
from pycomm.errors import WireMismatch
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import compress_hook
from pycomm.log import logger
from pycomm.policy import Policy
from pycomm.policy.names import clean
from pycomm.reduction.adapter import Adapter
from pycomm.reduction.reducer import completed
from pycomm.reduction.state import CompressionState
from pycomm.reduction.step import StepStatus
from pycomm.reduction.weights import factors
from pycomm.torchft.group import ProcessGroupPycomm

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
    from torchft.manager import Manager


class ManagedHooks:
    """What a DDP model does for the state of the replicas of one Manager.

    A step of torchft is a quorum, an average, and a vote, after which the optimizer acts or not.
    Accordingly:

    * The number of a step is the Manager's, so schedules and random numbers follow what was
      committed.
    * A step that was not committed leaves the residuals as they were.
    * Gradients are averaged over the replicas that participate. The others send zeros, and what
      they still owe.
    * A replica that heals takes over the parameters of another one, so it owes nothing.
    * An error goes to the Manager, which skips the step, and ends the step of the other replicas.
      Only a replica that heals and has another model or codec raises it.

    Args:
        manager: a Manager whose process group is a `ProcessGroupPycomm`.

    Raises:
        TypeError: the Manager has another process group.
    """

    def __init__(self, manager: Manager) -> None:
        group: Any = manager._pg
        while not isinstance(group, ProcessGroupPycomm) and isinstance(group, ProcessGroupWrapper):
            group = group._pg  # such as one that torchft's tests let fail
        typed("the manager's process group", group, ProcessGroupPycomm)
        self._manager = manager
        self._members: ProcessGroupPycomm = group
        self._at: int | None = None  # the Manager's step in the last backward that reduced
        self._heals = False  # this replica takes over the others' parameters at this step's end,
        self._loaded = False  # or has done so before the step
        manager.register_state_dict_fn("pycomm", self._note_load, dict)

    def make_state(self, codec: str | Codec | Policy, **options: Any) -> CompressionState:
        """Return the state of the replicas; arguments as for `CompressionState`."""
        adapter = Adapter(
            reduce_bucket=self.reduce_bucket,
            is_new=lambda: self._heals or self._loaded,
        )
        group = self._members.alone()
        state = CompressionState(codec, process_group=group, adapter=adapter, **options)
        if state.residuals:
            state.residuals.inherited = True  # a replica that heals has none, and the others may
        return state

    def _note_load(self, _: object) -> None:
        # In a step of an asynchronous quorum that heals, the residuals are gone already.
        self._loaded = not self._heals

    def reduce_bucket(
        self, state: CompressionState, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of DDP over the participants; undefined after an error, as torchft's."""
        names = [state.reducer.names[id(parameter)] for parameter in bucket.parameters()]
        tensor = bucket.buffer()
        try:
            begins = bucket.index() > 0 or self._begin(state)
            if not begins or not state.is_open or self._manager.errored():
                self._give_up(state)
                return completed(tensor)
            future = state.reduce(tensor, names)
            if bucket.is_last():
                state.end_step()
        except Exception as error:
            self._manager.report_error(error)
            self._give_up(state)
            if isinstance(error, WireMismatch) and (self._heals or self._loaded):
                raise  # another model or codec: the others go on without this replica
            return completed(tensor)
        managed: torch.futures.Future[torch.Tensor]
        managed = self._manager.wrap_future(future.then(self._reporting(tensor)), tensor)
        return managed

    def _reporting(
        self, tensor: torch.Tensor
    ) -> Callable[[torch.futures.Future[torch.Tensor]], torch.Tensor]:
        """Return a callback that hands an error to the Manager.

        The Manager's own would keep the error for ever: its traceback has the frame of that
        callback, which has the future, which has the error, and Python cannot see that cycle, since
        it goes through C++.
        """

        def report(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            try:
                return future.value()
            except Exception as error:
                logger.warning("this step is not committed: %s", error)
                self._manager.report_error(error.with_traceback(None))
                return tensor

        return report

    def _begin(self, state: CompressionState) -> bool:
        """Begin a step; return whether the quorum has been found, and formed the group."""
        manager = self._manager
        manager.wait_quorum()
        if manager.errored():
            return False
        self._heals = manager._healing
        if self._at == manager.current_step():
            state.discard()  # the vote was against the last step
        state.settle()
        state.reducer.step.number = self._at = manager.current_step()
        state.begin_step()
        self._loaded = False
        takes_part, size = manager.is_participating(), state.process_group.size()
        others = manager.num_participants() - takes_part
        weights = [1.0] * others + [0.0] * (size - others - 1)
        state.reducer.weights = [factors([float(takes_part), *weights])[0]] * size
        return True

    def _give_up(self, state: CompressionState) -> None:
        """End the step of the other replicas, too, which would wait for this one's gradients."""
        if state.is_open:
            state.reducer.step.status = StepStatus.ROLLED_BACK
        self._members.abort(errored=False)


class DistributedDataParallel(parallel.DistributedDataParallel):
    """DistributedDataParallel whose gradients travel compressed between a Manager's replicas.

    It takes the place of torchft's class of this name. As that one, it copies no parameters in its
    constructor, since the Manager makes the replicas equal, and never makes its buckets anew.

    Args:
        manager: a `torchft.Manager` whose process group is a `pycomm.torchft.ProcessGroupPycomm`.
        module: the model.
        codec: a codec, a policy, or the text of either; see `pycomm.compress`. "fp32" is exact.
        feedback: see `pycomm.compress`.
        seed: see `pycomm.compress`.
        options: arguments of torch's class, such as ``bucket_cap_mb``.

    Attributes:
        state: codecs and residuals; see `pycomm.CompressionState`.

    Raises:
        TypeError: the Manager has another process group.
        ValueError: an unknown codec, or bad options.
        WireMismatch: in a backward: this replica joins others with another model or codec.

    Example:
        >>> import torchft  # doctest: +SKIP
        >>> from pycomm.torchft import DistributedDataParallel, ProcessGroupPycomm  # doctest: +SKIP
        >>> manager = torchft.Manager(pg=ProcessGroupPycomm(), ...)  # doctest: +SKIP
        >>> model = DistributedDataParallel(manager, net, codec="int4")  # doctest: +SKIP
        >>> optimizer = torchft.Optimizer(manager, adamw)  # doctest: +SKIP
    """

    def __init__(
        self,
        manager: Any,
        module: nn.Module,
        *,
        codec: str | Codec | Policy = "int8",
        feedback: bool | str | Feedback | None = True,
        seed: int = 0,
        **options: Any,
    ) -> None:
        # Buckets that are made anew after the first step would differ from those of a replica that
        # comes later; with this option they are not.
        options["find_unused_parameters"] = True
        group = ProcessGroupDummy(0, 1)
        # It would keep each of its works for ever, of which DDP issues one in each step for the
        # parameters that were used: 1.4 KiB of memory in each step.
        group._work = deque(maxlen=0)
        super().__init__(module, process_group=group, **options)
        self.state = ManagedHooks(manager).make_state(codec, feedback=feedback, seed=seed)
        ids = set(map(id, self._build_params_for_reducer()[0]))  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            if id(parameter) in ids:
                self.state.add(clean(name), parameter)
        self.register_comm_hook(self.state, compress_hook)
