"""Passes over moments on the CPU: the bits of their definition in torch, on any threads."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pycomm  # noqa: E402
from pycomm.momentum.moment import CodedMoment  # noqa: E402
from pycomm.momentum.passes import DTYPES, Job, Kernels, Passes, Table  # noqa: E402
from pycomm.reduction.bucket import BucketPiece  # noqa: E402
from tests.torch.optim import followed  # noqa: E402
from tests.torch.optim.followed import KINDS, ByDefinition, ByPasses, differing  # noqa: E402
from tests.torch.optim.plain_moment import column_sums  # noqa: E402

CPU = Kernels(torch.device("cpu"))


@pytest.mark.parametrize("form", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shards", "scatters"), [(1, True), (3, True), (3, False)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_have_the_bits_of_their_definition(form, dtype, shards, scatters, kind):
    how = form, dtype, shards, scatters, kind
    assert not differing(ByPasses(CPU, *how), ByDefinition(*how))


@torch.no_grad()
def test_threads_change_no_bits(monkeypatch):
    monkeypatch.setattr(followed, "SHAPES", [(1037, 1031)])
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        one = ByPasses(CPU, "float32", torch.float32)
        for step in range(3):
            one.take(step)
        found.append(one.state())
    torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


@torch.no_grad()
def test_shards_add_to_the_same_sums_in_order():
    """Threads take shards of one matrix, all of which add to its columns' sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    rows, columns, shards = 4096, 512, 4
    moment = CodedMoment(
        torch.nn.Parameter(torch.zeros(rows, columns)),
        {"betas": (0.75, 0.9), "eps": 1e-8},
        {},
        pycomm.codec("sign"),
        shards=shards,
    )
    gradient = torch.randn(shards, rows // shards, columns)
    bucket = gradient.view(shards, -1).clone()
    piece = BucketPiece("", 0, bucket.shape[1], moment.codec, 0, None)
    for _ in range(5):
        moment.begin()
        table = Table(CPU, [(moment, piece)], None, *bucket.shape)
        how: dict[str, Any] = {"unit": 1.0, "ranks": 1, "looks": True, "divides": True}
        Job(Passes(CPU, {"": moment}), table, bucket, **how).encode(scale=lambda new: None)
        found = moment.room[len(moment.numbers) + rows :][:columns]
        want = torch.zeros(columns)
        for shard in gradient:
            want += column_sums(shard * shard)
        assert torch.equal(found, want)
        bucket.copy_(gradient.view(shards, -1))
    torch.set_num_threads(before)
