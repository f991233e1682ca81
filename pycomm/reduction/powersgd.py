"""PowerSGD (Vogels et al. 2019): averages of a bucket's matrices as products of thin factors.

Let M be a rank's contribution to a matrix: its gradient plus its residual. P is the mean of M Q
over all ranks, orthonormalized; Q is then the mean of M^T P; the result is P Q^T. Both means are
plain all-reduces in float32, in which a bucket travels as one tensor. The next step starts from
this step's Q. If the rank of the mean of M is at most that of the factors, the result is that mean,
but for rounding.

A rank's residual is the error of its own M, M - P (M^T P)^T with its own M^T P. The paper uses the
global P Q^T, whose mean over the ranks is the same; but then the differences between the ranks
remain in the residuals for ever, and these grow (epfml/powersgd, issue 3).

All ranks have the same bits if they run the same kernels, since each orthonormalizes P by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from pycomm.codecs import Cast, PowerSGD, RandomKey
from pycomm.codecs.powersgd import orthonormal
from pycomm.codecs.products import product
from pycomm.reduction.bucket import BucketPiece


class Memory:
    """The Q from which each matrix's next step starts, transposed, by parameter name.

    They are equal on all ranks. `commit` replaces them with those of the step; without it the step
    has no effect.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._next: dict[str, torch.Tensor] = {}

    def factor(
        self, name: str, shape: tuple[int, int], device: torch.device
    ) -> torch.Tensor | None:
        """Return a matrix's factor, or None if there is none of this shape."""
        kept = self._kept.get(name)
        if kept is None or tuple(kept.shape) != shape:
            return None
        return kept.to(device)  # a state may have been loaded to another one

    def put(self, name: str, factor: torch.Tensor) -> None:
        """Propose the factor for the next step."""
        self._next[name] = factor

    def commit(self, finite: bool) -> None:
        """End a step: keep its factors if it was finite, else drop them."""
        if finite:
            self._kept.update(self._next)
        self._next.clear()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all factors by parameter name."""
        return {
            name: {"values": factor.clone(), "left": False} for name, factor in self._kept.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Restore the factors from `state_dict`, on any number of ranks."""
        self._kept = {
            name: saved["values"].clone() for name, saved in state.items() if not saved["left"]
        }
        self._next.clear()


class _Matrix:
    """A matrix in an exchange; M is computed in the new residual's memory, if there is one."""

    def __init__(
        self, target: torch.Tensor, piece: BucketPiece, memory: Memory, key: RandomKey
    ) -> None:
        codec = cast("PowerSGD", piece.codec)
        (rows, columns), width = codec.shape(piece.numel), codec.width(piece.numel)
        self.name, self.memory = piece.name, memory
        self.target = target.view(rows, columns)
        self.residual = piece.residual
        self.matrix = self.target
        if piece.residual is not None:
            room = piece.residual.room()
            self.matrix = torch.add(target, piece.residual.load_worker(), out=room).view(
                rows, columns
            )
        kept = memory.factor(piece.name, (width, columns), target.device)
        self.right = codec.start(piece.numel, key, target.device).t() if kept is None else kept

    def first(self) -> torch.Tensor:
        """Return what this rank sends first, its P."""
        return product(self.matrix, self.right.t())

    def second(self, mean: torch.Tensor) -> torch.Tensor:
        """Take the mean of all ranks' P; return what this rank sends then, its Q."""
        self.left = orthonormal(mean.view(len(self.matrix), -1))
        mine = product(self.left.t(), self.matrix)
        if self.residual is not None:
            self.matrix.addmm_(self.left, mine, alpha=-1)
            self.residual.store_worker(self.matrix.view(-1))
        return mine

    def finish(self, mean: torch.Tensor) -> None:
        """Take the mean of all ranks' Q, and write the result."""
        right = mean.view_as(self.right)
        torch.mm(self.left, right, out=self.target)
        # The scale of Q is irrelevant, and would be squared in each step.
        top = right.abs().max()
        self.memory.put(self.name, torch.where(top > 0, right / top, self.right))


class Exchange:
    """The average of one bucket: `__init__` starts it, `turn` and `finish` continue it.

    Each of these begins or ends a collective, so all ranks must call them for all their exchanges
    in one order. Callbacks of futures would run in different orders on different ranks, and the
    collectives of the group would be mismatched.

    Args:
        tensor: of any float type; pieces of it are averaged in place.
        pieces: pieces with the codec PowerSGD, and exact ones. They may have residuals.
        memory: the factors from which matrices start.
        group: the ranks that average.
        seed: equal on all ranks.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        pieces: Sequence[BucketPiece],
        memory: Memory,
        group: dist.ProcessGroup,
        *,
        seed: int,
    ) -> None:
        devices: list[int | str | torch.device] = [] if tensor.is_cpu else [tensor.device]
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        """Of the tensor."""
        self._tensor, self._group = tensor, group
        values = self._values = tensor.float().contiguous()
        self._parts: list[torch.Tensor | _Matrix] = []
        for piece in pieces:
            target = values[piece.offset : piece.offset + piece.numel]
            if isinstance(piece.codec, PowerSGD):
                key = RandomKey(seed, 0, piece.tensor)
                self._parts.append(_Matrix(target, piece, memory, key))
                continue
            if piece.residual is not None:  # from the codec that it had before
                target.add_(piece.residual.load_worker())
                piece.residual.store_worker(torch.zeros_like(target))
            self._parts.append(target)
        self._matrices = [part for part in self._parts if isinstance(part, _Matrix)]
        self._finite = [values.new_ones((), dtype=torch.bool)]
        self._send([p.first() if isinstance(p, _Matrix) else p for p in self._parts])

    def turn(self) -> None:
        """Wait for the first message, and send the second."""
        following = []
        for part, mean in zip(self._parts, self._receive(), strict=True):
            if isinstance(part, _Matrix):
                following.append(part.second(mean))
            else:
                part.copy_(mean)
        self._send(following)

    def finish(self) -> None:
        """Wait for the second message, and write the result."""
        for matrix, mean in zip(self._matrices, self._receive(), strict=True):
            matrix.finish(mean)
        if self._values.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._values)

    def complete(self) -> None:
        """Complete the future; if nothing has finished before, the values are undefined."""
        self.future.set_result(self._tensor)

    @property
    def finite(self) -> bool:
        """Return whether all averages are finite."""
        return all(bool(verdict) for verdict in self._finite)

    def _send(self, mine: list[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in mine]
        if mine:
            self._sent = torch.cat([tensor.reshape(-1) for tensor in mine])
            self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)

    def _receive(self) -> Sequence[torch.Tensor]:
        if not self._sizes:
            return []
        self._work.wait()
        # The divisor is a tensor: for a number torch multiplies by its reciprocal, which rounds
        # differently.
        mean = self._sent.div_(torch.full_like(self._sent, self._group.size()))
        self._finite.append(mean.isfinite().all())
        return torch.split(mean, self._sizes)


def takes(piece: BucketPiece) -> bool:
    """Return whether an exchange can average this piece."""
    return isinstance(piece.codec, PowerSGD) or piece.codec == Cast("float32")


class Exchanges:
    """The exchanges of one step; all turn and finish at its end, in the order of their starts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.memory = Memory()
        self._group = group
        self._under_way: list[tuple[Exchange, Callable[[], None]]] = []

    def start(
        self,
        tensor: torch.Tensor,
        pieces: Sequence[BucketPiece],
        at_last: Callable[[], None],
        *,
        seed: int,
    ) -> Exchange:
        """Begin to average pieces of a tensor; `at_last` is called before the future is done."""
        exchange = Exchange(tensor, pieces, self.memory, self._group, seed=seed)
        self._under_way.append((exchange, at_last))
        return exchange

    def finish(self) -> None:
        """Complete all exchanges."""
        try:
            for exchange, _ in self._under_way:
                exchange.turn()
            while self._under_way:
                exchange, at_last = self._under_way[0]
                exchange.finish()
                at_last()
                self._under_way.pop(0)
                exchange.complete()
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop the exchanges of a step that did not complete.

        Whoever waits for one of their futures gets the tensor, whose values are undefined.
        """
        while self._under_way:
            self._under_way.pop()[0].complete()
