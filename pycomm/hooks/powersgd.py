"""PowerSGD (Vogels et al. 2019): a bucket's matrices are averaged as products of thin factors.

With M what a rank contributes to a matrix, its gradient and what it still owes: P is the mean of
M Q over all ranks, made orthonormal; then Q the mean of M^T P; the result is P Q^T. Both means are
plain all-reduces in float32, in which everything of a bucket travels as one tensor. The next step
starts from this step's Q. If the mean of M has a rank of at most that of the factors, the result is
that mean, but for rounding. With ``alternate=1`` steps send P and Q in turns, against the other
factor of the step before (Zhang et al. 2023, "Evaluation and Optimization of Gradient Compression
for Distributed Deep Learning", ACP-SGD).

What a rank owes is what was lost of its own M, M - P (M^T P)^T with its own M^T P. The paper takes
the global P Q^T, whose mean over the ranks is the same; but then what the ranks disagree about
remains in the residuals for ever and they grow (epfml/powersgd, issue 3).

All ranks have the same bits where they run the same kernels: they make P orthonormal by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from pycomm.codecs import Cast, PowerSGD, RandomKey
from pycomm.codecs.powersgd import orthonormal
from pycomm.hooks.bucket import Piece


@dataclass(frozen=True)
class Factor:
    """One factor of a matrix: P [rows, width], or Q transposed [width, columns]."""

    values: torch.Tensor
    left: bool


class Memory:
    """The factor that each matrix's next step starts from, by parameter name.

    It is equal on all ranks. A step's factors replace it by `commit`; without it the step has left
    no trace.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Factor] = {}
        self._next: dict[str, Factor] = {}

    def factor(self, name: str, left: tuple[int, int], right: tuple[int, int]) -> Factor | None:
        """Return a matrix's factor, or None if there is none of the shape that its side has."""
        kept = self._kept.get(name)
        if kept is None or tuple(kept.values.shape) != (left if kept.left else right):
            return None
        return kept

    def put(self, name: str, factor: Factor) -> None:
        """Propose the factor for the next step."""
        self._next[name] = factor

    def commit(self, finite: bool) -> None:
        """End a step: keep what it has put, or forget that."""
        if finite:
            self._kept.update(self._next)
        self._next.clear()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all factors by parameter name."""
        return {
            name: {"values": factor.values.clone(), "left": factor.left}
            for name, factor in self._kept.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over what `state_dict` returned, on any number of ranks."""
        self._kept = {
            name: Factor(saved["values"].clone(), saved["left"]) for name, saved in state.items()
        }
        self._next.clear()


Following = tuple[torch.Tensor, Callable[[torch.Tensor], None]]
"""What a rank sends next, and what takes the mean of what all have sent then."""


class _Part(ABC):
    """One parameter in an exchange, which averages what the parts of all ranks send."""

    @abstractmethod
    def first(self) -> torch.Tensor:
        """Return what this rank sends."""

    @abstractmethod
    def second(self, mean: torch.Tensor) -> Following | None:
        """Take the mean of what all have sent; return what follows, None if that was all."""


class _Exact(_Part):
    """Values as they are."""

    def __init__(self, target: torch.Tensor, piece: Piece) -> None:
        self.target = target
        if piece.residual is not None:  # of a codec that it had before
            target.add_(piece.residual.owed())
            piece.residual.owe(torch.zeros_like(target))

    def first(self) -> torch.Tensor:
        return self.target

    def second(self, mean: torch.Tensor) -> None:
        self.target.copy_(mean)


class _Matrix(_Part):
    """A matrix; its M stands in the new residual, where there is one, until it is what is owed."""

    def __init__(self, target: torch.Tensor, piece: Piece, memory: Memory) -> None:
        codec = cast(PowerSGD, piece.codec)
        (rows, columns), width = codec.shape(piece.numel), codec.width(piece.numel)
        self.name, self.memory = piece.name, memory
        self.target = target.view(rows, columns)
        self.residual = piece.residual
        self.matrix = self.target
        if piece.residual is not None:
            room = piece.residual.room()
            self.matrix = torch.add(target, piece.residual.owed(), out=room).view(rows, columns)
        self.codec, self.numel = codec, piece.numel
        self.kept = memory.factor(piece.name, (rows, width), (width, columns))

    def start(self, key: RandomKey) -> torch.Tensor:
        """Return the very first Q, transposed."""
        return self.codec.start(self.numel, key, self.target.device).t()

    def owe(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Leave in the residual what this rank's own factors have not told."""
        if self.residual is not None:
            self.matrix.addmm_(left, right, alpha=-1)
            self.residual.owe(self.matrix.view(-1))


class _BothTurns(_Matrix):
    """P, then Q."""

    def __init__(self, target: torch.Tensor, piece: Piece, memory: Memory, key: RandomKey) -> None:
        super().__init__(target, piece, memory)
        self.right = self.kept.values if self.kept else self.start(key)

    def first(self) -> torch.Tensor:
        return self.matrix @ self.right.t()

    def second(self, mean: torch.Tensor) -> Following:
        self.left = orthonormal(mean.view(len(self.matrix), -1))
        mine = self.left.t() @ self.matrix
        self.owe(self.left, mine)
        return mine, self._finish

    def _finish(self, mean: torch.Tensor) -> None:
        right = mean.view_as(self.right)
        torch.mm(self.left, right, out=self.target)
        # The scale of Q means nothing, and would be squared in each step.
        top = right.abs().max()
        self.memory.put(self.name, Factor(torch.where(top > 0, right / top, self.right), False))


class _OneTurn(_Matrix):
    """P in one step, Q in the next."""

    def __init__(self, target: torch.Tensor, piece: Piece, memory: Memory, key: RandomKey) -> None:
        super().__init__(target, piece, memory)
        self.basis = self.kept or _right_basis(self.start(key))

    def first(self) -> torch.Tensor:
        basis = self.basis.values
        if self.basis.left:
            mine = basis.t() @ self.matrix
            self.owe(basis, mine)
        else:
            mine = self.matrix @ basis.t()
            self.owe(mine, basis)
        return mine

    def second(self, mean: torch.Tensor) -> None:
        basis = self.basis.values
        if self.basis.left:
            right = mean.view(-1, self.target.shape[1])
            torch.mm(basis, right, out=self.target)
            following = _right_basis(right)
        else:
            left = mean.view(self.target.shape[0], -1)
            torch.mm(left, basis, out=self.target)
            following = Factor(orthonormal(left), True)
        self.memory.put(self.name, following)


def _right_basis(right: torch.Tensor) -> Factor:
    return Factor(orthonormal(right.t()).t().contiguous(), False)


class Exchange:
    """One bucket on its way: `__init__` starts it, `turn` and `finish` go on.

    Each begins or ends a collective. So all ranks must call them for all their exchanges in one
    order: in callbacks of futures they would not be, and collectives of a group that start in
    different orders on different ranks cross.

    Args:
        values: float32, contiguous; pieces of it are averaged in place.
        pieces: those with PowerSGD as their codec, and exact ones. They may have residuals.
        memory: what the matrices start from.
        group: where to average.
        seed: equal on all ranks.
        step: number of the step, below 2^32.
    """

    def __init__(
        self,
        values: torch.Tensor,
        pieces: Sequence[Piece],
        memory: Memory,
        group: dist.ProcessGroup,
        *,
        seed: int,
        step: int,
    ) -> None:
        self._group = group
        parts: list[_Part] = []
        for piece in pieces:
            target = values[piece.offset : piece.offset + piece.numel]
            codec = piece.codec
            if not isinstance(codec, PowerSGD):
                parts.append(_Exact(target, piece))
                continue
            key = RandomKey(seed, step if codec.restart else 0, piece.tensor)
            kind = _OneTurn if codec.alternate else _BothTurns
            kept = Memory() if codec.restart else memory
            parts.append(kind(target, piece, kept, key))
        self._finite = [values.new_ones((), dtype=torch.bool)]
        self._takers: list[Callable[[torch.Tensor], Following | None]]
        self._takers = [part.second for part in parts]
        self._send([part.first() for part in parts])

    def turn(self) -> None:
        """Wait for what was sent first, and send what follows from it."""
        following = [found for found in self._receive() if found is not None]
        self._takers = [take for _, take in following]
        self._send([mine for mine, _ in following])

    def finish(self) -> None:
        """Wait for that, and write the result."""
        self._receive()

    @property
    def finite(self) -> bool:
        """Whether all that has been averaged is finite."""
        return all(bool(verdict) for verdict in self._finite)

    def _send(self, mine: list[torch.Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in mine]
        if mine:
            self._sent = torch.cat([tensor.reshape(-1) for tensor in mine])
            self._work = dist.all_reduce(self._sent, group=self._group, async_op=True)

    def _receive(self) -> list[Following | None]:
        if not self._takers:
            return []
        self._work.wait()
        # By a tensor: torch multiplies by the reciprocal of a number, which rounds differently.
        mean = self._sent.div_(torch.full_like(self._sent, self._group.size()))
        self._finite.append(mean.isfinite().all())
        means = torch.split(mean, self._sizes)
        return [take(part) for take, part in zip(self._takers, means, strict=True)]


def takes(piece: Piece) -> bool:
    """Whether an exchange can average this piece."""
    return isinstance(piece.codec, PowerSGD) or piece.codec == Cast("float32")


@dataclass(frozen=True)
class _UnderWay:
    exchange: Exchange
    values: torch.Tensor
    tensor: torch.Tensor
    at_last: Callable[[], None]
    future: torch.futures.Future[torch.Tensor]


class Exchanges:
    """The exchanges of one step: all turn and finish when it ends, in the order of their starts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.memory = Memory()
        self._group = group
        self._under_way: list[_UnderWay] = []

    def start(
        self,
        tensor: torch.Tensor,
        pieces: Sequence[Piece],
        at_last: Callable[[], None],
        **options: int,
    ) -> tuple[Exchange, torch.futures.Future[torch.Tensor]]:
        """Begin to average pieces of a tensor of any float type.

        Args:
            tensor: holds the result when the future is done.
            pieces: see `Exchange`; and `options` too.
            at_last: is called before the future is done.
        """
        values = tensor.float().contiguous()
        exchange = Exchange(values, pieces, self.memory, self._group, **options)
        devices: list[int | str | torch.device] = [] if tensor.is_cpu else [tensor.device]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._under_way.append(_UnderWay(exchange, values, tensor, at_last, future))
        return exchange, future

    def finish(self) -> None:
        """End all of them."""
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            one.exchange.turn()
        for one in under_way:
            one.exchange.finish()
            if one.values.data_ptr() != one.tensor.data_ptr():
                one.tensor.copy_(one.values)
            one.at_last()
            one.future.set_result(one.tensor)

    def forget(self) -> None:
        """Leave alone what a step that was broken off has begun."""
        self._under_way.clear()
