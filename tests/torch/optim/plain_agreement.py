"""Coded optimizers in plain torch, and the share of the ranks' squares that is their mean's."""

from __future__ import annotations

from typing import Any

import torch

import pycomm
from pycomm.momentum import agreement
from tests.torch.optim.plain_moment import FLOOR, signs_of

SIZES: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SIZES_OF_SGD: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}


class Agreement:
    """What share of the gradients' squares is that of their mean, from one random number a row."""

    def __init__(self, rows: int, columns: int) -> None:
        self.stride, self.columns = max(1, -(-rows // agreement.ROWS)), columns
        self.steps, self.energies = 0, [0.0, 0.0]

    def share(self, gs: list[torch.Tensor], beta2: float) -> float:
        signs = signs_of(self.columns, self.steps)
        matrices = [g.view(-1, self.columns)[self.steps % self.stride :: self.stride] for g in gs]
        found = [matrix @ signs for matrix in matrices]
        mean = sum(found) / len(gs)
        squares = mean.square().sum(), sum(z.square().sum() for z in found) / len(gs)
        self.energies = [
            beta2 * before + (1 - beta2) * float(now)
            for before, now in zip(self.energies, squares, strict=True)
        ]
        self.steps += 1
        of_mean, own = self.energies
        return round(256 * min(1.0, max(1 / len(gs), of_mean / own))) / 256


class Evenness:
    """How evenly rows or columns are heard, on which their floor depends."""

    def __init__(self, count: int) -> None:
        self.mean, self.square = torch.zeros(count), torch.zeros(count)

    def listen(self, sums: torch.Tensor) -> None:
        share = sums / sums.mean()
        self.mean = 0.99 * self.mean + 0.01 * share
        self.square = 0.99 * self.square + 0.01 * share.square()

    def floor(self, squares: torch.Tensor) -> torch.Tensor:
        """The least squares of the second moments, given these."""
        even = self.mean.square() / self.square.clamp_min(1e-30)
        return FLOOR**2 * squares.mean() * (1 - even / 0.5).clamp_min(1e-4)


class PlainAdamW:
    """The algorithm for one matrix on all ranks, written down from its description.

    Its rows are dealt to `shards` ranks, whose shards are coded one by one.
    """

    divides = True

    def __init__(self, start: torch.Tensor, ranks: int, codec: str, shards: int = 1) -> None:
        self.x, self.codec, self.ranks = start.clone(), pycomm.codec(codec), ranks
        self.m = torch.zeros_like(start)
        self.o = [torch.zeros_like(start) for _ in range(ranks)]
        self.padded = -(-start.shape[0] // shards)
        size = self.padded * start.shape[1]
        self.e = [[torch.zeros(size) for _ in range(shards)] for _ in range(ranks)]
        self.row, self.column = torch.zeros(start.shape[0]), torch.zeros(start.shape[1])
        self.heard = Evenness(start.shape[0]), Evenness(start.shape[1])
        self.weight = 0.0
        self.v = pycomm.policy.quality.nominal_error(self.codec) ** 2
        self.t, self.agreement = 0, Agreement(*start.shape)

    @property
    def betas(self) -> tuple[float, float]:
        betas: tuple[float, float] = SIZES["betas"]
        return betas

    @property
    def kept(self) -> float:
        """What is kept of the momentum is this times a mean of gradients."""
        return 1.0

    def step(self, gs: list[torch.Tensor]) -> None:
        beta1, beta2 = self.betas
        row = sum(g.square().sum(1) for g in gs) / self.ranks
        column = sum(g.square().sum(0) for g in gs) / self.ranks
        r, c, weight = (self.row, self.column, self.weight) if self.t else (row, column, 1.0)
        floors = [heard.floor(one) for heard, one in zip(self.heard, (r, c), strict=True)]
        r, c = torch.maximum(r, floors[0]) / (r.sum() * weight), torch.maximum(c, floors[1])
        d = torch.outer(r.sqrt(), c.sqrt()) if self.divides else torch.ones_like(self.x)
        v = min(0.99, float(self.v))
        b = max(0.0, int(1024 * (beta1 - v) / (1 - v)) / 1024)
        left = coded = 0.0
        for rank, g in enumerate(gs):
            p = ((1 - b) * g + b * self.o[rank] / self.kept) / d
            rows = []
            for shard, part in enumerate(p.split(self.padded)):
                padded = torch.zeros_like(self.e[rank][shard])
                padded[: part.numel()] = part.reshape(-1)
                left += float(self.e[rank][shard].square().sum())
                padded += self.e[rank][shard]
                coded += float(padded.square().sum())
                q = self.codec.decode(self.codec.encode(padded), padded.numel())
                self.e[rank][shard] = padded - q
                rows.append(q[: part.numel()].view_as(part))
            self.o[rank] = torch.cat(rows) * d * self.kept
        self.m = sum(self.o) / self.ranks / self.kept
        share = self.agreement.share(gs, beta2)
        self.row = beta2 * self.row + (1 - beta2) * share * row
        self.column = beta2 * self.column + (1 - beta2) * share * column
        self.weight = beta2 * self.weight + 1 - beta2
        for heard, sums in zip(self.heard, (row, column), strict=True):
            heard.listen(sums)
        if left > 0:
            self.v = 0.75 * self.v + 0.25 * left / coded
        self.t += 1
        self.move()

    def move(self) -> None:
        row, column = (
            torch.maximum(s, heard.floor(s))
            for heard, s in zip(self.heard, (self.row, self.column), strict=True)
        )
        full = torch.outer(row, column) / self.row.sum() / self.weight
        moved = self.m / (1 - self.betas[0] ** self.t) / full.sqrt()
        self.x = self.x * (1 - SIZES["lr"] * SIZES["weight_decay"]) - SIZES["lr"] * moved


class PlainSGD(PlainAdamW):
    """The same for SGD, whose momentum may change."""

    divides = False
    momentum: float = SIZES_OF_SGD["momentum"]

    @property
    def betas(self) -> tuple[float, float]:
        return self.momentum, 0.99

    @property
    def kept(self) -> float:
        return 1 / (1 - self.momentum)

    def move(self) -> None:
        lr = SIZES_OF_SGD["lr"] * self.kept
        self.x = self.x * (1 - lr * SIZES_OF_SGD["weight_decay"]) - lr * self.m
