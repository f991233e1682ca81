"""Coded optimizers on a device: the results of the CPU, by kernels that wait for nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.device.fake_device import run
from tests.torch.device.test_callers_group import SHAPES, given, on_host
from tests.torch.harness import Chosen, equal

STEPS = 10
# Of the steps that have a second backward and are clipped, that are clipped, whose gradient
# overflows on one rank and which is skipped, as by a GradScaler, and of that after which states are
# loaded.
TWICE, CLIPPED, SKIPPED, LOADED = 2, 3, 5, 7
KINDS = {"adamw": pycomm.CodedAdamW, "sgd": pycomm.CodedSGD}


def check_training(
    rank: int, ranks: int, device: str, kind: str, codec: str, dtype: torch.dtype, feedback: str
) -> tuple[int, list[Any]]:
    """Train; return how many steps began before the host knew of the last one, and the results."""
    model = Chosen(SHAPES).to(device, dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
    options: dict[str, Any] = {"feedback": feedback} if feedback else {}
    if kind == "sgd":
        options["momentum"] = 0.9
    optimizer: Any = KINDS[kind](model.parameters(), lr=0.01, model=ddp, codec=codec, **options)
    state, found, ahead = optimizer.compression, [], 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(2 if step == TWICE else 1):
            mine = {n: g.to(dtype) for n, g in given(rank, 10 * turn + step, device).items()}
            if step == SKIPPED and rank == ranks - 1:
                mine["a"][3, 3] = torch.inf
            ddp(mine).backward()
        if step in (TWICE, CLIPPED):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != SKIPPED or kind == "sgd":
            optimizer.step()
        if step == LOADED:
            optimizer.load_state_dict(optimizer.state_dict())
            state.load_state_dict(state.state_dict())
        ahead += state._side is not None and state._side.ahead
        found.append(on_host({name: p.detach() for name, p in model.named_parameters()}))
    state.settle()
    found.append((state.overflows, state.residual_norms()))
    for parameter in model.parameters():
        found.append(
            on_host({k: torch.as_tensor(v) for k, v in optimizer.state[parameter].items()})
        )
    for name in getattr(state, "moments", ()):
        if name in state.own:
            found.append(state.own[name].current("worker").cpu())
    return ahead, found


def check(fakes, kind, codec, dtype=torch.float32, *, way="kernels", feedback="", ranks=2):
    """Compare trainings on the CPU and on the device; return how far each rank's host was ahead."""
    how = kind, codec, dtype, feedback
    want = run(fakes, way, check_training, "cpu", *how, ranks=ranks)
    got = run(fakes, way, check_training, FAKE, *how, ranks=ranks)
    for (_, host), (_, device) in zip(want, got, strict=True):
        for i, (a, b) in enumerate(zip(device, host, strict=True)):
            assert equal(a, b), i
    return [ahead for ahead, _ in got]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["sign", "int4", "eden:bits=2,size=128,scale=mmse", "topk:0.05"])
def test_training_has_the_bits_of_the_host(fakes, kind, codec, dtype):
    ahead = check(fakes, kind, codec, dtype)
    assert kind == "sgd" or min(ahead) >= 2


@pytest.mark.parametrize(("ranks", "feedback"), [(1, ""), (4, "residual:storage=int8")])
def test_ranks_have_the_bits_of_the_host(fakes, ranks, feedback):
    check(fakes, "adamw", "sign", feedback=feedback, ranks=ranks)


@pytest.mark.parametrize("codec", ["sign", "int4"])
def test_kernels_work_among_peers(fakes, codec):
    check(fakes, "adamw", codec, way="both")
