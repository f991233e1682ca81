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

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from pycomm.codecs import Cast, PowerSGD, RandomKey
from pycomm.codecs.powersgd import orthonormal
from pycomm.codecs.products import product
from pycomm.reduction.bucket import BucketPiece

Future = torch.futures.Future[torch.Tensor]


class _Matrix:
    """A matrix in an exchange."""

    def __init__(
        self, target: torch.Tensor, piece: BucketPiece, kept: torch.Tensor | None, seed: int
    ) -> None:
        codec = cast("PowerSGD", piece.codec)
        (rows, columns), width = codec.shape(piece.numel), codec.width(piece.numel)
        self.name = piece.name
        self.target = target.view(rows, columns)
        self.residual = piece.residual
        self.matrix = self.target
        if piece.residual is not None:
            self.matrix = (target + piece.residual.load_worker()).view(rows, columns)
        if kept is None or tuple(kept.shape) != (width, columns):
            key = RandomKey(seed, 0, piece.tensor)
            self.right = codec.start(piece.numel, key, target.device).t()
        else:
            self.right = kept.to(target.device)  # a state may have been loaded to another one

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

    def finish(self, mean: torch.Tensor) -> torch.Tensor:
        """Take the mean of all ranks' Q, and write the result; return the next step's first Q."""
        right = mean.view_as(self.right)
        torch.mm(self.left, right, out=self.target)
        # The scale of Q is irrelevant, and would be squared in each step.
        top = right.abs().max()
        return torch.where(top > 0, right / top, self.right)


def takes(piece: BucketPiece) -> bool:
    """Return whether an exchange can average this piece."""
    return isinstance(piece.codec, PowerSGD) or piece.codec == Cast("float32")


class Exchanges:
    """The averages of a step's buckets, and the Q from which each matrix's next step starts.

    An average is a generator: it has sent a message at each `yield`, and waits for it behind that.
    Each of these begins or ends a collective, so all ranks must go on with all their averages in
    one order, that of their starts. Callbacks of futures would run in different orders on different
    ranks, and the collectives of the group would be mismatched.

    Args:
        group: the ranks that average.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: list[tuple[Future, torch.Tensor, Iterator[None]]] = []
        # Q, transposed, by parameter name; equal on all ranks. `commit` replaces them with those of
        # the step; without it the step has no effect.
        self._kept: dict[str, torch.Tensor] = {}
        self._next: dict[str, torch.Tensor] = {}

    def start(
        self,
        tensor: torch.Tensor,
        pieces: Sequence[BucketPiece],
        at_last: Callable[[], None],
        *,
        seed: int,
    ) -> tuple[Future, Callable[[], bool]]:
        """Begin to average pieces of a tensor, in place.

        Args:
            tensor: of any float type.
            pieces: pieces with the codec PowerSGD, and exact ones. They may have residuals.
            at_last: called before the future is done.
            seed: equal on all ranks.

        Returns:
            A future of the tensor, and a function that returns whether all averages are finite.
        """
        devices: list[int | str | torch.device] = [] if tensor.is_cpu else [tensor.device]
        future: Future = torch.futures.Future(devices=devices)
        finite: list[torch.Tensor] = []
        average = self._average(tensor, pieces, at_last, seed, finite)
        next(average)
        self._under_way.append((future, tensor, average))
        return future, lambda: all(bool(verdict) for verdict in finite)

    def _average(
        self,
        tensor: torch.Tensor,
        pieces: Sequence[BucketPiece],
        at_last: Callable[[], None],
        seed: int,
        finite: list[torch.Tensor],
    ) -> Iterator[None]:
        values = tensor.float().contiguous()
        targets = [values[piece.offset : piece.offset + piece.numel] for piece in pieces]
        matrices: dict[int, _Matrix] = {}
        mine = []
        for place, (piece, target) in enumerate(zip(pieces, targets, strict=True)):
            if isinstance(piece.codec, PowerSGD):
                matrices[place] = _Matrix(target, piece, self._kept.get(piece.name), seed)
                target = matrices[place].first()
            elif piece.residual is not None:  # from the codec that it had before
                target.add_(piece.residual.load_worker())
                piece.residual.store_worker(torch.zeros_like(target))
            mine.append(target)
        means = yield from self._mean(mine, finite)
        mine = []
        for place, mean in enumerate(means):
            if place in matrices:
                mine.append(matrices[place].second(mean))
            else:
                targets[place].copy_(mean)
        means = (yield from self._mean(mine, finite)) if mine else ()
        for matrix, mean in zip(matrices.values(), means, strict=True):
            self._next[matrix.name] = matrix.finish(mean)
        if values.data_ptr() != tensor.data_ptr():
            tensor.copy_(values)
        at_last()

    def _mean(
        self, mine: Sequence[torch.Tensor], finite: list[torch.Tensor]
    ) -> Generator[None, None, Sequence[torch.Tensor]]:
        """Send tensors; return the ranks' means, of which `finite` gets whether they are so."""
        sent = torch.cat([tensor.reshape(-1) for tensor in mine])
        work = dist.all_reduce(sent, group=self._group, async_op=True)
        yield
        work.wait()
        # The divisor is a tensor: for a number torch multiplies by its reciprocal, which rounds
        # differently.
        mean = sent.div_(torch.full_like(sent, self._group.size()))
        finite.append(mean.isfinite().all())
        return torch.split(mean, [tensor.numel() for tensor in mine])

    def finish(self) -> None:
        """Complete all averages."""
        try:
            for *_, average in self._under_way:
                next(average, None)
            while self._under_way:
                future, tensor, average = self._under_way[0]
                next(average, None)
                self._under_way.pop(0)
                future.set_result(tensor)
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Drop the averages of a step that did not complete.

        Whoever waits for one of their futures gets the tensor, whose values are undefined.
        """
        while self._under_way:
            future, tensor, _ = self._under_way.pop()
            future.set_result(tensor)

    def commit(self, finite: bool) -> None:
        """End a step: keep its Q if it was finite, else drop them."""
        if finite:
            self._kept.update(self._next)
        self._next.clear()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of each matrix's Q by parameter name."""
        return {name: {"values": q.clone(), "left": False} for name, q in self._kept.items()}

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Restore them from `state_dict`, on any number of ranks."""
        self._kept = {
            name: saved["values"].clone() for name, saved in state.items() if not saved["left"]
        }
        self._next.clear()
