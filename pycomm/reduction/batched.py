"""Batched coding of buckets in C++, for process groups whose payloads Python moves.

Each step of an operation is one call into C++, on the CPU or on torch's current stream of a device,
where the same kernel of all parameters is one launch. `pycomm.reduction.coding` does the same one
run at a time, on any device and with any implementation of the codecs. A model has hundreds of
parameters, and in Python each costs a dozen calls, whatever its size. Payloads, their order and all
results are the same, so ranks may use either path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pycomm import _C
from pycomm.arrays import core_dtype
from pycomm.codecs.implementations import Launcher, current_stream, launcher
from pycomm.policy.rules import CODED
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import Run, is_variable
from pycomm.reduction.paths import BATCHED, KERNELS
from pycomm.reduction.payloads import Payloads, all_gather, all_to_all

Chunks = Sequence[Sequence[Run]]
_DTYPES = {dtype: core_dtype(dtype) for dtype in CODED}


class Batched:
    """One rank's coding of a bucket in a collective, and the exchange of its payloads.

    An operation is `begin` and some of the methods below, in the same order on all ranks. Values
    are floats of 16 or 32 bits [rows, numel of the bucket], contiguous.

    It runs for every bucket, so it is written with few calls of Python: what depends on the layout
    alone is made here, and a step calls C++ and the group's own methods.

    Args:
        bucket: a bucket whose codecs run in C++; see `find`.
        chunks: the runs of each message, in the order of its payloads.
        group: the ranks.
        device: the device of the values.
    """

    def __init__(
        self, bucket: Bucket, chunks: Chunks, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        # The bucket is not stored here, since it holds this object: its memory would stay until the
        # cycle is collected.
        self._group = group
        self._rank, self._ranks = group.rank(), group.size()
        native = self._native = _C.CodedBucket(bucket.rows)
        for piece in bucket.pieces:
            options: dict[str, Any] = {}
            if piece.residual is not None:
                rule, pairs = piece.residual.rule, piece.residual.pairs()
                options = {role: [side.data_ptr() for side in pair] for role, pair in pairs}
                options["kind"] = getattr(_C.FeedbackKind, rule.kind)
                options["storage"] = getattr(_C.FeedbackStorage, rule.storage)
                options |= {"decay": rule.decay, "nesterov": rule.nesterov}
            native.add(piece.numel, piece.codec.native, tensor=piece.tensor, **options)
        numbers = {id(piece): i for i, piece in enumerate(bucket.pieces)}
        for runs in chunks:
            native.add_chunk([(numbers[id(r.piece)], r.begin, r.end - r.begin) for r in runs])
        self.most: list[int] = native.most
        """The largest number of bytes of each chunk's payloads."""
        self._variable = [is_variable(runs) for runs in chunks]
        self._room = native.room_behind
        self._device, self._on_device = device, device.type != "cpu"
        codecs = [piece.codec for piece in bucket.pieces] if self._on_device else []
        # Where the core does not start the kernels itself: the function that does.
        self._launch: Launcher | None = launcher(codecs[0], device.type) if codecs else None
        self._steps: Sequence[Any] = native.contribute, native.own, native.add_up, native.land
        if self._launch is not None:
            self._steps = tuple(partial(_started, self._launch, device, f) for f in self._steps)
        elif self._on_device:
            self._steps = tuple(partial(_on_its_device, device, f) for f in self._steps)
        self.scratch: torch.Tensor | None = None
        """Memory of an operation on a device; who does not ask for its verdict drops it."""
        self._found_inf: torch.Tensor | None = None
        self._dtype = _C.DType.float32

    @staticmethod
    def find(
        op: str,
        bucket: Bucket,
        group: dist.ProcessGroup,
        deal: Callable[[], Chunks],
        *tensors: torch.Tensor,
    ) -> Batched | None:
        """Return the cached `Batched` of a bucket; None: Python has to code it.

        Args:
            op: name of the operation.
            bucket: the bucket to code.
            group: any process group that moves bytes.
            deal: function that returns the chunks.
            tensors: the tensors that the operation reads and writes.
        """
        device = tensors[0].device
        if not all(tensor.device == device and tensor.is_contiguous() for tensor in tensors):
            return None
        key = op, group.rank(), group.size()
        if key not in bucket.batched:
            path = BATCHED if device.type == "cpu" else KERNELS
            refusal = path.refusal(bucket, "all_reduce", tensors[0].dtype, senders=False)
            suits = not (refusal or path.needs(bucket, group, device))
            bucket.batched[key] = Batched(bucket, deal(), group, device) if suits else None
        found: Batched | None = bucket.batched[key]
        return found

    def begin(
        self,
        sides: list[tuple[int, int]],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        *,
        seed: int,
        step: int,
        divisor: int,
        found_inf: torch.Tensor | None = None,
        swapped: torch.Tensor | None = None,
    ) -> None:
        """Begin an operation, on a device on torch's current stream.

        Args:
            sides: sides of the residuals; see `Bucket.sides`.
            dtype: dtype of the values.
            group: the ranks, as when this was made.
            seed: equal on all ranks.
            step: number of the step, equal on all ranks.
            divisor: results are sums divided by it.
            found_inf: of a device: float32 [1], which becomes 1 if the result is not finite; None:
                `verdict` has it.
            swapped: of a device: float32 [1]; if it is not 0, the sides of all residuals are the
                other way round than `sides` says.
        """
        self._group, self._dtype = group, _DTYPES[dtype]
        where: dict[str, Any] = {}
        if self._on_device:
            room = self._native.scratch_bytes(self._dtype)
            self.scratch = torch.empty(room, dtype=torch.uint8, device=self._device)
            if found_inf is None:
                found_inf = torch.zeros(1, dtype=torch.float32, device=self._device)
                self._found_inf = found_inf
            where = {
                "stream": 0 if self._launch else current_stream(self._device),
                "scratch": (self.scratch.data_ptr(), room),
                "found_inf": found_inf.data_ptr(),
                "swapped": 0 if swapped is None else swapped.data_ptr(),
            }
        self._native.begin(
            sides,
            rank=self._rank,
            ranks=self._ranks,
            seed=seed,
            step=step,
            divisor=divisor,
            **where,
        )

    def verdict(self, finite: bool) -> torch.Tensor:
        """End an operation; return whether the result is finite, as a bool tensor of one value.

        Args:
            finite: what `add_up` and `land` have returned, which of a device is True.
        """
        found_inf, self._found_inf, self.scratch = self._found_inf, None, None
        if found_inf is None:
            return torch.tensor(finite, dtype=torch.bool, device="cpu")
        return found_inf[0] == 0

    def scatter(self, values: torch.Tensor, rows: int = 1) -> Payloads:
        """Encode contributions for their owners; return all contributions to our own values.

        Args:
            values: the values of this rank.
            rows: 1: chunk r belongs to rank r. Else row r does, and there is one chunk.
        """
        chunks, mine = (self._ranks, self._rank) if rows == 1 else (1, 0)
        room = rows * sum(self.most[:chunks])
        out = torch.empty(room, dtype=torch.uint8, device=self._device)
        given = _C.CodedValues(values.data_ptr(), values.numel(), self._dtype, rows)
        sizes = self._steps[0](given, 0, chunks, out.data_ptr(), room)
        return all_to_all(
            out if sum(sizes) == room else out[: sum(sizes)],
            sizes,
            self.most[mine],
            self._group,
            variable=any(self._variable[:chunks]),
            room=self._room,
        )

    def show(self, values: torch.Tensor, chunk: int) -> Payloads:
        """Encode a contribution to a chunk for all ranks; return the contributions of all."""
        payload, size = self._contribute(values, chunk)
        most, variable = [self.most[chunk]] * self._ranks, self._variable[chunk]
        return all_gather(payload, size, most, self._group, variable=variable, room=self._room)

    def show_own(self, values: torch.Tensor, chunk: int) -> Payloads:
        """Encode our own chunk for all ranks, each of which has one; return the chunks of all."""
        payload, size = self._contribute(values, chunk)
        most, variable = self.most[: self._ranks], any(self._variable[: self._ranks])
        return all_gather(payload, size, most, self._group, variable=variable, room=self._room)

    def own(self, values: torch.Tensor, came: Payloads) -> Payloads:
        """Average the contributions to our chunk and encode the result; return all results."""
        most, variable = self.most[: self._ranks], any(self._variable[: self._ranks])
        memory, places = came
        room = max(most)
        out = torch.empty(room, dtype=torch.uint8, device=self._device)
        given = _C.CodedValues(values.data_ptr(), values.numel(), self._dtype)
        received = _C.CodedPayloads(memory.data_ptr(), memory.numel(), places)
        size = self._steps[1](given, self._rank, received, out.data_ptr(), room)
        return all_gather(out, size, most, self._group, variable=variable, room=self._room)

    def add_up(self, values: torch.Tensor, chunk: int, came: Payloads) -> bool:
        """Reduce the contributions to a chunk; return whether the result is finite."""
        memory, places = came
        given = _C.CodedValues(values.data_ptr(), values.numel(), self._dtype)
        received = _C.CodedPayloads(memory.data_ptr(), memory.numel(), places)
        finite: bool = self._steps[2](given, chunk, received)
        return finite

    def land(self, values: torch.Tensor, came: Payloads, rows: int = 1) -> bool:
        """Decode the received payloads; return whether the values are finite.

        Args:
            values: the output.
            came: the chunk of each rank; with several rows, its row of the only chunk.
            rows: number of rows of the values.
        """
        memory, places = came
        given = _C.CodedValues(values.data_ptr(), values.numel(), self._dtype, rows)
        received = _C.CodedPayloads(memory.data_ptr(), memory.numel(), places)
        finite: bool = self._steps[3](given, 0, len(places) // rows, received)
        return finite

    def _contribute(self, values: torch.Tensor, chunk: int) -> tuple[torch.Tensor, int]:
        room = self.most[chunk]
        out = torch.empty(room, dtype=torch.uint8, device=self._device)
        given = _C.CodedValues(values.data_ptr(), values.numel(), self._dtype)
        (size,) = self._steps[0](given, chunk, chunk + 1, out.data_ptr(), room)
        return out[:size], size


def _started(
    launch: Launcher, device: torch.device, function: Callable[..., Any], *args: Any
) -> Any:
    """Call into C++, and start the kernels of which it tells."""
    result, launches = _C.recorded(function, *args)
    launch(launches, device)
    return result


def _on_its_device(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """Call into C++, which starts kernels on the current device."""
    if torch._C._cuda_getDevice() == device.index:
        return function(*args)
    with torch.cuda.device(device):
        return function(*args)
