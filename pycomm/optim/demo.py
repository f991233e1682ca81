"""DeMo: ranks send the fast components of their momenta, and keep the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pycomm.arguments import number, whole
from pycomm.codecs.products import product
from pycomm.optim.base import LocalGradientOptimizer, Part, entered
from pycomm.policy import Policy
from pycomm.reduction.state import CompressionState

_RECORD = 4096  # coefficients among which the largest are chosen: a chunk of 64 x 64


class DeMo(LocalGradientOptimizer):
    """Decoupled momentum: what a rank sends leaves its momentum, and the sign of the sum moves.

    With a rank's gradient g and momentum d, and the cosine transform T of chunks, a step is

        d <- b d + lr g;  q = the largest of T d in each chunk;  d <- d - T' q
        x <- x (1 - lr wd) - lr sign(T' mean of q)

    where each coefficient is averaged over the ranks that have sent it (Peng et al. 2024, "DeMo:
    decoupled momentum optimization", arXiv 2411.19870, algorithm 1). T is the orthonormal DCT-II of
    both dimensions; the sides of a chunk are the largest divisors of the parameter's sides up to
    `chunk`, and a parameter of more dimensions is a matrix of its first one. Chunks of less than
    2049 values share one, of 4096 values, in which `largest` of them are chosen.

    The momentum is the residual of the coding, with feedback of the kind decay, so it is in
    `compression.state_dict()`. Results are equal on all ranks, if matrix products are: ranks on
    processors of different kinds may disagree about the sign of values near zero.

    Collective, and gradients as for `pycomm.DistributedLion`.

    Args:
        params: parameters or groups, as for other optimizers of torch.
        lr: learning rate, of the size of AdamW's.
        beta: share of the momentum that is kept in a step.
        weight_decay: decoupled weight decay.
        model: the model of these parameters, in `DistributedDataParallel`.
        largest: coefficients that a rank sends of each 4096.
        chunk: longest side of a chunk, at most 64.
        values: format in which they travel: "float32" or "int8".
        scaler: the `torch.amp.GradScaler` of the gradients, if there is one.

    Raises:
        TypeError: the model is not in DDP, or an argument has another type.
        ValueError: an option is out of range, or a parameter does not belong to the model.
        Error: the model has a communication hook already.
        WireMismatch: ranks have different options; on all ranks, before anything else is sent.

    Example:
        >>> optimizer = pycomm.DeMo(model.parameters(), lr=1e-3, model=model)  # doctest: +SKIP
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        beta: float = 0.999,
        weight_decay: float = 0.0,
        *,
        model: nn.Module,
        largest: int = 32,
        chunk: int = 64,
        values: str = "float32",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._beta = number("beta", beta)
        if not 0 <= self._beta < 1:
            raise ValueError(f"DeMo: beta={beta}: it is from 0 to below 1")
        density = whole("largest", largest, 1, _RECORD) / _RECORD
        self._chunk = whole("chunk", chunk, 1, math.isqrt(_RECORD))
        self._codec = f"topk:density={density!r},values={values},indices=int12"
        self._policy = Policy(self._codec, rules=(), guard=None)
        terms = [f"beta={beta}", f"largest={largest}", f"chunk={chunk}", f"values={values}"]
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(params, defaults, model=model, scaler=scaler, terms=terms)

    def _make_state(self) -> CompressionState:
        feedback = f"decay:{self._beta!r},storage=float32"
        group = self.process_group
        state = CompressionState(self._policy, process_group=group, feedback=feedback)
        state.averages_senders = True
        return state

    def _enter(self, name: str, parameter: torch.Tensor) -> None:
        numel = _Chunks(parameter.shape, self._chunk).numel
        self.compression.add(name, entered((numel,), parameter.device))

    def _take(self, parts: list[Part]) -> None:
        chunks = {part.name: _Chunks(part.parameter.shape, self._chunk) for part in parts}
        found = self._exchange(
            {p.name: chunks[p.name].transform(p.gradient * float(p.group["lr"])) for p in parts}
        )
        if found is None:
            return
        for part in parts:
            lr, weight_decay = float(part.group["lr"]), float(part.group["weight_decay"])
            update = chunks[part.name].inverse(found[part.name]).sign_()
            part.parameter.mul_(1 - lr * weight_decay)
            part.parameter.add_(update.to(part.parameter.dtype), alpha=-lr)


class _Chunks:
    """The chunks of a parameter, whose coefficients lie in records of 4096, with zeros behind.

    Args:
        shape: shape of the parameter.
        longest: longest side of a chunk.
    """

    def __init__(self, shape: torch.Size, longest: int) -> None:
        self._shape = shape
        rows = shape[0] if len(shape) > 1 else 1
        columns = shape.numel() // max(1, rows)
        self._sides = _divisor(rows, longest), _divisor(columns, longest)
        self._counts = rows // self._sides[0], columns // self._sides[1]
        self._size = math.prod(self._sides)
        self._shared = max(1, _RECORD // self._size)  # chunks of a record
        self._records = -(-math.prod(self._counts) // self._shared)
        self.numel = self._records * _RECORD
        """Number of coefficients, with padding."""

    def transform(self, values: torch.Tensor) -> torch.Tensor:
        """Return the coefficients of a parameter [numel]."""
        (n, m), (h, w) = self._counts, self._sides
        blocks = values.reshape(n, h, m, w).transpose(1, 2)
        left, right = _cosines(h, values.device), _cosines(w, values.device)
        found = product(product(left, blocks), right.T)
        flat = found.reshape(-1)
        inside = self._shared * self._size
        rows = F.pad(flat, (0, self._records * inside - flat.numel())).view(-1, inside)
        return F.pad(rows, (0, _RECORD - inside)).reshape(-1)

    def inverse(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Return the values [shape] that have these coefficients."""
        (n, m), (h, w) = self._counts, self._sides
        inside = self._shared * self._size
        flat = coefficients.view(-1, _RECORD)[:, :inside].reshape(-1)[: n * m * h * w]
        blocks = flat.view(n, m, h, w)
        left, right = _cosines(h, flat.device), _cosines(w, flat.device)
        found = product(product(left.T, blocks), right)
        return found.transpose(1, 2).reshape(self._shape)


def _divisor(count: int, most: int) -> int:
    """Return the largest divisor up to a bound."""
    return next(d for d in range(min(max(1, count), most), 0, -1) if count % d == 0)


@cache
def _cosines(side: int, device: torch.device) -> torch.Tensor:
    """Return the matrix of the orthonormal DCT-II, float32 [side, side]."""
    places = torch.arange(side, dtype=torch.float64, device="cpu")
    matrix = torch.cos(math.pi / side * torch.outer(places, places + 0.5)) * math.sqrt(2 / side)
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)
