"""The process group of `torch.distributed` in Python: csrc/binding/torch/backend.cpp in Python.

Each operation checks its arguments, then runs a call of the core on addresses, now or on the
group's thread. Torch looks for the methods by these names; keys in the store are those of C++.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.backend.python.arguments import Arguments, Tensors, equal
from pycomm.backend.python.engine import Engine, Op
from pycomm.backend.python.options import Options
from pycomm.backend.python.sparse import sum_over_ranks
from pycomm.backend.python.store import SealedStore, TorchStore
from pycomm.backend.python.tensors import elements, flat, parts, write_all_back, write_back
from pycomm.backend.python.work import CoalescedWork, PeerWork, Work
from pycomm.errors import Error, PeerLost, Timeout
from pycomm.straggler import monitor

# A call without options is asynchronous, as torch's defaults are.
ALL_REDUCE, BROADCAST = c10d.AllreduceOptions(), c10d.BroadcastOptions()
REDUCE, ALL_GATHER, GATHER = c10d.ReduceOptions(), c10d.AllgatherOptions(), c10d.GatherOptions()
SCATTER, REDUCE_SCATTER = c10d.ScatterOptions(), c10d.ReduceScatterOptions()
ALL_TO_ALL, BARRIER = c10d.AllToAllOptions(), c10d.BarrierOptions()
COALESCED = c10d.AllreduceCoalescedOptions()

Lists = Sequence[Tensors]

TORCHS_TIMEOUT = timedelta(minutes=30)
"""What torch fills in where no timeout was given."""
LONGEST = 100 * 365.25 * 24 * 3600
"""Seconds that stand for no limit: csrc/core/deadline.h."""
SHRINK_ABORT = 1


def seconds(timeout: timedelta) -> float:
    """Return a timeout in seconds. timedelta.max wraps in torch to less than any intended time."""
    given = timeout.total_seconds()
    return LONGEST if given < -LONGEST else max(given, 0.0)


_wrapped: set[Backend] = set()


class Backend(c10d.Backend):
    """A process group of `torch.distributed` on the core.

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
        parent: Backend | None = None,
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
        self._last_error = c10d.ErrorType.SUCCESS
        self._rank, self._size = rank, size
        self._arguments = Arguments(rank, size)
        self._store, self._options = store, options
        self._barriers = 0
        self._coalesced: list[Work] | None = None  # between start and end
        self._fresh: Callable[[], Backend | None] = lambda: None
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
        if c10d.get_debug_level() == c10d.DebugLevel.DETAIL:
            # Torch's wrapper for debugging keeps the part of this object that is in C++ alone.
            _wrapped.add(self)
        weak, secret, group = weakref.ref(store), made.secret, self._group

        def sealed() -> SealedStore:
            return SealedStore(TorchStore(_alive(weak)), secret, group)

        monitor.join(
            core.trace(), lambda k, v: sealed().set(k, v.encode()), lambda k: _look(sealed(), k)
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
    ) -> Backend:
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

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Backend | None:
        """Make a group of these of our ranks."""
        if self._rank not in ranks:
            return None
        own = list(ranks).index(self._rank)
        return self._made(store, own, len(ranks), self._derived(opts), ranks)

    def merge(self, store: Any, opts: Any, rank: int, size: int) -> Backend:
        """Make a group with ranks of another one."""
        return self._made(store, rank, size, self._derived(opts))

    def shrink(self, ranks_to_exclude: Sequence[int], flags: int = 0, opts: Any = None) -> Backend:
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
        store = SealedStore(TorchStore(self._store), self._options.secret, self._group)
        here = self._arguments.here
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

    # -- operations

    def _issue(self, name: str, opts: Any, outputs: Tensors, used: Tensors, op: Op) -> Work | None:
        """Run op(core), which uses these tensors, now or on the group's thread.

        Returns:
            None where the caller does not ask for a handle, and it is done.
        """
        engine = self._open()
        with _profiled(name):
            if not all(t.is_cpu for t in used):
                # Copies to and from a device belong to the caller's stream.
                engine.run(name, outputs, op)
                return None if not opts.asyncOp else self._noted(engine.done(name, outputs))
            if opts.asyncOp or self._coalesced is not None:
                return self._noted(engine.submit(name, outputs, op))
            engine.run(name, outputs, op)
        return None

    def _noted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _end_others(self, name: str, sent: int, received: int) -> None:
        """End the group with an error where the part that this rank sends to itself has two sizes.

        Other ranks may not see that: they get an error instead of waiting until the deadline.
        """
        if sent != received and self._size > 1:
            self._open().abort(
                f"refused its {name}, whose part for itself has {sent} values in the input and "
                f"{received} in the output"
            )

    # -- one to all, all to one

    def broadcast(self, tensors: Tensors, opts: Any = BROADCAST) -> Work | None:
        """Replace the tensor by the root's."""
        tensor = self._arguments.only_written("broadcast", tensors)
        root = self._arguments.root("broadcast", opts)
        limit, sends = seconds(opts.timeout), root == self._rank

        def op(core: _C.Communicator) -> None:
            data = flat(tensor, copies=sends)
            dtype, count = elements(tensor)
            core.broadcast(data.data_ptr(), count, dtype, root, limit)
            write_back(data, tensor)

        return self._issue("broadcast", opts, tensors, tensors, op)

    def reduce(self, tensors: Tensors, opts: Any = REDUCE) -> Work | None:
        """Reduce over all ranks into the root's tensor."""
        root = self._arguments.root("reduce", opts)
        own = root == self._rank
        check = self._arguments.only_written if own else self._arguments.only
        tensor = check("reduce", tensors)
        dtype, how, factor = self._arguments.reducible("reduce", tensor, opts.reduceOp)
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            data = flat(tensor)
            at = data.data_ptr()
            core.reduce(at, at if own else 0, data.numel(), dtype, how, root, factor, limit)
            if own:
                write_back(data, tensor)

        return self._issue("reduce", opts, tensors, tensors, op)

    def gather(self, outputs: Lists, inputs: Tensors, opts: Any = GATHER) -> Work | None:
        """Put every rank's tensor in the root's list."""
        tensor = self._arguments.only("gather", inputs)
        root = self._arguments.root("gather", opts)
        found: list[torch.Tensor] = []
        if root == self._rank:
            found = self._arguments.one_per_rank("gather", outputs, tensor)
            self._end_others("gather", tensor.numel(), found[root].numel())
            self._arguments.own_part("gather", found, tensor, "output")
            self._arguments.check_written("gather", *found)
        return self._gather("gather", opts, tensor, found, root)

    def gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = GATHER
    ) -> Work | None:
        """Put every rank's tensor in the root's, in rank order."""
        name = "gather_single"
        self._arguments.check(name, input)
        root = self._arguments.root(name, opts)
        found: list[torch.Tensor] = []
        if root == self._rank:
            self._arguments.check_written(name, output)
            if output.numel() != self._size * input.numel():
                self._end_others(name, self._size * input.numel(), output.numel())
            self._arguments.pair_up(name, [output], [input])
            if not output.is_contiguous():
                self._arguments.fail(name, "the output must be contiguous")
            found = list(output.view(-1).chunk(self._size)) if output.numel() else [output] * root
            found = found if len(found) == self._size else [output] * self._size
        return self._gather(name, opts, input, found, root)

    def _gather(
        self, name: str, opts: Any, tensor: torch.Tensor, found: list[torch.Tensor], root: int
    ) -> Work | None:
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            data, into = flat(tensor), [flat(t, copies=False) for t in found]
            dtype, count = elements(tensor)
            core.gather(data.data_ptr(), count, parts(into), dtype, root, limit)
            write_all_back(into, found)

        return self._issue(name, opts, found, [tensor, *found], op)

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any = SCATTER) -> Work | None:
        """Put tensor r of the root's list in rank r's tensor."""
        tensor = self._arguments.only_written("scatter", outputs)
        root = self._arguments.root("scatter", opts)
        found: list[torch.Tensor] = []
        if root == self._rank:
            found = self._arguments.one_per_rank("scatter", inputs, tensor)
            self._end_others("scatter", found[root].numel(), tensor.numel())
            self._arguments.own_part("scatter", found, tensor, "input")
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            into, data = flat(tensor, copies=False), [flat(t) for t in found]
            dtype, count = elements(tensor)
            core.scatter(parts(data), into.data_ptr(), count, dtype, root, limit)
            write_back(into, tensor)

        return self._issue("scatter", opts, outputs, [tensor, *found], op)

    # -- reductions

    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Work | None:
        """Replace the tensor by its reduction over all ranks."""
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self.allreduce_sparse(tensors, opts)
        tensor = self._arguments.only_written("all_reduce", tensors)
        dtype, how, factor = self._arguments.reducible("all_reduce", tensor, opts.reduceOp)
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            data = flat(tensor)
            core.all_reduce(data.data_ptr(), data.numel(), dtype, how, factor, limit)
            write_back(data, tensor)

        return self._issue("all_reduce", opts, tensors, tensors, op)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = COALESCED) -> Work | None:
        """Reduce several tensors of one dtype as one."""
        name = "all_reduce_coalesced"
        if not tensors:
            self._arguments.fail(name, "needs at least one tensor")
        self._arguments.check_written(name, *tensors)
        for tensor in tensors:
            self._arguments.same_dtype(name, tensor, tensors[0])
        dtype, how, factor = self._arguments.reducible(name, tensors[0], opts.reduceOp)
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            with torch.inference_mode():
                packed = torch.cat([flat(t).detach().reshape(-1) for t in tensors])
            core.all_reduce(packed.data_ptr(), packed.numel(), dtype, how, factor, limit)
            shares = torch.split(packed, [t.numel() for t in tensors])
            write_all_back([s.view(t.shape) for s, t in zip(shares, tensors, strict=True)], tensors)

        return self._issue(name, opts, tensors, tensors, op)

    def allreduce_sparse(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Work | None:
        """Sum sparse tensors, of which each rank has its own indices."""
        name = "sparse_all_reduce"
        if len(tensors) != 1:
            self._arguments.fail(name, f"takes one tensor, got {len(tensors)}")
        (tensor,) = tensors
        if not tensor.is_sparse or not tensor.is_cpu:
            self._arguments.fail(name, "takes a sparse COO tensor on the CPU")
        if opts.reduceOp != torch.distributed.ReduceOp.SUM:
            self._arguments.fail(name, "can only sum")
        limit = seconds(opts.timeout)
        return self._issue(
            name, opts, tensors, tensors, lambda core: sum_over_ranks(core, tensor, limit)
        )

    def reduce_scatter(
        self, outputs: Tensors, inputs: Lists, opts: Any = REDUCE_SCATTER
    ) -> Work | None:
        """Reduce list r over all ranks into rank r's tensor."""
        name = "reduce_scatter"
        tensor = self._arguments.only_written(name, outputs)
        found = self._arguments.one_per_rank(name, inputs, tensor)
        dtype, how, factor = self._arguments.reducible(name, tensor, opts.reduceOp)
        compare = self._arguments.must_compare(name, found, tensor, "input")
        limit, sizes = seconds(opts.timeout), [t.numel() for t in found]

        def op(core: _C.Communicator) -> None:
            data, into = [flat(t) for t in found], flat(tensor, copies=False)
            if compare:
                core.compare_sizes(name, tensor.numel(), sizes, dtype, how, limit)
            core.reduce_scatter(parts(data), into.data_ptr(), dtype, how, factor, limit)
            write_back(into, tensor)

        return self._issue(name, opts, outputs, [tensor, *found], op)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = REDUCE_SCATTER
    ) -> Work | None:
        """Reduce equal parts of the input over all ranks; the output gets this rank's."""
        return self._reduce_scatter_each("reduce_scatter_single", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = REDUCE_SCATTER
    ) -> Work | None:
        """Do so for each pair."""
        return self._reduce_scatter_each("reduce_scatter_single_coalesced", outputs, inputs, opts)

    def _reduce_scatter_each(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Work | None:
        self._arguments.pair_up(name, inputs, outputs)
        self._arguments.check_written(name, *outputs)
        how = [self._arguments.reducible(name, t, opts.reduceOp) for t in outputs]
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            for source, target, (dtype, reduction, factor) in zip(
                inputs, outputs, how, strict=True
            ):
                data, into = flat(source), flat(target, copies=False)
                core.reduce_scatter(
                    data.data_ptr(),
                    into.data_ptr(),
                    into.numel(),
                    dtype,
                    reduction,
                    factor,
                    limit,
                )
                write_back(into, target)

        return self._issue(name, opts, outputs, [*outputs, *inputs], op)

    # -- all to all

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = ALL_GATHER) -> Work | None:
        """Put every rank's tensor in the list, in rank order."""
        tensor = self._arguments.only("all_gather", inputs)
        found = self._arguments.one_per_rank("all_gather", outputs, tensor)
        self._arguments.check_written("all_gather", *found)
        op = self._gathering("all_gather", found, tensor, opts)
        return self._issue("all_gather", opts, found, [tensor, *found], op)

    def _gathering(self, name: str, found: Tensors, tensor: torch.Tensor, opts: Any) -> Op:
        compare = self._arguments.must_compare(name, found, tensor, "output")
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            data, into = flat(tensor), [flat(t, copies=False) for t in found]
            dtype, count = elements(tensor)
            if compare:
                sizes = [elements(t)[1] for t in found]
                core.compare_sizes("all_gather", count, sizes, dtype, _C.ReduceOp.sum, limit)
            core.all_gather(data.data_ptr(), parts(into), dtype, limit)
            write_all_back(into, found)

        return op

    def allgather_coalesced(
        self, outputs: Lists, inputs: Tensors, opts: Any = ALL_GATHER
    ) -> Work | None:
        """Gather several tensors: list r has those of rank r."""
        name = "all_gather_coalesced"
        if not inputs:
            self._arguments.fail(name, "needs at least one tensor")
        if len(outputs) != self._size:
            self._arguments.fail(
                name,
                f"needs a list of outputs for each of {self._size} ranks, got {len(outputs)}",
            )
        for of_rank in outputs:
            if len(of_rank) != len(inputs):
                self._arguments.fail(
                    name,
                    "needs as many outputs of each rank as inputs, got "
                    f"{len(of_rank)} and {len(inputs)}",
                )
        ops, every = [], [tensor for of_rank in outputs for tensor in of_rank]
        for i, tensor in enumerate(inputs):
            found = [of_rank[i] for of_rank in outputs]
            self._arguments.check(name, tensor)
            self._arguments.one_per_rank(name, [found], tensor)
            self._arguments.check_written(name, *found)
            ops.append(self._gathering(name, found, tensor, opts))

        def op(core: _C.Communicator) -> None:
            for gather in ops:
                gather(core)

        return self._issue(name, opts, every, [*inputs, *every], op)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = ALL_GATHER
    ) -> Work | None:
        """Put every rank's tensor in the output, in rank order."""
        return self._all_gather_each("all_gather_single", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_GATHER
    ) -> Work | None:
        """Do so for each pair."""
        return self._all_gather_each("all_gather_single_coalesced", outputs, inputs, opts)

    def _all_gather_each(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Work | None:
        self._arguments.pair_up(name, outputs, inputs)
        self._arguments.check_written(name, *outputs)
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            for source, target in zip(inputs, outputs, strict=True):
                data, into = flat(source), flat(target, copies=False)
                dtype, count = elements(source)
                core.all_gather(data.data_ptr(), into.data_ptr(), count, dtype, limit)
                write_back(into, target)

        return self._issue(name, opts, outputs, [*outputs, *inputs], op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = ALL_TO_ALL,
    ) -> Work | None:
        """Send rows of the input to each rank; the output gets the rows that they send."""
        name, check = "all_to_all_single", self._arguments
        check.check_written(name, output)
        check.same_dtype(name, input, output)
        sent = check.rows(name, input, input_splits, "input")
        received = check.rows(name, output, output_splits, "output")
        send = [rows * _per_row(input) for rows in sent]
        recv = [rows * _per_row(output) for rows in received]
        if not equal(send) or not equal(recv):
            self._end_others(name, send[self._rank], recv[self._rank])
        check.own_counts(name, send[self._rank], recv[self._rank])
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            data, into = flat(input), flat(output, copies=False)
            dtype = elements(input)[0]
            core.all_to_all(_cut(data, send, dtype), _cut(into, recv, dtype), dtype, limit)
            write_back(into, output)

        return self._issue(name, opts, [output], [output, input], op)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = ALL_TO_ALL) -> Work | None:
        """Send tensor r to rank r; output r gets what rank r sends."""
        name, check = "all_to_all", self._arguments
        if not outputs:
            check.fail(name, "needs one output per rank, got none")
        check.check_written(name, *outputs)
        check.one_per_rank(name, [outputs], outputs[0])
        check.one_per_rank(name, [inputs], outputs[0])
        send, recv = [t.numel() for t in inputs], [t.numel() for t in outputs]
        if not equal(send) or not equal(recv):
            self._end_others(name, send[self._rank], recv[self._rank])
        check.own_counts(name, send[self._rank], recv[self._rank])
        limit = seconds(opts.timeout)

        def op(core: _C.Communicator) -> None:
            data, into = [flat(t) for t in inputs], [flat(t, copies=False) for t in outputs]
            core.all_to_all(parts(data), parts(into), elements(inputs[0])[0], limit)
            write_all_back(into, outputs)

        return self._issue(name, opts, outputs, [*outputs, *inputs], op)

    def barrier(self, opts: Any = BARRIER) -> Work | None:
        """Wait until all ranks have called this."""
        limit = seconds(opts.timeout)
        return self._issue("barrier", opts, [], [], lambda core: core.barrier(limit))

    # -- sends and receives

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        """Send a tensor to a rank."""
        tensor = self._arguments.only("send", tensors)
        self._arguments.check_peer("send", "the destination", dst)
        return self._post("send", tensor, dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        """Receive a tensor from a rank."""
        tensor = self._arguments.only_written("recv", tensors)
        self._arguments.check_peer("recv", "the source", src)
        return self._post("recv", tensor, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from whichever rank sends one."""
        tensor = self._arguments.only_written("recvAnySource", tensors)
        return self._post("recvAnySource", tensor, -1, tag)

    def _post(self, name: str, tensor: torch.Tensor, peer: int, tag: int) -> Work:
        self._arguments.check_tag(name, tag)
        with _profiled(name):
            work: PeerWork = self._open().post(name, tensor, peer, tag)
        return self._noted(work)

    # -- several operations as one: all are issued, and none is waited for

    def start_coalescing(self) -> None:
        """Begin."""
        self._coalesced = []

    def end_coalescing(self) -> CoalescedWork | None:
        """Return one handle of what was issued since."""
        works, self._coalesced = self._coalesced, None
        return CoalescedWork(works) if works else None

    # Names of torch until 2.13, which callers of a backend may still use.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single


def _come(store: SealedStore, key: str, ranks: range, limit: float, every: bool) -> str:
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


def _look(store: SealedStore, key: str) -> str | None:
    value = store.find(key)
    return None if value is None else value.decode()


def _profiled(name: str) -> AbstractContextManager[Any]:
    """Show the operation in profiles, which costs as much as a small one."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(f"pycomm:{name}")


def _per_row(tensor: torch.Tensor) -> int:
    """Return how many elements a row has."""
    length = tensor.shape[0] if tensor.dim() else 1
    return elements(tensor)[1] // length if length else 0


def _cut(tensor: torch.Tensor, counts: Sequence[int], dtype: _C.DType) -> _C.Parts:
    """Return parts of flat memory, one after the other."""
    places, at, size = [], tensor.data_ptr(), _C.size_of(dtype)
    for count in counts:
        places.append((at, count))
        at += count * size
    return _C.Parts(places)
