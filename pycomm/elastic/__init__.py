"""Elastic groups: processes join and leave, and the process group stays the same object.

A group that is made with ``enable_reconfigure=True`` has no members at first. Each process gets the
group's `handle`, all handles come together by any means (a store, a file, a coordinator), and all
members call `reconfigure` with the same list. Later they do it again, with fewer handles, with new
ones, or with others. torch 2.14 has this as part of every process group, as
``torch.distributed._reconfigure``; the functions here do the same with all versions of torch that
pycomm supports.

    options = pycomm.Options(enable_reconfigure=True)
    dist.init_process_group("pycomm", pg_options=options, ...)
    store.set(f"handle {rank}", pycomm.elastic.handle())
    handles = [store.get(f"handle {r}").decode() for r in range(size)]
    pycomm.elastic.reconfigure(1, handles)

A process that joins has no trained model yet. `hand_over` gives it the one of a member that has it,
in groups of any backend.

    pycomm.elastic.hand_over(model, optimizer, has=not new)
"""

from __future__ import annotations

from pycomm.elastic.group import fit as fit
from pycomm.elastic.group import handle, reconfigure
from pycomm.elastic.transfer import hand_over

__all__ = ["hand_over", "handle", "reconfigure"]
