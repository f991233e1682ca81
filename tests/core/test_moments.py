"""Passes over moments on the CPU: the bits of their definition in torch, on any threads."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pycomm.momentum.passes import DTYPES, Kernels  # noqa: E402
from tests.torch.optim import followed  # noqa: E402
from tests.torch.optim.followed import KINDS, ByDefinition, ByPasses, differing  # noqa: E402

CPU = Kernels(torch.device("cpu"))


@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shards", "scatters"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_have_the_bits_of_their_definition(form, dtype, shards, scatters, kind):
    how = form, dtype, shards, scatters, kind
    assert not differing(ByPasses(CPU, *how), ByDefinition(*how))


@torch.no_grad()
def test_threads_change_no_bits(monkeypatch):
    """Also not of sums to which all shards of a matrix add."""
    monkeypatch.setattr(followed, "SHAPES", [(1037, 1031)])
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        one = ByPasses(CPU, "float32", torch.float32, 3)
        for step in range(3):
            one.take(step)
        found.append(one.state())
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))
