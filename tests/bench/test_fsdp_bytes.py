"""FSDP2 on pycomm moves half of the gradient bytes that it moves on Gloo, and learns the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pycomm.bench import netlab
from pycomm.bench.common.harness import Row
from pycomm.bench.step.__main__ import Steps, parse
from pycomm.bench.training.methods import METHODS
from pycomm.bench.training.time_to_loss import train
from pycomm.bench.training.train import MODELS, ranks_train
from tests.extent import FULL

GLOO, PYCOMM = (m for m in METHODS if m.sharded)


@pytest.mark.skipif(not FULL, reason="takes half a minute: make soak")
def test_half_of_the_gradient_bytes():
    try:
        netlab.Netlab(2, "1gbit").close()
    except netlab.LabUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    options = parse(["--rounds", "1", "--turn-seconds", "1"])
    found: list[Row] = []
    Steps("demo", MODELS["demo"], [GLOO, PYCOMM], options).steps("1gbit", found.append)
    _, gloo, ours = found
    # Two ranks: half of the parameters go out before forward. A reduce-scatter sends half of the
    # gradients, Gloo's all-reduce all of them. Up to a hundredth is headers and what TCP repeats.
    assert ours.size < ours.wire_bytes < 1.01 * ours.size
    assert gloo.wire_bytes / ours.wire_bytes == pytest.approx(1.5, rel=0.01)


@pytest.mark.skipif(not FULL, reason="takes half a minute: make soak")
def test_equal_losses():
    config = replace(MODELS["demo"], steps=3)
    gloo, ours = (
        [row["loss"] for row in train(2, ranks_train, config, [m])[:3]] for m in (GLOO, PYCOMM)
    )
    assert gloo == ours
    assert ours[-1] < ours[0]
