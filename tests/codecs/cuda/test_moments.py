"""Kernels of coded moments, compiled by g++: the bits of the passes on the CPU, over some steps."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pycomm.momentum.kernels import Kernels  # noqa: E402
from pycomm.momentum.passes import DTYPES  # noqa: E402
from tests.codecs.cuda import emulated  # noqa: E402
from tests.torch.optim.followed import KINDS, ByPasses, differing  # noqa: E402


def launch(launches: Any, device: torch.device) -> None:
    emulated.run(launches, emulated.all_kernels())


@pytest.mark.parametrize("form", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shards", "scatters"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_kernels_have_the_bits_of_the_cpu(form, dtype, shards, scatters, kind):
    ways = Kernels(torch.device("cpu"), launch), Kernels(torch.device("cpu"))
    assert not differing(*(ByPasses(way, form, dtype, shards, scatters, kind) for way in ways))
