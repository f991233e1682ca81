"""Collectives on arrays, without torch: a thin layer over csrc/collectives/communicator.h.

An array is a torch tensor on the CPU, a numpy array, or any object with a buffer; it must be
contiguous. Results go into arrays whose values may change: those of TensorFlow and JAX are for
input alone, and ``numpy.array(x)`` is a copy for results. The ranks of one call must agree on
operation, size and dtype; if they do not, every rank gets a :class:`pycomm.WireMismatch` that names
both. An error in the middle of an operation ends the group: every later call raises that first
error again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pycomm import _C, launch, log, stores
from pycomm.arrays import (
    check_same,
    core_dtype,
    count,
    pair,
    parts,
    reduce_op,
    span,
)
from pycomm.errors import Error

__all__ = ["Communicator", "Piece", "Request", "Store"]

Request = _C.Request
Store = _C.Store
_SUM = _C.ReduceOp.sum


def _options(options: dict[str, Any]) -> _C.CommunicatorOptions:
    """Return options of a group as the core takes them; those that are None keep their default."""
    made = _C.CommunicatorOptions()
    for name, value in options.items():
        if name.startswith("_") or not hasattr(made, name):
            raise TypeError(f"Communicator has no option {name!r}")
        if value is not None:
            setattr(made, name, value)
    return made


class Communicator:
    """A group of ranks and its collectives.

    Calls block until this rank's part is done, one collective at a time. Results have the same bits
    on all ranks: one rank reduces an element, in rank order or by nodes (``docs/algorithms.md``).

    Args:
        store: rendezvous store; ``Store.file(folder)`` for processes that share a folder,
            ``Store.local()`` for threads; None if there is only one rank.
        rank: this process's number, 0 to size - 1.
        size: number of ranks.
        parent: an existing group with these ranks: it detects deaths during the rendezvous.
        options: ``group``, a unique name among the groups of this store; ``timeout``, the seconds
            that the rendezvous, and by default every operation, may take; ``parent_ranks``, the
            ranks' numbers in ``parent`` if they differ; and the options of the table in
            docs/api/backend.md by name, such as ``transport="tcp"``. Those that are not given, or
            None, come from the environment.

    Raises:
        TypeError: there is no option of that name, or its value has another type.
        PeerLost: a rank died after it had joined the rendezvous.
        Timeout: ranks are missing; the text names them.
        WireMismatch: ranks have different options.

    Example:
        >>> import numpy as np
        >>> from pycomm.communicator import Communicator
        >>> x = np.arange(3, dtype=np.float32)
        >>> Communicator(None, 0, 1).all_reduce(x)
        >>> x
        array([0., 1., 2.], dtype=float32)
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        parent: Communicator | None = None,
        **options: Any,
    ) -> None:
        made = _options(options)
        if parent:
            made.parent = parent.core
            made.parent_ranks = made.parent_ranks or list(range(size))
        core = _C.Communicator(store, rank, size, made)
        self._core: _C.Communicator | None = core
        if size > 1:
            log.begin(rank, core.describe(), ("group", *core.transports))

    @classmethod
    def from_env(cls, store_folder: str | None = None, **options: Any) -> Communicator:
        """Join the group that ``RANK`` and ``WORLD_SIZE`` describe, or `srun` or `mpirun`.

        Without a folder rank 0 listens at ``MASTER_ADDR`` and ``MASTER_PORT`` until its process
        ends, and the others wait for it; under torchrun, whose agent listens there, torch is
        loaded.

        Args:
            store_folder: a folder that all ranks share and that no earlier run has used; None: no
                folder.
            options: as for the constructor.

        Raises:
            Error: no launcher has set its variables, or rank 0 cannot be reached there.
            Timeout: rank 0 did not listen in time.
        """
        rank, size = launch.rank_and_size()
        store: Store | None = None
        if store_folder is not None:
            store = Store.file(store_folder)
        elif size > 1:
            shared = {name: value for name, value in options.items() if name != "parent"}
            store = stores.at_master(rank, _options(shared))
        return cls(store, rank, size, **options)

    @property
    def core(self) -> _C.Communicator:
        """The C++ communicator, for callers that have addresses.

        Raises:
            Error: the communicator is closed.
        """
        if self._core is None:
            raise Error("this communicator is closed: make a new one")
        return self._core

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one get :class:`pycomm.PeerLost`."""
        self._core = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        text = "closed" if self._core is None else f"rank {self.rank} of {self._core.describe()}"
        return f"<Communicator {text}>"

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.core.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.core.size

    @property
    def timeout(self) -> float:
        """Seconds that an operation may take if its call gives no timeout."""
        return self.core.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self.core.timeout = seconds

    def describe(self) -> str:
        """Return one line that describes the group's connections."""
        return self.core.describe()

    def trace(self) -> dict[str, Any]:
        """Return this rank's recent operations in raw form; :mod:`pycomm.trace` formats them."""
        return self.core.trace()

    def wire_bytes(self) -> int:
        """Return the number of bytes that this rank has handed to TCP since the start."""
        return self.core.wire_bytes()

    def sent_bytes(self) -> int:
        """Return the number of bytes that this rank has handed to any transport since the start."""
        return self.core.sent_bytes()

    def allocate(self, numel: int, dtype: Any = "float32") -> _C.SharedArray:
        """Return an array that peers on this host read and write in place.

        Collectives between such arrays, on every rank, need no copies through buffers. The array
        has a buffer: ``numpy.asarray(array)`` and ``torch.frombuffer(array, dtype=...)`` share its
        memory and keep it alive. It may outlive the communicator. Where ranks share no memory it
        is ordinary memory.

        Args:
            numel: number of elements; their values are unspecified.
            dtype: torch's or numpy's name. bfloat16 and 8-bit floats show as unsigned integers.

        Raises:
            Error: the heap has no room for it, or no memory could hold so many elements.
        """
        return self.core.allocate(count("allocate: numel", numel), core_dtype(dtype))

    # Every operation takes a timeout in seconds; 0 is the group's. It raises Error for invalid
    # arguments, before a byte is sent, else Timeout, PeerLost or WireMismatch.

    def all_reduce(
        self,
        data: Any,
        op: str | _C.ReduceOp = "sum",
        *,
        factor: float = 1.0,
        timeout: float = 0.0,
    ) -> None:
        """Replace ``data`` by its reduction over all ranks.

        Args:
            data: any shape and dtype, in place.
            op: sum, avg, premul_sum (``data`` times ``factor``), prod, min, max, band, bor or
                bxor.
            factor: factor of this rank's own data, for premul_sum; ranks may have different ones.
            timeout: seconds.
        """
        how, (address, numel, dtype) = reduce_op(op), span(data, True)
        self.core.run("all_reduce", address, address, numel, dtype, how, -1, factor, timeout)

    def all_reduce_coded(
        self,
        data: Any,
        codec: Any,
        *,
        residual: Any = None,
        average: bool = True,
        seed: int = 0,
        step: int = 0,
        timeout: float = 0.0,
    ) -> bool:
        """Replace ``data`` by its sum or average over all ranks, sent through codecs.

        Each value is encoded twice, whatever the number of ranks: by each rank for the owner, and
        by the owner for all. The owner adds in float32 and divides once. Codecs whose payloads can
        only be gathered (``combine`` "gather") encode once; every rank gets and adds all payloads.
        Without residuals of owners, far ranks may all do what the owner does, with the same bits.

        Args:
            data: float32, any shape, in place.
            codec: one codec for all, by its name ("int4", "topk:density=0.01"), or :class:`Piece` s
                that cover ``data``.
            residual: error feedback with one codec for all: float32, as many values as ``data``,
                zeros at first. What this rank's payload loses is kept there and added to the next
                one.
            average: divide the sum by the number of ranks.
            seed: seed of stochastic rounding, equal on all ranks.
            step: training step, equal on all ranks; also names random numbers.
            timeout: seconds.

        Returns:
            True if every value of the result is finite; the same on all ranks.
        """
        address, numel = floats("all_reduce_coded", data, True)
        pieces = built(codec, numel, residual=residual)
        if pieces.numel != numel:
            raise Error(f"the pieces cover {pieces.numel} of {numel} elements: they must cover all")
        how: dict[str, Any] = {"average": average, "seed": seed, "step": step, "timeout": timeout}
        return self.core.run_coded("all_reduce", address, address, pieces, **how)

    def reduce_scatter_coded(
        self,
        input: Any,
        out: Any,
        codec: Any,
        *,
        average: bool = True,
        seed: int = 0,
        step: int = 0,
        timeout: float = 0.0,
    ) -> bool:
        """Sum or average rows over all ranks, sent through codecs; ``out`` gets this rank's row.

        The first half of :meth:`all_reduce_coded`: each value is encoded once, by each rank for
        the owner of its row.

        Args:
            input: float32 [size, n]: row r is for rank r. FSDP2 hands this to its reduce-scatter:
                a row has one shard of each parameter, padded to equal sizes.
            out: float32 [n]; may be this rank's row of ``input``.
            codec: one codec for all, or :class:`Piece` s that cover one row. Residuals are float32
                [size, numel of the piece]. Each row of a piece is a tensor of its own, which codecs
                for whole tensors encode whole.
            average: divide the sum by the number of ranks.
            seed: seed of stochastic rounding, equal on all ranks.
            step: training step, equal on all ranks.
            timeout: seconds.

        Returns:
            True if every value of all rows' results is finite; the same on all ranks.
        """
        source, numel = floats("reduce_scatter_coded", input, False)
        target, row = floats("reduce_scatter_coded", out, True)
        pieces = built(codec, row, rows=self.size)
        if numel != row * self.size or pieces.numel != row:
            raise Error(
                f"reduce_scatter_coded: input has {numel} elements, out has {row} and the pieces "
                f"cover {pieces.numel}; {self.size} ranks need {self.size} rows of that size"
            )
        how: dict[str, Any] = {"average": average, "seed": seed, "step": step, "timeout": timeout}
        return self.core.run_coded("reduce_scatter", source, target, pieces, **how)

    def reduce_scatter(
        self,
        input: Any,
        out: Any,
        op: str | _C.ReduceOp = "sum",
        *,
        factor: float = 1.0,
        timeout: float = 0.0,
    ) -> None:
        """Reduce ``input`` over all ranks; ``out`` gets this rank's part of ``size`` equal parts.

        Args:
            input: size * n elements, or a list of arrays, one per rank, whose sizes may differ
                but are equal on all ranks.
            out: n elements of the same dtype.
            op: as in :meth:`all_reduce`.
            factor: as in :meth:`all_reduce`.
            timeout: seconds.
        """
        how = reduce_op(op)
        if isinstance(input, list | tuple):
            sources, dtype = parts("reduce_scatter: input", input, self.size, False)
            target, numel, out_dtype = span(out, True)
            check_same("reduce_scatter", dtype, out_dtype)
            source: int | _C.Parts = _C.Parts(sources)
        else:
            source, target, numel, dtype = pair(input, out, "reduce_scatter", self.size, 1)
        self.core.run("reduce_scatter", source, target, numel, dtype, how, -1, factor, timeout)

    def all_gather(self, input: Any, out: Any, *, timeout: float = 0.0) -> None:
        """Put every rank's ``input`` (n elements) in ``out`` (size * n elements), in rank order.

        ``input`` may be this rank's part of ``out``. ``out`` may be a list of arrays, one per rank;
        then n may differ between ranks, but all ranks must agree on the sizes.
        """
        if isinstance(out, list | tuple):
            targets, out_dtype = parts("all_gather: out", out, self.size, True)
            source, numel, dtype = span(input, False)
            check_same("all_gather", dtype, out_dtype)
            target: int | _C.Parts = _C.Parts(targets)
        else:
            source, target, numel, dtype = pair(input, out, "all_gather", 1, self.size)
        self.core.run("all_gather", source, target, numel, dtype, _SUM, -1, 1.0, timeout)

    def all_to_all(
        self,
        input: Any,
        out: Any,
        *,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Send part r of ``input`` to rank r; part r of ``out`` is received from rank r.

        Args:
            input: the parts one after another, or a list of arrays, one per rank.
            out: likewise, of the same dtype; may be ``input``.
            send_counts: elements of each part of ``input``; None: equal parts.
            recv_counts: elements of each part of ``out``; None: equal parts.
            timeout: seconds.
        """
        sources, dtype = parts("all_to_all: input", input, self.size, False, send_counts)
        targets, out_dtype = parts("all_to_all: out", out, self.size, True, recv_counts)
        check_same("all_to_all", dtype, out_dtype)
        sides = _C.Parts(sources), _C.Parts(targets)
        self.core.run("all_to_all", *sides, 0, dtype, _SUM, -1, 1.0, timeout)

    def broadcast(self, data: Any, root: int = 0, *, timeout: float = 0.0) -> None:
        """Replace ``data`` on every rank by the root's data."""
        address, numel, dtype = span(data, True)
        self.core.run("broadcast", address, address, numel, dtype, _SUM, root, 1.0, timeout)

    def reduce(
        self,
        input: Any,
        out: Any,
        root: int = 0,
        op: str | _C.ReduceOp = "sum",
        *,
        factor: float = 1.0,
        timeout: float = 0.0,
    ) -> None:
        """Reduce ``input`` over all ranks into the root's ``out``, which may be None elsewhere."""
        source, numel, dtype = span(input, False)
        target = 0 if out is None else pair(input, out, "reduce", 1, 1)[1]
        self.core.run("reduce", source, target, numel, dtype, reduce_op(op), root, factor, timeout)

    def gather(self, input: Any, out: Any, root: int = 0, *, timeout: float = 0.0) -> None:
        """Put every rank's ``input`` (n elements) in the root's ``out`` (size * n elements).

        On other ranks ``out`` may be None. It may be a list of arrays, one per rank, of any sizes.
        """
        source, numel, dtype = span(input, False)
        targets: list[tuple[int, int]] = []
        if self.rank == root:
            targets, out_dtype = parts("gather: out", out, self.size, True)
            check_same("gather", dtype, out_dtype)
        got = _C.Parts(targets)
        self.core.run("gather", source, got, numel, dtype, _SUM, root, 1.0, timeout)

    def scatter(self, input: Any, out: Any, root: int = 0, *, timeout: float = 0.0) -> None:
        """Put part r of the root's ``input`` (size * n elements) in rank r's ``out``.

        Elsewhere ``input`` may be None. It may be a list of arrays, one per rank, of any sizes.
        """
        target, numel, dtype = span(out, True)
        sources: list[tuple[int, int]] = []
        if self.rank == root:
            sources, in_dtype = parts("scatter: input", input, self.size, False)
            check_same("scatter", in_dtype, dtype)
        sent = _C.Parts(sources)
        self.core.run("scatter", sent, target, numel, dtype, _SUM, root, 1.0, timeout)

    def barrier(self, *, timeout: float = 0.0) -> None:
        """Wait until all ranks have called this."""
        self.core.run("barrier", 0, 0, 0, _C.DType.uint8, _SUM, -1, 1.0, timeout)

    def send(self, data: Any, dst: int, tag: int = 0) -> Request:
        """Post a send of ``data`` to rank ``dst``.

        Returns:
            A request; ``data`` must not change until its ``wait(timeout)`` returns. The group keeps
            it until the send is done, also if the request is dropped.
        """
        address, numel, dtype = span(data, False)
        request = self.core.send(address, numel * _C.size_of(dtype), dst, tag, data)
        request.buffer = data
        return request

    def recv(self, data: Any, src: int = -1, tag: int = 0) -> Request:
        """Post a receive into ``data`` from rank ``src``, or from any rank (-1).

        Sends and receives match by rank and tag, in order of posting. Both must have the same size.

        Returns:
            A request; ``data`` is valid after its ``wait(timeout)`` returns; ``source()`` returns
            the sender. The group keeps ``data`` as long as the receive may write to it, also if the
            request is dropped.
        """
        address, numel, dtype = span(data, True)
        request = self.core.recv(address, numel * _C.size_of(dtype), src, tag, data)
        request.buffer = data
        return request

    def abort(self, reason: str) -> None:
        """End all running and later operations on all ranks; callable from any thread."""
        self.core.abort(reason)


@dataclass(frozen=True)
class Piece:
    """A part of a bucket with a codec and feedback of its own, such as one parameter's gradient."""

    numel: int
    """number of elements; the pieces of a bucket follow each other without gaps"""
    codec: Any
    """a codec's name, such as "int4" or "quant:bits=4,block=64", or a :class:`pycomm.codecs.Codec`
    """
    tensor: int = 0
    """number of the parameter, equal on all ranks: it selects the random numbers of rounding"""
    residual: Any = None
    """float32 [numel], read and written: error of what this rank sends; for
    :meth:`Communicator.reduce_scatter_coded` [size, numel]"""
    owner_residual: Any = None
    """float32 [numel]: error of what this rank sends back for the elements that it owns. All ranks
    have such residuals or none has: else all get a WireMismatch"""


def floats(what: str, array: Any, write: bool) -> tuple[int, int]:
    """Return the address and number of elements of a float32 array."""
    address, numel, dtype = span(array, write)
    if dtype != _C.DType.float32:
        raise Error(f"{what} takes float32, not {dtype.name}: convert it first")
    return address, numel


def built(codec: Any, numel: int, rows: int = 1, residual: Any = None) -> _C.Pieces:
    """Convert the codec argument of a coded call; worker residuals have `rows` rows.

    Raises:
        Error: there is a residual besides those that pieces name, or one does not fit.
    """
    pieces = codec if isinstance(codec, Sequence) and not isinstance(codec, str) else None
    if pieces is not None and residual is not None:
        raise Error("pieces name their own residuals: leave out residual=, or pass one codec")
    result = _C.Pieces()
    codecs: dict[str, _C.Codec] = {}
    for piece in [Piece(numel, codec, residual=residual)] if pieces is None else pieces:
        codec = piece.codec
        if isinstance(codec, str):
            codec = codecs.setdefault(codec, _C.Codec(codec))
        elif not isinstance(codec, _C.Codec):
            codec = codec.native
        residual = _residual(piece.residual, rows * piece.numel)
        owner = _residual(piece.owner_residual, piece.numel)
        result.add(
            piece.numel,
            codec,
            tensor=piece.tensor,
            worker=(residual, residual),
            owner=(owner, owner),
        )
    return result


def _residual(array: Any, numel: int) -> int:
    if array is None:
        return 0
    address, size, dtype = span(array, True)
    if size != numel or dtype != _C.DType.float32:
        raise Error(f"a residual has {size} {dtype.name}, its piece needs {numel} float32")
    return address
