"""DeMo, against its formula in numpy and plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.optim.demo import _Chunks
from tests.torch.harness import equal, values

# Sides of 64 and 48, a single chunk of 50 x 50, four dimensions, and a vector.
SHAPES = {"wide": (128, 96), "odd": (50, 50), "conv": (32, 8, 4, 2), "bias": (192,)}
LR, BETA, DECAY, LARGEST = 2.0**-6, 0.75, 0.25, 32


class Given(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            setattr(self, name, nn.Parameter(torch.full(shape, 0.25 * (i + 1))))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def cosine(x: np.ndarray) -> np.ndarray:
    """The DCT-II of the last axis, orthonormal, from its definition."""
    n = x.shape[-1]
    rows = []
    for k in range(n):
        wave = np.cos(math.pi * (2 * np.arange(n) + 1) * k / (2 * n))
        rows.append(x @ wave * math.sqrt((1 if k == 0 else 2) / n))
    return np.stack(rows, axis=-1)


def inverse(c: np.ndarray) -> np.ndarray:
    n = c.shape[-1]
    x = np.zeros_like(c)
    for k in range(n):
        wave = np.cos(math.pi * (2 * np.arange(n) + 1) * k / (2 * n))
        x += c[..., k : k + 1] * wave * math.sqrt((1 if k == 0 else 2) / n)
    return x


def both(f, x: np.ndarray) -> np.ndarray:  # type: ignore[no-untyped-def]
    return f(f(x).swapaxes(-1, -2)).swapaxes(-1, -2)


class Plain:
    """Algorithm 1 for one parameter on all ranks, in float64."""

    def __init__(self, shape: tuple[int, ...], start: float, ranks: int) -> None:
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape) // rows
        self.h, self.w = (max(d for d in range(1, 65) if n % d == 0) for n in (rows, columns))
        self.x = np.full((rows, columns), start)
        self.d = [np.zeros((rows, columns)) for _ in range(ranks)]

    def chunks(self, x: np.ndarray) -> np.ndarray:
        n, m = x.shape[0] // self.h, x.shape[1] // self.w
        return x.reshape(n, self.h, m, self.w).swapaxes(1, 2).reshape(-1, self.h, self.w)

    def whole(self, chunks: np.ndarray) -> np.ndarray:
        n, m = self.x.shape[0] // self.h, self.x.shape[1] // self.w
        return chunks.reshape(n, m, self.h, self.w).swapaxes(1, 2).reshape(self.x.shape)

    def step(self, gs: list[np.ndarray]) -> np.ndarray:
        """Take a step; return the values whose signs it uses."""
        total = np.zeros_like(self.chunks(self.x))
        senders = np.zeros_like(total)
        share = max(1, 4096 // (self.h * self.w))
        for rank, g in enumerate(gs):
            self.d[rank] = BETA * self.d[rank] + LR * g.reshape(self.x.shape)
            c = both(cosine, self.chunks(self.d[rank]))
            q = np.zeros_like(c)
            for first in range(0, len(c), share):
                flat = c[first : first + share].reshape(-1)
                chosen = np.argsort(-np.abs(flat), kind="stable")[:LARGEST]
                part = np.zeros_like(flat)
                part[chosen] = flat[chosen]
                q[first : first + share] = part.reshape(c[first : first + share].shape)
            total += q
            senders += q != 0
            self.d[rank] = self.d[rank] - self.whole(both(inverse, q))
        moved = self.whole(both(inverse, total / np.maximum(senders, 1)))
        self.x = self.x * (1 - LR * DECAY) - LR * np.sign(moved)
        return moved


def against_the_formula(rank: int, size: int) -> list[torch.Tensor]:
    model = DistributedDataParallel(Given())
    optimizer = pycomm.DeMo(*(model.parameters(), LR, BETA, DECAY), model=model, largest=LARGEST)
    plain = {n: Plain(shape, 0.25 * (i + 1), size) for i, (n, shape) in enumerate(SHAPES.items())}
    clear = {n: torch.ones(shape, dtype=torch.bool) for n, shape in SHAPES.items()}
    for step in range(5):
        optimizer.zero_grad()
        model(gradients(rank, step)).backward()
        optimizer.step()
        for name, reference in plain.items():
            moved = reference.step([gradients(r, step)[name].numpy() for r in range(size)])
            # Round-off decides about the sign of values near zero, which are left out.
            near = (np.abs(moved) < 1e-5) & (moved != 0)
            clear[name] &= ~torch.from_numpy(near.reshape(SHAPES[name]))
    for name, reference in plain.items():
        here = getattr(model.module, name).detach()
        wanted = torch.from_numpy(reference.x).float().view(SHAPES[name])
        assert float(clear[name].float().mean()) > 0.97
        torch.testing.assert_close(here[clear[name]], wanted[clear[name]], rtol=1e-6, atol=1e-6)
        # The residual is the momentum, as coefficients.
        kept = optimizer.compression.residuals[name].current("worker")
        momentum = _Chunks(torch.Size(SHAPES[name]), 64).inverse(kept)
        wanted = torch.from_numpy(reference.d[rank]).float().view(SHAPES[name])
        torch.testing.assert_close(momentum, wanted, rtol=1e-4, atol=1e-6)
    return values(model)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_is_that_of_the_formula(pool, ranks):
    found = pool.run(against_the_formula, ranks=ranks)
    assert all(equal(one, found[0]) for one in found)


@pytest.mark.parametrize("shape", [(1,), (7,), (67,), (64, 64), (50, 50), (3, 5), (130, 2, 3)])
def test_coefficients_give_the_values_back(shape):
    chunks = _Chunks(torch.Size(shape), 64)
    values = torch.randn(shape)
    coefficients = chunks.transform(values)
    assert coefficients.numel() == chunks.numel
    assert chunks.numel % 4096 == 0
    # Orthonormal: the norm stays, and so do the values, to round-off.
    torch.testing.assert_close(coefficients.norm(), values.norm(), rtol=1e-5, atol=0)
    torch.testing.assert_close(chunks.inverse(coefficients), values, rtol=1e-4, atol=1e-5)
