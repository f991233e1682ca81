"""DistributedDataParallel for torchft's Manager, with compressed gradients."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import nn
from torch.nn import parallel
from torchft.process_group import ProcessGroupDummy

from pycomm.codecs import Codec
from pycomm.feedback import Feedback
from pycomm.hooks.ddp import compress_hook
from pycomm.policy import Policy
from pycomm.policy.names import clean
from pycomm.torchft.state import ManagedHooks


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
        self.state.plan.complete()
        self.register_comm_hook(self.state, compress_hook)
