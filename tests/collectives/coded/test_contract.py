"""Coded collectives with every kind of codec that the contract allows (tests/binding/codecs.cpp).

A code is an integer times an eighth, so sums are exact.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from pycomm import _test
from pycomm.codecs import RandomKey
from pycomm.straggler import compare, rank_stats
from tests.collectives.coded.test_collectives import (
    TENSORS,
    check,
    check_reduce_scatter,
    reduce_once,
    reduce_scatter,
)
from tests.collectives.test_hierarchical import NODES, options
from tests.collectives.ways import WAYS
from tests.ranks import attempt, run

KINDS = [
    {"combine": combine, "granule": granule, "variable": variable}
    for combine in ("recode", "gather")
    for granule, variable in [(64, True), (0, False), (48, False)]
]


def describe(kind: dict[str, Any]) -> str:
    return f"{kind['combine']}-{kind['granule']}" + "-variable" * kind["variable"]


@dataclass
class Simple:
    """A codec of tests/binding/codecs.cpp with a reference in torch."""

    native: Any
    combine: str

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        return torch.round(8 * p) + 0.0  # an integer has no -0

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return payload / 8


@pytest.mark.parametrize("kind", KINDS, ids=describe)
def test_every_schedule_has_the_bytes_of_the_model(kind):
    codecs = dict.fromkeys(TENSORS, Simple(_test.Simple(**kind), kind["combine"]))
    job, segments = reduce_once(list(TENSORS), codecs), {"segment_bytes": 700}
    for ranks in (1, 2, 3, 8):
        check(run(ranks, job), codecs)
    for way in ("direct", "tcp"):
        check(run(3, job, **WAYS[way], **segments), codecs)
    check(run(4, job, **options("mixed")), codecs, nodes=NODES["mixed"])
    check_reduce_scatter(run(3, reduce_scatter(codecs=codecs), **segments), codecs=codecs)


def test_only_the_used_bytes_travel():
    numel = 1 << 16

    def sent(c, codec):
        x = np.zeros(numel, np.float32)
        x[:: 1 << 8] = c.rank + 1
        c.barrier()
        before = c.wire_bytes()
        c.all_reduce_coded(x, codec)
        return c.wire_bytes() - before

    for combine in ("recode", "gather"):
        codec = _test.Simple(combine, variable=True, granule=1 << 14)
        used = 256 * 8 + 4
        for n in run(2, partial(sent, codec=codec), **WAYS["tcp"]):
            assert used <= n < 2 * used + 1500, "payload, frames and sizes"


@pytest.mark.parametrize("combine", ["recode", "gather"])
@pytest.mark.parametrize("way", ["direct", "tcp"])
def test_a_size_that_cannot_be_is_an_error_on_every_rank(combine, way):
    def job(c):
        codec = _test.Simple(combine, variable=True, lies=c.rank == 1)
        c.all_reduce_coded(np.ones(1000, np.float32), codec)

    for error in attempt(3, job, **WAYS[way]):
        assert isinstance(error, pycomm.WireMismatch)
        # The error comes from a peer before it receives, or from rank 1 itself when it decodes.
        assert re.search(r"rank 1 (is to send|sent a payload of simple .* has) 6 bytes", str(error))


@pytest.mark.parametrize("way", ["direct", "tcp"])
def test_the_rank_that_stands_still_is_named(way):
    """The others have sent what they could, and wait for it."""

    def job(c):
        codec = _test.Simple("recode", rests=600 if c.rank == 1 else 0)
        c.barrier()
        c.all_reduce_coded(np.ones(3000, np.float32), codec, timeout=0.3)

    for error in attempt(3, job, **WAYS[way])[::2]:
        assert isinstance(error, pycomm.Timeout)
        assert (
            "\n  rank 1 does not progress: in all_reduce #2 (avg of 3000 float32, simple)"
            in str(error)
        )
        assert "\n  ranks 0, 2 wait: " in str(error)


def test_the_rank_whose_codec_is_slow_is_named():
    def job(c):
        codec = _test.Simple("recode", rests=3 if c.rank == 1 else 0)
        for _ in range(10):
            c.all_reduce_coded(np.ones(300, np.float32), codec)
        return rank_stats(c.core.trace())

    health = compare(run(3, job, **WAYS["window"]))
    assert health is not None
    assert (health.finding.rank, health.finding.cause) == (1, "codec")
    assert "it encodes and decodes for" in health.finding.text
