"""States that go from one run to the next: other buckets, nodes, codecs and devices.

A state is saved after a few steps, of which some overflow, and loaded by a run that may differ in
all of that. Results and residuals are compared with those of the CPU, with `==`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import pycomm
from tests.torch.device.checks import every_value
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.device.fake_device import run
from tests.torch.harness import Chosen, equal, gradients, reduced

SHAPES = {"a": (256, 257), "b": (255, 257), "bias": (50,), "c": (300, 130), "d": (70000,)}
CODECS = ["powersgd:2", "int4", "int8", "topk:density=0.05", "sign", "eden2"]
RULES = ["residual", "residual:storage=int8", "residual:storage=float32"]


def moved(state: Any, device: str) -> Any:
    """Return a state as ``torch.load(..., map_location=device)`` would."""
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: moved(value, device) for key, value in state.items()}
    return type(state)(moved(x, device) for x in state) if type(state) in (tuple, list) else state


def check_runs(rank: int, ranks: int, devices: list[str], nodes: Any, seed: int) -> list[Any]:
    """Return the results and residuals of runs, each on the next of some devices."""
    same, found, saved = random.Random(seed), [], None
    rule = same.choice(RULES)
    codecs = CODECS[ranks > 2 :]  # PowerSGD's sums over four ranks have the carrier's order
    for number in range(5):
        device = devices[number % len(devices)]
        names = same.sample(list(SHAPES), len(SHAPES))
        model = Chosen({name: SHAPES[name] for name in names}).to(device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=same.choice([0.05, 0.3, 25]))
        policy = pycomm.Policy(same.choice(codecs), guard=None)
        state = pycomm.compress(ddp, policy, feedback=rule, nodes=same.choice([None, nodes]))
        loaded_to = same.choice([device, "cpu"])
        if saved is not None:
            state.load_state_dict(moved(saved, loaded_to))
        for step in range(same.randrange(1, 5)):
            given = gradients(rank, 10 * number + step, shapes=SHAPES)
            if same.random() < 0.3 and rank == step % ranks:
                given["a"][0, 0] = torch.inf
            result = reduced(ddp, {name: g.to(device) for name, g in given.items()})
            found.append({name: value.cpu().nan_to_num(0.5) for name, value in result.items()})
        saved = moved(state.state_dict(), "cpu")
        assert state.residuals is not None
        for name in saved[f"rank{rank}"][1]:
            residual = state.residuals[name]
            buffers = [buffer for _, pair in residual.pairs() for buffer in pair]
            assert {buffer.device.type for buffer in buffers} == {device}
            found.append({role: x.cpu() for role, x in every_value(residual).items()})
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("devices", "ranks"),
    [([FAKE], 2), ([FAKE, "cpu"], 2), ([FAKE], 4)],
    ids=["gpu", "both", "by nodes"],
)
def test_runs_continue_as_on_the_cpu(fakes, devices, ranks, seed):
    nodes = [0, 0, 1, 1] if ranks == 4 else None
    want = run(fakes, "kernels", check_runs, ["cpu"], nodes, seed, group="gloo", ranks=ranks)
    got = run(fakes, "kernels", check_runs, devices, nodes, seed, ranks=ranks)
    for rank in range(ranks):
        assert equal(got[rank], want[rank]), f"rank {rank}"
