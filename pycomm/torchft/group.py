"""The process group of torchft's Manager, whose members change in place."""

from __future__ import annotations

import copy
import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torchft.process_group import ProcessGroupWrapper

from pycomm import backend, elastic
from pycomm._build import load_c10d
from pycomm.errors import Error
from pycomm.torchft.meeting import QuorumRendezvous

if TYPE_CHECKING:
    from pycomm._c10d import Backend, Options

NAME = "torchft-pycomm"


class ProcessGroupPycomm(ProcessGroupWrapper):  # type: ignore[misc]
    """A pycomm group that torchft's Manager configures anew at each change of the quorum.

    All operations work, `reduce_scatter` and `alltoall_base` among them. Its members change in
    place (`pycomm.elastic`), so hooks and residuals survive. A death ends the operations of the
    others within milliseconds, with an error that names the replica.

    Args:
        timeout: of `configure` and of each operation.
        options: `pycomm.Options` of the group, such as its transport; None: the defaults.
    """

    _pg: dist.ProcessGroup | None

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), options: Options | None = None
    ) -> None:
        super().__init__(timeout=timeout)
        self._options = copy.copy(options) if options is not None else load_c10d().Options()
        self._options.enable_reconfigure = True
        self._options.group_name = NAME
        self._group: dist.ProcessGroup | None = None
        self._backend: Backend | None = None
        self._rendezvous: QuorumRendezvous | None = None

    def getBackendName(self) -> str:
        """Return the name under which torchft registers the group."""
        return NAME

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of torch that has the current members; the same object for ever."""
        if self._group is None:
            options = copy.copy(self._options)
            options._timeout = self._timeout
            # The members meet by their handles, so the store is only a form.
            store = _distributed_c10d.HashStore()
            self._backend = load_c10d().Backend(store, 0, 1, options, NAME)
            self._group = dist.ProcessGroup(store, 0, 1)
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._group._set_default_backend(kind)
            devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
            for device in devices:
                self._group._register_backend(torch.device(device), kind, self._backend)
            self._group._set_group_name(NAME)  # type: ignore[arg-type]
        return self._group

    def alone(self) -> dist.ProcessGroup:
        """Return the group, with this process as its only member before the first `configure`."""
        group, ours = self.group, self._ours()
        if not ours.formed:
            ours.form(0, [ours.handle()], self._timeout)
            elastic.fit(group, ours)
        return group

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Form the group anew; see torchft. `store_addr` has a prefix that was never used before.

        A replica of the quorum that is gone, or publishes nothing, is waited for much shorter than
        the timeout: torchft then finds another quorum.

        Raises:
            Error: a replica is missing, or is gone; the text names it.
        """
        self._replica_id, self._quorum_id, self._rank = replica_id, quorum_id, rank
        self._group_rank, self._group_world_size = group_rank, group_world_size
        self._global_ranks = global_ranks
        self.abort(errored=False)
        group, ours = self.group, self._ours()
        ours.set_timeout(self._timeout)
        if self._rendezvous is None:
            self._rendezvous = QuorumRendezvous(ours.handle(), ours.is_gone)
        handles = self._rendezvous.handles(store_addr, rank, world_size, self._timeout)
        ours.form(_uuid(store_addr), handles, self._timeout)
        self._rendezvous.formed(handles)
        elastic.fit(group, ours)
        self._pg = group

    def abort(self, errored: bool = True) -> None:
        """End all operations on all replicas; `configure` makes the group usable again."""
        if self._pg is not None:
            super().abort(errored)  # logs, aborts the group, and forgets it until configure()
            self._ours().abort()

    def shutdown(self) -> None:
        """Leave the group for good."""
        ours = self._backend
        self._backend, self._group, self._rendezvous = None, None, None
        self._pg = None
        if ours is not None:
            ours.shutdown()

    def errored(self) -> Exception | None:
        """Return an error if the group needs `configure` before it can be used again."""
        ours = self._backend
        if ours is None or ours.get_error() == _distributed_c10d.ErrorType.SUCCESS:
            return None
        return Error("the group was aborted, since an operation failed; see the error before")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations and of `configure`."""
        super().set_timeout(timeout)
        if self._backend is not None:
            self._backend.set_timeout(timeout)

    def _ours(self) -> Backend:
        ours = backend.find(self.group)
        assert ours is not None
        return ours

    def _opts_hook(self, opts: Any) -> Any:
        return dist.BarrierOptions() if opts is None else opts


def _uuid(store_addr: str) -> int:
    """Return the number of a quorum, by its prefix in the store, which is new for each."""
    digest = hashlib.sha256(store_addr.partition("/")[2].encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
