"""The two-shot of reduction/two_shot.py, with every kind of codec that the contract allows.

The codecs are those of tests/collectives/coded/simple_codecs.cpp in torch, as is the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from pycomm.codecs.args import RandomKey
from pycomm.codecs.base import Codec, Combine
from pycomm.codecs.implementations import Reference
from pycomm.feedback import Feedback, Residuals
from pycomm.policy import Decision, Parameter
from pycomm.reduction import two_shot
from pycomm.reduction.bucket import Bucket
from tests.collectives.coded.test_contract import KINDS, OFFSETS, SIZES, describe, gradient, model
from tests.torch.pool import on_ranks

SEED, STEP = 77, 5


@dataclass(frozen=True)
class Simple(Codec):
    """Integers times an eighth, as pairs of index and integer if the size may vary."""

    name: ClassVar[str] = "simple"
    wire_version: ClassVar[int] = 1
    combine: Combine = "recode"  # type: ignore[misc]
    block: int = 64
    varies: bool = False

    @property
    def granule(self) -> int:
        return self.block

    @property
    def variable(self) -> bool:
        return self.varies

    def implementation(self, device: str) -> Reference:
        return Reference()

    def encoded_bytes(self, numel: int) -> int:
        return 4 + 8 * numel if self.varies else 4 * numel

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        code = (8 * p).round().to(torch.int32)
        if not self.varies:
            return code.view(torch.uint8)
        out = torch.zeros(self.encoded_bytes(p.numel()), dtype=torch.uint8)
        words = out.view(torch.int32)
        places = code.nonzero().view(-1)
        pairs = torch.stack((places.to(torch.int32), code[places]), dim=1).view(-1)
        words[1 : 1 + pairs.numel()] = pairs
        words[0] = 4 * (1 + pairs.numel())
        return out

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        code = payload.view(torch.int32)
        if self.varies:
            pairs = code[1 : int(code[0]) // 4].view(-1, 2)
            code = torch.zeros(numel, dtype=torch.int32)
            code[pairs[:, 0].long()] = pairs[:, 1]
        return code.to(torch.float32) / 8

    def reference_decode_add(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out += self.reference_decode(payload, out.numel())


def bucket_of(kind: dict[str, Any], ranks: int, rows: int = 1) -> Bucket:
    codec = Simple(kind["combine"], kind["granule"], kind["variable"])
    decisions = [
        Decision(Parameter(f"p{i}", (numel,), torch.float32), codec, "test")
        for i, numel in enumerate(SIZES)
    ]
    residuals = Residuals(Feedback(), ranks)
    return Bucket(decisions, range(len(SIZES)), residuals, torch.device("cpu"), rows=rows)


@on_ranks(3, backend="gloo")
@pytest.mark.parametrize("kind", KINDS, ids=describe)
def test_values_of_the_model(rank, ranks, kind):
    group = dist.group.WORLD
    gradients = [gradient(r)[0] for r in range(ranks)]
    values = torch.from_numpy(gradients[rank].copy())
    assert two_shot.all_reduce(values, bucket_of(kind, ranks), group, seed=SEED, step=STEP)

    rows = [gradient(r, ranks) for r in range(ranks)]
    row = torch.empty(OFFSETS[-1])
    given = torch.from_numpy(rows[rank])
    bucket = bucket_of(kind, ranks, rows=ranks)
    assert two_shot.reduce_scatter(row, given, bucket, group, seed=SEED, step=STEP)

    gathered = torch.empty(ranks, OFFSETS[-1])
    given = torch.from_numpy(gradients[rank])
    assert two_shot.all_gather(gathered, given, bucket_of(kind, ranks), group, seed=SEED, step=STEP)

    for begin, size in zip(OFFSETS[:-1], SIZES, strict=True):
        part = slice(begin, begin + size)
        none = np.zeros(size, np.float32)
        whole, _, _ = model(kind, [g[part] for g in gradients], ranks, none)
        assert np.array_equal(values[part].numpy(), whole)
        shard, _, _ = model(kind, [r[rank, part] for r in rows], ranks, None)
        assert np.array_equal(row[part].numpy(), shard)
        for r, g in enumerate(gradients):
            alone, _, _ = model(kind, [g[part]], 1, None)
            assert np.array_equal(gathered[r, part].numpy(), alone)
