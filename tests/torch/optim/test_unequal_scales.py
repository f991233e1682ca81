"""CodedAdamW beside AdamW on features whose scales differ by a factor of a thousand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm

STEPS, BATCH, FEATURES = 300, 64, 32


class Columns(nn.Module):
    """A layer that has a row for each feature, as embeddings and some models have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, 64) / FEATURES**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def loss_of(rank: int, ranks: int, codec: str, turned: bool) -> float:
    """Return the mean loss of the last quarter of a regression; codec "": of AdamW."""
    torch.manual_seed(0)
    first: nn.Module = Columns() if turned else nn.Linear(FEATURES, 64, bias=False)
    model = DistributedDataParallel(nn.Sequential(first, nn.Tanh(), nn.Linear(64, 1)))
    options: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.0}
    if codec:
        options |= {"model": model, "codec": codec}
    kind = pycomm.CodedAdamW if codec else torch.optim.AdamW
    optimizer = kind(model.parameters(), **options)
    scales = torch.logspace(-1.5, 1.5, FEATURES)
    of_task = torch.Generator().manual_seed(5)
    mixed, target = (torch.randn(*s, generator=of_task) for s in ((FEATURES, 8), (8, 1)))
    of_rank, losses = torch.Generator().manual_seed(100 + rank), []
    for _ in range(STEPS):
        features = torch.randn(BATCH, FEATURES, generator=of_rank)
        wanted = torch.tanh(features @ mixed / FEATURES**0.5) @ target
        loss = (model(features * scales) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return sum(losses[STEPS * 3 // 4 :]) / (STEPS - STEPS * 3 // 4)


# Of AdamW's loss. A floor of a tenth for all columns gave about twice that loss on such a task.
MOST = {"sign": 1.35, "int4": 1.1}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("codec", MOST)
def test_small_features_are_learned_as_by_adamw(pool, codec, turned):
    exact, coded = (
        sum(pool.run(loss_of, one, turned, ranks=2, backend="pycomm")) for one in ("", codec)
    )
    assert coded < MOST[codec] * exact, coded / exact
