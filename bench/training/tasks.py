"""Tasks of several kinds: small models whose gradients differ in kind, not in size.

A task is a model, batches that only the seed, the step and the rank determine, and a loss on held
out data. Data are drawn at random, but for words and letters, which are those of Python's own
sources.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pycomm.bench.training.train import Config, Transformer, standard_library

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""Output of the model, and targets -> scalar."""


@dataclass(frozen=True)
class Task:
    """One kind of training."""

    name: str
    model: Callable[[], nn.Module]
    """Makes the model, with torch's current seed."""
    batch: Callable[[torch.Generator, int], Batch]
    """Random numbers and a number of samples -> inputs and targets."""
    loss: Loss
    samples: int = 32
    """Of a rank and step."""
    steps: int = 400
    rate: float = 2e-3
    """AdamW's largest learning rate, after a short warm-up; a cosine leads to `least` of it."""
    least: float = 0.1
    clip: float = 0.0
    """Bound of the gradients' norm; 0: none."""
    held_out: int = 2048
    """Samples."""
    kept_back: bool = True
    """No constant was chosen on it (docs/policy.md, Constants)."""


_HELD_OUT = 2**32 - 1
"""Seed of held-out batches: torch uses 32 bits of a seed."""


def batch(task: Task, seed: int, step: int, rank: int) -> Batch:
    """Return the batch of a rank and step; step -1 is the held-out one, of all seeds."""
    if step < 0:
        return task.batch(torch.Generator().manual_seed(_HELD_OUT), task.held_out)
    return task.batch(
        torch.Generator().manual_seed((seed << 22) + (step << 8) + rank), task.samples
    )


# ---------------------------------------------------------------- regression

_FEATURES, _HIDDEN, _OUTPUTS = 256, 192, 8


class Transposed(nn.Module):
    """A linear layer whose weight is [in, out], as GPT-2's: features are rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(inputs, outputs).weight.detach().T.contiguous())
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def _perceptron(layer: Callable[[int, int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(layer(_FEATURES, _HIDDEN), nn.ReLU(), layer(_HIDDEN, _HIDDEN), nn.ReLU()),
        layer(_HIDDEN, _OUTPUTS),
    )


@cache
def _teacher() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    first = torch.randn(_FEATURES, 32, generator=generator) / _FEATURES**0.5
    return first, torch.randn(32, _OUTPUTS, generator=generator) / 32**0.5


def _regression(scales: torch.Tensor) -> Callable[[torch.Generator, int], Batch]:
    """Return batches of features of these scales [features]; every feature counts alike."""

    def draw(generator: torch.Generator, count: int) -> Batch:
        x = torch.randn(count, _FEATURES, generator=generator)
        first, second = _teacher()
        noise = 0.1 * torch.randn(count, _OUTPUTS, generator=generator)
        return x * scales, torch.tanh(2 * x @ first) @ second + noise

    return draw


def _spread(most: float) -> torch.Tensor:
    """Return scales [features] whose ratio is at most `most`, in no order."""
    shares = torch.rand(_FEATURES, generator=torch.Generator().manual_seed(3)) - 0.5
    return most**shares


# --------------------------------------------------------------------- text


@cache
def _letters() -> torch.Tensor:
    text = torch.cat(standard_library(2 << 20))
    return text[text < 128].long()


@cache
def _words(vocabulary: int) -> torch.Tensor:
    text = bytes(torch.cat(standard_library(4 << 20)).tolist()).decode(errors="replace")
    words = re.findall(r"\w+|[^\w\s]|\n", text)
    place = {word: i for i, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    return torch.tensor([place.get(word, vocabulary - 1) for word in words])


def _text(
    tokens: Callable[[], torch.Tensor], length: int
) -> Callable[[torch.Generator, int], Batch]:
    """Return windows of tokens, and each token's next one; the last 16th is held out."""

    def draw(generator: torch.Generator, count: int) -> Batch:
        text = tokens()
        border = len(text) * 15 // 16
        held_out = generator.initial_seed() == _HELD_OUT
        text = text[border:] if held_out else text[:border]
        starts = torch.randint(len(text) - length - 1, (count, 1), generator=generator)
        found = text[starts + torch.arange(length + 1)]
        return found[:, :-1], found[:, 1:]

    return draw


class Recurrent(nn.Module):
    """An LSTM that predicts the next letter."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.letters = nn.Embedding(128, 64)
        self.lstm, self.head = nn.LSTM(64, width, batch_first=True), nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.letters(x))[0])


class Experts(nn.Module):
    """Sixteen experts, of which each sample is sent to one: many are idle in a step."""

    def __init__(self, width: int = 64, count: int = 16) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(_FEATURES, width), nn.Linear(width, count)
        self.up = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, width) / width**0.5)
        self.last = nn.Linear(width, _OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        share, expert = self.router(x).softmax(-1).max(-1)
        parts = []
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            mine = (expert == i).nonzero()[:, 0]
            parts.append((mine, F.relu(x[mine] @ up) @ down * share[mine, None]))
        for mine, part in parts:
            x = x.index_add(0, mine, part)
        return self.last(x)


# ------------------------------------------------------------------- images

_SIDE, _KINDS = 12, 10


@cache
def _patterns() -> torch.Tensor:
    """Return smooth images [kinds, side, side]."""
    coarse = torch.randn(_KINDS, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    return F.interpolate(coarse, _SIDE, mode="bicubic", align_corners=False)[:, 0]


def _images(generator: torch.Generator, count: int) -> Batch:
    kinds = torch.randint(_KINDS, (count,), generator=generator)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator).tolist()
    images = torch.stack(
        [
            _patterns()[kind].roll(shift, (0, 1))
            for kind, shift in zip(kinds.tolist(), shifts, strict=True)
        ]
    )
    size = 0.5 + torch.rand(count, 1, 1, generator=generator)
    return images * size + 0.7 * torch.randn(images.shape, generator=generator), kinds


class Convolutions(nn.Module):
    """Three convolutions with batch norms, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 24), (24, 48), (48, 48)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(48 * 16, _KINDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x[:, None]))


class Autoencoder(nn.Module):
    """A variational autoencoder; its output is the image, the means and log variances."""

    def __init__(self, width: int = 256, code: int = 16) -> None:
        super().__init__()
        pixels = _SIDE**2
        self.to_code = nn.Sequential(
            nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, 2 * code)
        )
        self.to_image = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, pixels))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x.flatten(1)
        mean, spread = self.to_code(x).chunk(2, dim=1)
        # The noise is of the image, so that it is equal in all runs.
        noise = torch.sin(1e3 * x[:, : mean.shape[1]]) * 2**0.5
        image = self.to_image(mean + noise * (0.5 * spread).exp())
        return (image - x).square().sum(1), mean, spread


def _evidence(output: Any, _: torch.Tensor) -> torch.Tensor:
    lost, mean, spread = output
    away = mean.square() + spread.exp() - 1 - spread
    return (lost + 0.5 * away.sum(1)).mean()


# --------------------------------------------------------------------- tasks


def _next_token(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def _reversed(generator: torch.Generator, count: int) -> Batch:
    """Return images whose bright parts are dark."""
    images, kinds = _images(generator, count)
    return -images, kinds


def _trained() -> nn.Module:
    """Return convolutions that one rank alone has trained for 60 steps."""
    model, generator = Convolutions(), torch.Generator().manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(60):
        images, kinds = _images(generator, 32)
        F.cross_entropy(model(images), kinds).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _frozen() -> nn.Module:
    model = Convolutions()
    model.body.requires_grad_(False)
    model.head = nn.Sequential(nn.Linear(48 * 16, 128), nn.ReLU(), nn.Linear(128, _KINDS))
    return model


_WORDS = 8192
_BY_WORDS = Config(layers=1, width=64, heads=4, context=24, vocabulary=_WORDS)
_BY_LETTERS = Config(layers=1, width=64, heads=4, context=32, vocabulary=128)


_COLUMNS = Task(
    "columns",
    lambda: _perceptron(nn.Linear),
    _regression(_spread(1000)),
    F.mse_loss,
    kept_back=False,
)
_CONVOLUTION = Task(
    "convolution",
    Convolutions,
    _images,
    F.cross_entropy,
    samples=16,
    steps=200,
    kept_back=False,
)
_EVEN = _regression(torch.ones(_FEATURES))
TASKS = {
    task.name: task
    for task in (
        _COLUMNS,
        replace(
            _COLUMNS,
            name="rows",
            model=lambda: _perceptron(Transposed),
        ),
        replace(_COLUMNS, name="even", batch=_EVEN),
        Task(
            "lstm",
            Recurrent,
            _text(_letters, 24),
            _next_token,
            samples=16,
            steps=200,
            rate=4e-3,
            held_out=512,
            kept_back=False,
        ),
        Task(
            "words",
            lambda: Transformer(_BY_WORDS),
            _text(lambda: _words(_WORDS), 24),
            _next_token,
            samples=4,
            steps=150,
            held_out=128,
        ),
        Task(
            "letters",
            lambda: Transformer(_BY_LETTERS),
            _text(_letters, 32),
            _next_token,
            samples=4,
            steps=5000,
            least=0.0,
            held_out=512,
        ),
        _CONVOLUTION,
        replace(
            _CONVOLUTION,
            name="tuned",
            model=_trained,
            batch=_reversed,
            rate=1e-4,
            kept_back=True,
        ),
        Task("vae", Autoencoder, _images, _evidence),
        Task(
            "experts",
            Experts,
            _EVEN,
            F.mse_loss,
            steps=300,
        ),
        replace(
            _CONVOLUTION,
            name="head",
            model=_frozen,
            kept_back=True,
        ),
        replace(
            _COLUMNS,
            name="clipped",
            batch=_regression(_spread(30)),
            samples=256,
            steps=200,
            clip=0.1,
            kept_back=True,
        ),
    )
}
