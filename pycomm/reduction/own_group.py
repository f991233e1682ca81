"""Process groups that pycomm makes for one of its objects."""

from __future__ import annotations

import torch.distributed as dist


def make(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new group of the same ranks; collective."""
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
    return made
