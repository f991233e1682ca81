"""The demo's training compares fairly: same data in every run, nothing held out is trained on."""

from __future__ import annotations

from itertools import groupby, islice

import torch

from pycomm.bench.training import train as training
from pycomm.bench.training.methods import Method
from pycomm.bench.training.train import (
    Config,
    Transformer,
    batches,
    loss_of,
    schedule,
    standard_library,
    take_turns,
)

CONFIG = Config()


def test_held_out_files_are_not_trained_on():
    train, held_out = (bytes(part.numpy()) for part in standard_library(limit=2 << 20))
    probes = [held_out[start : start + 200] for start in range(0, len(held_out) - 200, 4001)]
    assert len(probes) > 10
    # Licences and the like stand in several files; 200 bytes of code do not.
    assert sum(probe in train for probe in probes) <= len(probes) // 10


def test_every_run_sees_the_data_in_one_order():
    text = torch.arange(100_000, dtype=torch.int32)
    first, again = (list(islice(batches(text, CONFIG, 0, 2), 5)) for _ in range(2))
    other = list(islice(batches(text, CONFIG, 1, 2), 5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert first[0].shape == (CONFIG.batch, CONFIG.context + 1)


def test_the_model_starts_at_chance():
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    assert 1e6 < sum(p.numel() for p in model.parameters()) < 3e6
    sequences = next(batches(torch.randint(0, 256, (10_000,)), CONFIG, 0, 1))
    chance = torch.tensor(256.0).log()
    # Logits have a variance at the start, which costs half of it on average; here under 1 nat.
    assert chance - 0.2 < loss_of(model, sequences) < chance + 1


def test_learning_rate_rises_then_falls_to_a_tenth():
    factors = [schedule(step, CONFIG) for step in range(CONFIG.steps + 1)]
    top = factors.index(max(factors))
    assert factors[top] == 1.0
    assert factors == sorted(factors[: top + 1]) + sorted(factors[top + 1 :], reverse=True)
    assert abs(factors[-1] - 0.1) < 1e-12  # a cosine in float64


def test_a_run_may_end_with_its_warm_up():
    config = Config(steps=20, warmup=20)
    assert [schedule(step, config) for step in (0, 19, 20)] == [0.05, 1, 1]


def test_runs_take_turns(monkeypatch):
    """Ten steps each; another run begins each round, and no record is lost."""

    def train(config, method, group, device):
        assert device == "cpu"
        assert group == f"group of {method.backend}"
        yield from ({"step": step} for step in range(1, config.steps + 1))
        yield {"step_seconds": 1.0}

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training.dist, "new_group", lambda backend: f"group of {backend}")
    methods = [Method("", "gloo"), Method("", "pycomm"), Method("", "pycomm", "int8")]
    rows = [*take_turns(Config(steps=30), methods)]
    turns = [(turn, len([*some])) for turn, some in groupby(row["turn"] for row in rows)]
    assert turns == [(0, 10), (1, 10), (2, 10), (1, 10), (2, 10), (0, 10), (2, 10), (0, 10),
                     (1, 10), (0, 1), (1, 1), (2, 1)]  # fmt: skip
    for turn in range(3):
        own = [row.get("step") for row in rows if row["turn"] == turn]
        assert own == [*range(1, 31), None]
