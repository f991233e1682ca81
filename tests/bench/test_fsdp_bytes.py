"""FSDP2 on pycomm moves half of the gradient bytes that it moves on Gloo, and learns the same."""

from __future__ import annotations

import pytest

from pycomm.bench import fsdp, netlab
from tests.extent import FULL


@pytest.mark.skipif(not FULL, reason="takes half a minute: make soak")
def test_half_of_the_gradient_bytes_and_equal_losses():
    try:
        lab = netlab.Netlab(2, "1gbit")
    except netlab.Unavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    with lab:
        results = {backend: fsdp.measure(lab, backend, steps=3) for backend in fsdp.BACKENDS}
        rows = {(row.op, row.backend): row for row in fsdp.rows(results, lab.describe())}
    assert all(row.wrong == 0 for row in rows.values())
    losses = results["gloo"][0]["losses"]
    assert losses[-1] < losses[0]
    # Two ranks: a reduce-scatter sends half of the gradients, Gloo's all-reduce all of them. Up to
    # a hundredth is headers and what TCP sends again.
    size = rows["fsdp2 backward", "pycomm"].size
    assert size / 2 < rows["fsdp2 backward", "pycomm"].wire_bytes < 1.01 * size / 2
    assert rows["fsdp2 backward", "pycomm"].ratio == pytest.approx(2, rel=0.01)
    assert rows["fsdp2 forward", "pycomm"].ratio == pytest.approx(1, rel=0.01)
