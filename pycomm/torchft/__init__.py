"""pycomm under torchft, whose replicas die and come back: the process group of its Manager.

It needs torchft 0.2 (``pip install torchft``).

    group = ProcessGroupPycomm(timeout=timedelta(seconds=10))
    manager = torchft.Manager(pg=group, min_replica_size=2, load_state_dict=..., state_dict=...)
    model = DistributedDataParallel(manager, net, codec="int4")
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(net.parameters()))
"""

from __future__ import annotations

from pycomm.torchft.ddp import DistributedDataParallel
from pycomm.torchft.group import ProcessGroupPycomm

__all__ = ["DistributedDataParallel", "ProcessGroupPycomm"]
