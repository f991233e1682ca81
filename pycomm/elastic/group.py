"""Groups whose members change in place, on all versions of torch that pycomm supports."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from pycomm import backend
from pycomm.arguments import typed, whole
from pycomm.errors import Error

if TYPE_CHECKING:
    from pycomm._c10d import Backend


def handle(group: dist.ProcessGroup | None = None) -> str:
    """Return what others need to form a group with this process.

    A line of text, the same for the life of the group. It holds addresses, and unless
    PYCOMM_SECRET is set a secret: who can read it can join.

    Args:
        group: a group that was made with ``enable_reconfigure``; None: the default group.

    Raises:
        Error: the group cannot be reconfigured.
    """
    return _backend(group).handle()


def reconfigure(
    uuid: int,
    handles: Sequence[str],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Form the group of the processes with these handles; rank r is the one of ``handles[r]``.

    Collective among them: all call it with the same arguments. Rank and size of the group change in
    place, so hooks and models that hold it go on with the new members. Operations that were issued
    before are finished first, or aborted if a rank does not come. It also works after an error or
    `abort`.

    If it raises, the group is as it was before, and can be reconfigured with another uuid.

    Args:
        uuid: a number that none of the members has used for this group before, 0 to 2**63 - 1.
        handles: what `handle` returned on each of the members.
        group: the group; None: the default group.
        timeout: for the whole; None: the group's.

    Raises:
        Error: a handle is not one of this group, this process is not in the list, secrets or
            encryption differ, or a member has used the uuid ("already used").
        WireMismatch: members have other lists, or other options.
        PeerLost: a member's process is gone; the text names it.
        Timeout: a member did not come.

    Example:
        >>> rest = [h for r, h in enumerate(handles) if r != lost]  # doctest: +SKIP
        >>> pycomm.elastic.reconfigure(uuid + 1, rest)  # doctest: +SKIP
    """
    uuid = whole("uuid", uuid, 0, 2**63 - 1)
    if isinstance(handles, str):
        raise TypeError("handles is one text: want a list with the handle of each rank")
    for one in handles:
        typed("a handle", one, str)
    ours = _backend(group)
    ours.form(uuid, list(handles), timeout or timedelta(0))
    fit(group or c10d._get_default_group(), ours)


def fit(group: dist.ProcessGroup, ours: Backend) -> None:
    """Let torch's records of a group follow its backend, after its members have changed."""
    backend.begin(ours)
    ours.set_shape_of(group)
    if group in c10d._world.pg_group_ranks:
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(ours.size())}


def _backend(group: dist.ProcessGroup | None) -> Backend:
    group = group or c10d._get_default_group()
    found = backend.find(group)
    if found is None:
        raise Error(
            "elastic groups are pycomm's: make the group with the backend 'pycomm' and "
            "enable_reconfigure"
        )
    return found
