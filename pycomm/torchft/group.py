"""The process group of torchft's Manager, whose members change in place."""

from __future__ import annotations

import copy
import hashlib
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torchft.process_group import ProcessGroupWrapper, create_store_client

from pycomm import backend, elastic
from pycomm._build import load_c10d
from pycomm.errors import Error, PeerLost, Timeout

if TYPE_CHECKING:
    from pycomm._c10d import Backend, Options

NAME = "torchft-pycomm"
UNKNOWN_MEMBER_TIMEOUT = 5.0
"""Seconds that members of a former group wait at first for a replica that they do not know. All of
one quorum hear of it at the same time. It doubles with each meeting that fails, so that slow
replicas meet in the end."""
_SUCCESSOR = 0.5  # seconds for a replica that has taken the place of one that is gone
_LOOK = 0.1  # seconds between two looks for former members that are gone
_PAUSES = (0.001, 0.05)  # seconds between two polls of the store, at first and at most
_COMMIT = "commit"


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


class QuorumRendezvous:
    """How a replica finds the handles of the others, in the store of one of them; for each quorum.

    A quorum may name a replica that died before it heard of it: torchft's lighthouse takes a
    replica for alive until its heartbeats have been missing for some time. Such a replica publishes
    nothing, and the others would wait for it until the timeout. They give up long before; the step
    then fails, and the next quorum is without it.

    Args:
        handle: this replica's handle.
        is_gone: whether the process of a handle has ended.
    """

    def __init__(self, handle: str, is_gone: Callable[[str], bool]) -> None:
        self._handle, self._is_gone = handle, is_gone
        self._known: set[str] = set()  # handles of the others of the last group that was formed
        self._new = True  # no group was formed yet
        self._failed = 0  # meetings in a row

    def formed(self, handles: Iterable[str]) -> None:
        """Note the members of the group that was formed."""
        self._known = set(handles) - {self._handle}
        self._failed, self._new = 0, False

    def handles(self, store_addr: str, rank: int, size: int, timeout: timedelta) -> list[str]:
        """Publish this replica's handle, and return all, by rank.

        Either all replicas that are there return the same list, or all of them raise.

        Args:
            store_addr: of the quorum, "host:port/prefix", with a prefix that is new.
            rank: of this replica.
            size: how many there are.
            timeout: for the whole.

        Raises:
            PeerLost: a replica is gone.
            Timeout: a replica did not come in time.
            Error: another replica has given up; the text has its reason.
        """
        self._failed += 1  # until formed() is called
        if size == 1:
            return [self._handle]
        limit = timeout.total_seconds()
        start = time.monotonic()
        store = _open(store_addr, timeout)
        keys = [f"pycomm/handle/{r}" for r in range(size)]
        store.set(keys[rank], self._handle)
        found, pause, next_look = {rank: self._handle}, _PAUSES[0], _LOOK
        problem: Error | None = None
        while len(found) < size and problem is None:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
            for r in range(size):
                if r not in found and store.check([keys[r]]):
                    found[r] = store.get(keys[r]).decode()
            waited = time.monotonic() - start
            if store.check(["pycomm/decision"]):
                break
            if waited >= next_look and len(found) < size:
                next_look = waited + _LOOK
                problem = self._problem(found, rank, size, waited, limit)
        decision = _COMMIT if problem is None else str(problem)
        decision = store.compare_set("pycomm/decision", "", decision).decode()
        if decision != _COMMIT:
            # Wait longer for the replacement of a dead member.
            absent = self._known - set(found.values())
            self._known -= {other for other in absent if self._is_gone(other)}
            raise problem or Error(f"another replica has given up: {decision}")
        return [store.get(key).decode() for key in keys]

    def _problem(
        self, found: dict[int, str], rank: int, size: int, waited: float, limit: float
    ) -> Error | None:
        if waited < _SUCCESSOR:
            return None
        absent = [r for r in range(size) if r not in found]
        former = self._known - set(found.values())
        who = f"rank {rank}: replica {absent[0]} of {size} in this quorum"
        gone = sum(map(self._is_gone, former))
        successors = len(set(found.values()) - self._known)
        all_dead_replaced = gone <= successors and len(absent) <= len(former) - gone
        if gone and not all_dead_replaced:
            return PeerLost(
                f"{who} has published no handle, and the process of a former member is gone; the "
                "next quorum is without it",
                absent[0],
            )
        patience = min(UNKNOWN_MEMBER_TIMEOUT * 2 ** min(self._failed - 1, 10), limit)
        if self._new or len(absent) <= len(former):  # they are alive, as far as can be told
            patience = limit
        if waited < patience:
            return None
        return Timeout(
            f"{who} has published no handle: timeout after {1000 * patience:g}ms (of at most "
            f"{1000 * limit:g}ms): it died as the quorum was found, or is slow; the next quorum is "
            "waited for longer"
        )


def _open(store_addr: str, timeout: timedelta) -> Any:
    """Return a client of a quorum's store, which was there before the quorum.

    torch's client would try again until the timeout if nobody listens.
    """
    host, _, port = store_addr.partition("/")[0].rpartition(":")
    refused: OSError | None = None
    for pause in (0.0, 0.05, 0.1):  # a full queue of a busy server may refuse, too
        time.sleep(pause)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout.total_seconds()):
                return create_store_client(store_addr, timeout=timeout)
        except ConnectionRefusedError as error:
            refused = error
        except TimeoutError as error:
            raise Timeout(
                f"{host}:{port}, where the replica that lends its store for this quorum should "
                f"be, does not answer: timeout after {1000 * timeout.total_seconds():g}ms; its "
                "machine may be gone, or the network"
            ) from error
    raise Error(
        f"nobody listens at {host}:{port}, where the replica that lends its store for this quorum "
        "should be: its process is gone; the next quorum is without it"
    ) from refused
