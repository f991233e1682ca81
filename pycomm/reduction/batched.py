"""Batched coding of buckets in C++, for process groups whose payloads Python moves.

Each step of an operation is one call into C++, on the CPU or on torch's current stream of a device,
where the same kernel of all parameters is one launch. `pycomm.reduction.coding` does the same one
run at a time, on any device and with any implementation of the codecs. A model has hundreds of
parameters, and in Python each costs a dozen calls, whatever its size. Payloads, their order and all
results are the same, so ranks may use either path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from pycomm.arrays import core_dtype
from pycomm.codecs.cuda.launches import recorded
from pycomm.codecs.implementations import Launcher, current_stream, launcher
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.coding import Run, is_variable
from pycomm.reduction.paths import BATCHED, KERNELS
from pycomm.reduction.payloads import Payloads, all_gather, all_to_all

Chunks = Sequence[Sequence[Run]]


class Batched:
    """One rank's coding of a bucket in a collective, and the exchange of its payloads.

    An operation is `begin` and some of the methods below, in the same order on all ranks. Values
    are floats of 16 or 32 bits [rows, numel of the bucket], contiguous.

    Args:
        bucket: a bucket whose codecs run in C++; see `find`.
        chunks: the runs of each message, in the order of its payloads.
        group: the ranks.
        device: the device of the values.
    """

    def __init__(
        self, bucket: Bucket, chunks: Chunks, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        from pycomm import _C

        # The bucket is not stored here, since it holds this object: its memory would stay until the
        # cycle is collected.
        self._numel, self._group = bucket.numel, group
        self._rank, self._ranks = group.rank(), group.size()
        self._native = _C.CodedBucket(bucket.rows)
        for piece in bucket.pieces:
            options: dict[str, Any] = {}
            if piece.residual is not None:
                rule, pairs = piece.residual.rule, piece.residual.pairs()
                options = {role: [side.data_ptr() for side in pair] for role, pair in pairs}
                options["kind"] = getattr(_C.FeedbackKind, rule.kind)
                options["storage"] = getattr(_C.FeedbackStorage, rule.storage)
                options |= {"decay": rule.decay, "nesterov": rule.nesterov}
            self._native.add(piece.numel, piece.codec.native, tensor=piece.tensor, **options)
        numbers = {id(piece): i for i, piece in enumerate(bucket.pieces)}
        for runs in chunks:
            self._native.add_chunk([(numbers[id(r.piece)], r.begin, r.end - r.begin) for r in runs])
        self._make_values, self._make_payloads = _C.CodedValues, _C.CodedPayloads
        self.most: list[int] = self._native.most
        """The largest number of bytes of each chunk's payloads."""
        self._variable = [is_variable(runs) for runs in chunks]
        self._room = self._native.room_behind
        self._device = device
        codecs = [piece.codec for piece in bucket.pieces] if device.type != "cpu" else []
        # Where the core does not start the kernels itself: the function that does.
        self._launch: Launcher | None = launcher(codecs[0], device.type) if codecs else None
        self._scratch: torch.Tensor | None = None
        self._found_inf: torch.Tensor | None = None

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
        if found is not None:
            found._group = group
        return found

    def begin(
        self,
        sides: list[tuple[int, int]],
        dtype: torch.dtype,
        *,
        seed: int,
        step: int,
        divisor: int,
    ) -> None:
        """Begin an operation, on a device on torch's current stream.

        Args:
            sides: sides of the residuals; see `Bucket.sides`.
            dtype: dtype of the values.
            seed: equal on all ranks.
            step: number of the step, equal on all ranks.
            divisor: results are sums divided by it.
        """
        where: dict[str, Any] = {}
        if self._device.type != "cpu":
            room = self._native.scratch_bytes(core_dtype(dtype))
            self._scratch = torch.empty(room, dtype=torch.uint8, device=self._device)
            self._found_inf = torch.zeros(1, dtype=torch.float32, device=self._device)
            where = {
                "stream": 0 if self._launch else current_stream(self._device),
                "scratch": (self._scratch.data_ptr(), room),
                "found_inf": self._found_inf.data_ptr(),
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
            finite: what `add_up` and `land` have returned, which is not known for a device.
        """
        found_inf, self._found_inf, self._scratch = self._found_inf, None, None
        if found_inf is None:
            return torch.tensor(finite, dtype=torch.bool, device="cpu")
        return found_inf[0] == 0

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call into C++, and start the kernels if C++ does not."""
        if self._device.type == "cpu":
            return function(*args)
        if self._launch is None:
            with torch.cuda.device(self._device):
                return function(*args)
        results: list[Any] = []
        launches = recorded(lambda: results.append(function(*args)))
        self._launch(launches, self._device)
        return results[0]

    def scatter(self, values: torch.Tensor, rows: int = 1) -> Payloads:
        """Encode contributions for their owners; return all contributions to our own values.

        Args:
            values: the values of this rank.
            rows: 1: chunk r belongs to rank r. Else row r does, and there is one chunk.
        """
        chunks = self._ranks if rows == 1 else 1
        payloads, sizes = self._contribute(values, 0, chunks, rows)
        return all_to_all(
            payloads,
            sizes,
            self.most[self._rank if rows == 1 else 0],
            self._group,
            variable=any(self._variable[:chunks]),
            room=self._room,
        )

    def show(self, values: torch.Tensor, chunk: int) -> Payloads:
        """Encode a contribution to a chunk for all ranks; return the contributions of all."""
        payloads, (size,) = self._contribute(values, chunk, chunk + 1)
        most = [self.most[chunk]] * self._ranks
        return self._gather(payloads, size, most, self._variable[chunk])

    def show_own(self, values: torch.Tensor, chunk: int) -> Payloads:
        """Encode our own chunk for all ranks, each of which has one; return the chunks of all."""
        payloads, (size,) = self._contribute(values, chunk, chunk + 1)
        most = self.most[: self._ranks]
        return self._gather(payloads, size, most, any(self._variable[: self._ranks]))

    def own(self, values: torch.Tensor, came: Payloads) -> Payloads:
        """Average the contributions to our chunk and encode the result; return all results."""
        most = self.most[: self._ranks]
        out = torch.empty(max(most), dtype=torch.uint8, device=self._device)
        at, received = self._at(values), self._received(came)
        size = self._call(self._native.own, at, self._rank, received, out.data_ptr(), out.numel())
        return self._gather(out, size, most, any(self._variable[: self._ranks]))

    def add_up(self, values: torch.Tensor, chunk: int, came: Payloads) -> bool:
        """Reduce the contributions to a chunk; return whether the result is finite."""
        finite: bool = self._call(
            self._native.add_up, self._at(values), chunk, self._received(came)
        )
        return finite

    def land(self, values: torch.Tensor, came: Payloads, rows: int = 1) -> bool:
        """Decode the received payloads; return whether the values are finite.

        Args:
            values: the output.
            came: the chunk of each rank; with several rows, its row of the only chunk.
            rows: number of rows of the values.
        """
        chunks = len(came.places) // rows
        at, received = self._at(values, rows), self._received(came)
        finite: bool = self._call(self._native.land, at, 0, chunks, received)
        return finite

    def _contribute(
        self, values: torch.Tensor, first: int, last: int, rows: int = 1
    ) -> tuple[torch.Tensor, list[int]]:
        room = rows * sum(self.most[first:last])
        out = torch.empty(room, dtype=torch.uint8, device=self._device)
        sizes = self._call(
            self._native.contribute, self._at(values, rows), first, last, out.data_ptr(), room
        )
        return out[: sum(sizes)], sizes

    def _gather(
        self, payload: torch.Tensor, size: int, most: Sequence[int], variable: bool
    ) -> Payloads:
        return all_gather(payload, size, most, self._group, variable=variable, room=self._room)

    def _at(self, values: torch.Tensor, rows: int = 1) -> Any:
        """Convert the values for C++, and check their number, which C++ cannot see."""
        if values.numel() != rows * self._numel:
            raise ValueError(
                f"a tensor has {values.numel()} values, the bucket {self._numel} in each of "
                f"{rows} rows"
            )
        return self._make_values(values.data_ptr(), core_dtype(values.dtype), rows)

    def _received(self, came: Payloads) -> Any:
        return self._make_payloads(came.memory.data_ptr(), came.memory.numel(), came.places)
