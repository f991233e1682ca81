"""Group operations of the backend in Python: making groups from others, waiting, ending.

What csrc/binding/torch/backend.cpp does, with the same keys in the store.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.backend.python.arguments import Arguments
from pycomm.backend.python.engine import Engine
from pycomm.backend.python.options import Options
from pycomm.backend.python.store import TorchStore
from pycomm.errors import Error, PeerLost, Timeout
from pycomm.straggler import monitor

TORCHS_TIMEOUT = timedelta(minutes=30)
"""What torch fills in where no timeout was given."""
LONGEST = 100 * 365.25 * 24 * 3600
"""Seconds that stand for no limit: csrc/core/deadline.h."""
SHRINK_ABORT = 1


def seconds(timeout: timedelta) -> float:
    """Return a timeout in seconds. timedelta.max wraps in torch to less than any intended time."""
    given = timeout.total_seconds()
    return LONGEST if given < -LONGEST else max(given, 0.0)


_wrapped: set[Group] = set()


class Group(_distributed_c10d.Backend):
    """A group of ranks.

    Args:
        store: torch's store, for the rendezvous.
        rank: this process's number in the group.
        size: number of ranks.
        options: its timeout, and the ranks' numbers in the default group.
        name: of the group; may have been used before.
        parent: a group that contains these ranks; it shortens the rendezvous.
        parent_ranks: their numbers there; None: those of the options.

    Raises:
        Error: `enable_reconfigure` was asked for, which the compiled backend has.
        PeerLost: a rank died after it had joined.
        Timeout: some ranks did not join; the text names them.
        WireMismatch: ranks have different options.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        options: Options,
        name: str,
        parent: Group | None = None,
        parent_ranks: Sequence[int] | None = None,
    ) -> None:
        if getattr(options, "enable_reconfigure", False):
            raise Error(
                f"rank {rank}: enable_reconfigure needs pycomm's compiled backend, and torch "
                f"{torch.__version__} is served by the one in Python: install a compiler, and set "
                "PYCOMM_BACKEND=binary"
            )
        super().__init__(rank, size)
        self._engine: Engine | None = None
        self._last_error = _distributed_c10d.ErrorType.SUCCESS
        self._rank, self._size = rank, size
        self._arguments = Arguments(rank, size)
        self._store, self._options = store, options
        self._barriers = 0
        self._fresh: Callable[[], Group | None] = lambda: None
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        above = parent._engine if parent is not None else None
        ranks = list(options.global_ranks_in_group if parent_ranks is None else parent_ranks)
        if parent is not None and not all(0 <= r < parent._size for r in ranks):
            above = None
        requests = TorchStore(store, above.store.round_trip if above is not None else 0.0)
        if above is not None:
            self._group = f"{name}/{above.group}.{above.count_child(name, ranks)}"
        else:
            # Values that an older group of this name left in the store must not be read.
            self._group = f"{name}/{requests.add(f'{name}: groups of rank {rank}', 1)}"
        made = options.core()
        made.group = self._group
        made.timeout = seconds(options._timeout)
        made.global_ranks = list(options.global_ranks_in_group)
        if above is not None:
            made.parent, made.parent_ranks = above.core, ranks
        core = _C.Communicator(_C.Store.of(requests), rank, size, made)
        self._engine = Engine(core, requests, self._group)
        if _distributed_c10d.get_debug_level() == _distributed_c10d.DebugLevel.DETAIL:
            # Torch's wrapper for debugging keeps the part of this object that is in C++ alone.
            _wrapped.add(self)
        weak = weakref.ref(store)
        monitor.join(
            core.trace(), lambda k, v: _alive(weak).set(k, v), lambda k: _look(_alive(weak), k)
        )

    def __del__(self) -> None:
        with suppress(Exception):
            self.shutdown()

    def _open(self) -> Engine:
        if self._engine is None:
            raise Error(f"{self._arguments.here}the process group is shut down")
        return self._engine

    # -- what torch asks about a group. The names are those that torch looks for.

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "pycomm"

    name = getBackendName

    def rank(self) -> int:
        """Return this process's number in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    @property
    def options(self) -> Options:
        """A copy of the options, since torch writes the names of new groups into it."""
        return copy.copy(self._options)

    @property
    def supports_splitting(self) -> bool:
        """Whether `split` works."""
        return True

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the members can change in place: with the compiled backend alone."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """Whether `shrink` works."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Whether several operations can be issued as one."""
        return True

    def get_error(self) -> Any:
        """Return the kind of the last error."""
        return self._last_error if self._engine is None else self._engine.error

    def _get_sequence_number_for_group(self) -> int:
        return self._open().seq

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from 0."""

    def _wait_for_pending_works(self) -> None:
        self._open().settle_all()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later operations."""
        self._options._timeout = timeout
        self._open().core.timeout = seconds(timeout)

    _set_default_timeout = set_timeout

    def perform_nocolor_split(self, device: object) -> None:
        """Do nothing: ranks that are not in a new group do not take part in making it."""

    # -- pycomm's own questions, as `_c10d.Backend` answers them

    @property
    def core(self) -> _C.Communicator:
        """The communicator. Its collectives must not mix with queued ones of this group."""
        return self._open().core

    def describe(self) -> str:
        """Return one line that describes the group's connections."""
        return self._open().core.describe()

    def trace(self) -> dict[str, Any]:
        """Return recent operations; `pycomm.trace` formats them."""
        return self._open().core.trace()

    @property
    def levels(self) -> list[int]:
        """The node of each rank, if collectives go node by node."""
        return self._open().core.levels

    @property
    def wire_bytes(self) -> int:
        """Bytes handed to TCP since the start."""
        return self._open().core.wire_bytes()

    @property
    def sent_bytes(self) -> int:
        """Bytes handed to any transport since the start."""
        return self._open().core.sent_bytes()

    @property
    def compares(self) -> bool:
        """Whether the group compares results."""
        return self._open().core.compares

    def compare(self, what: str, digest: int) -> None:
        """Require that all ranks hold the same digest of this."""
        self._open().compare(what, digest)

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a CPU tensor in memory that ranks of this host reach in place.

        Raises:
            Error: of another device, or of no possible size.
        """
        if torch.device(device).type != "cpu":
            raise Error(
                f"{self._arguments.here}allocate_tensor: it allocates CPU tensors only; ask torch "
                "for others"
            )
        if size < 0:
            raise Error(
                f"{self._arguments.here}allocate_tensor: cannot make a tensor of {size} values"
            )
        memory = self._open().core.allocate(max(size, 1), core_dtype(dtype))
        return torch.frombuffer(memory, dtype=dtype)[:size]

    # -- groups from groups

    def _derived(self, given: Any) -> Options:
        """Return the caller's options, or our own. Torch's default timeout means none was given."""
        options = copy.copy(given if isinstance(given, Options) else self._options)
        if given is not None:
            options.group_name = given.group_name
            options.global_ranks_in_group = given.global_ranks_in_group
            default = given._timeout == TORCHS_TIMEOUT
            options._timeout = self._options._timeout if default else given._timeout
        return options

    def _made(
        self, store: Any, rank: int, size: int, options: Options, ranks: Sequence[int] | None = None
    ) -> Group:
        """Return a new group; torch asks twice, for the CPU and for CUDA, and gets the same one."""
        fresh = self._fresh()
        self._fresh = lambda: None
        usable = fresh is not None and fresh._engine is not None
        if fresh is not None and usable and fresh._options.group_name == options.group_name:
            return fresh
        parent = None if ranks is None else self
        made = type(self)(store, rank, size, options, options.group_name, parent, ranks)
        self._fresh = weakref.ref(made)
        return made

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Group | None:
        """Make a group of these of our ranks."""
        if self._rank not in ranks:
            return None
        own = list(ranks).index(self._rank)
        return self._made(store, own, len(ranks), self._derived(opts), ranks)

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> Group:
        """Make a group with ranks of another one."""
        return self._made(store, rank, size, self._derived(opts))

    def shrink(self, ranks_to_exclude: Sequence[int], flags: int = 0, opts: Any = None) -> Group:
        """Make a group of the remaining ranks, also after an error has ended this one.

        Raises:
            Error: this rank is one of those to exclude.
            PeerLost: another rank is gone, too; its number is that in this group.
        """
        if flags & SHRINK_ABORT:
            self.abort()
        kept = [r for r in range(self._size) if r not in ranks_to_exclude]
        if self._rank not in kept:
            raise Error(f"{self._arguments.here}shrink: this rank is one of those to exclude")
        options = self._derived(opts)
        old = self._options.global_ranks_in_group
        left_out = "".join(f" {r}" for r in range(self._size) if r not in kept)
        options.group_name = name = GroupName(f"{self._group}/shrunk without{left_out}")
        options.global_ranks_in_group = [old[r] if old else r for r in kept]
        try:
            own = kept.index(self._rank)
            return type(self)(self._store, own, len(kept), options, name, self, kept)
        except PeerLost as lost:
            if not 0 <= lost.rank < len(kept):
                raise
            ours = kept[lost.rank]
            raise PeerLost(
                f"{lost}; it is rank {ours} of the group that shrinks: exclude it, too", ours
            ) from lost

    # -- waiting for all ranks

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks by the store; rank 0 names those that are missing.

        Raises:
            Timeout: some did not come in time. The group stays usable.
        """
        given = opts.timeout.total_seconds()
        limit = seconds(self._options._timeout) if -LONGEST < given < 0 else seconds(opts.timeout)
        self._barriers += 1
        in_time = f" in {round(limit * 1000)} ms"
        key = f"{self._group}/monitored barrier {self._barriers}"
        good = "all ranks arrived"
        store, here = TorchStore(self._store), self._arguments.here
        if self._rank > 0:
            store.set(f"{key}/{self._rank}", b"here")
            # Longer than rank 0's wait, which may have come after us, to receive its verdict.
            verdict = store.get(f"{key}/verdict", limit + 2)
            text = verdict.decode() if verdict else "rank 0 did not come" + in_time
            if text == good:
                return
            raise Timeout(
                f"{here}Rank {self._rank} successfully reached monitoredBarrier, but received "
                "errors while waiting for send/recv from rank 0. Please check rank 0 logs for "
                f"faulty rank. Original exception: {text}"
            )
        text = _come(store, key, range(1, self._size), limit, wait_all_ranks)
        store.set(f"{key}/verdict", (text or good).encode())
        if text:
            raise Timeout(here + text)

    # -- ending

    def registerAbortHook(self, hook_id: int, hook: Callable[[], None]) -> None:
        """Call a function before the group is aborted; torch's name of the method."""
        self._abort_hooks[hook_id] = hook

    def unregisterAbortHook(self, hook_id: int) -> None:
        """Do so no longer."""
        self._abort_hooks.pop(hook_id, None)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

    def abort(self) -> None:
        """End all operations on all ranks. Any thread, any time, more than once."""
        for hook in list(self._abort_hooks.values()):
            hook()
        if self._engine is not None:
            self._engine.abort("called abort()")

    def shutdown(self) -> None:
        """Finish the collectives that were issued and leave. Any thread, more than once."""
        engine = self._engine
        if engine is None or engine.in_child():
            return
        engine.finish()  # callbacks may still issue operations
        _wrapped.discard(self)
        self._last_error = engine.error
        self._engine = None


def _come(store: TorchStore, key: str, ranks: range, limit: float, every: bool) -> str:
    """Return which ranks have not come to a barrier, in words; "": none is missing."""
    end = time.monotonic() + limit
    missing = []
    for rank in ranks:
        if store.get(f"{key}/{rank}", max(end - time.monotonic(), 0.0)) is None:
            missing.append(rank)
            if not every:
                break
    if limit == 0 and len(ranks) > 0:
        return "Rank 0 timed out in monitoredBarrier after 0 ms"
    if not missing:
        return ""
    names = ", ".join(map(str, missing))
    ms = round(limit * 1000)
    return f"{'Ranks' if every else 'Rank'} {names} failed to pass monitoredBarrier in {ms} ms"


def _alive(weak: Callable[[], Any]) -> Any:
    store = weak()
    if store is None:
        raise Error("the store is gone")
    return store


def _look(store: Any, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None
