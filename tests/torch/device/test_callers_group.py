"""Compressed buckets of a device in a group that its caller uses meanwhile.

Hooks call the group from the thread of backward, in the order of the buckets, on a stream of their
own. Results are those of the CPU over Gloo, with `==`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.policy import Rule
from tests.torch.device.checks import every_value, slow
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.device.fake_device import run, same_as_cpu
from tests.torch.harness import Chosen, equal, gradients, reduced

SHAPES = {"a": (256, 257), "b": (255, 257), "bias": (50,), "c": (300, 130)}
STEPS = 4
NODES = {2: None, 4: [0, 0, 1, 1]}


class Counted(Chosen):
    """Also has a buffer, which ranks change in forward and DDP broadcasts from rank 0."""

    def __init__(self) -> None:
        super().__init__(SHAPES)
        self.register_buffer("seen", torch.zeros(40_000))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen += 1 + dist.get_rank()
        return super().forward(gradients) + 0 * self.seen.sum()


def wrapped(device: str, model: nn.Module | None = None, **options: Any) -> Any:
    """Return a model in small buckets, and its state."""
    nodes = NODES[dist.get_world_size(options.get("process_group"))]
    model = (model or Chosen(SHAPES)).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3, **options)
    return ddp, pycomm.compress(ddp, "int4", nodes=nodes)


def given(rank: int, step: int, device: str) -> dict[str, torch.Tensor]:
    return {k: g.to(device) for k, g in gradients(rank, step, shapes=SHAPES).items()}


def on_host(results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in results.items()}


def check_operations_between_buckets(rank: int, ranks: int, device: str) -> Any:
    """The caller's own all-reduces run between the buckets, until the step ends."""
    model, state = wrapped(device)
    sums: list[torch.Tensor] = []
    works: list[dist.Work] = []

    def reduce(grad: torch.Tensor) -> None:
        sums.append((grad.flatten()[:1000] > 0).float())
        works.append(dist.all_reduce(sums[-1], async_op=True))

    for parameter in model.parameters():
        parameter.register_hook(reduce)
    found = []
    for step in range(STEPS):
        found.append(on_host(reduced(model, given(rank, step, device))))
        for work in works:
            work.wait()
        found.append([one.cpu() for one in sums])
        sums.clear()
        works.clear()
    return found, state.overflows


def check_buffers(rank: int, ranks: int, device: str) -> Any:
    """DDP broadcasts buffers in the next forward."""
    model, state = wrapped(device, Counted())
    found = []
    for step in range(STEPS):
        found.append(on_host(reduced(model, given(rank, step, device))))
        found.append(model.module.seen[:3].cpu().clone())
    return found, state.overflows


def check_two_models(rank: int, ranks: int, device: str) -> Any:
    """Two models in one process; the second backward begins before the first result is read."""
    models = [wrapped(device)[0], wrapped(device)[0]]
    found = []
    for step in range(STEPS):
        for i, model in enumerate(models):
            model.zero_grad()
            model(given(rank, 10 * step + i, device)).backward()
        found += [on_host({n: p.grad for n, p in m.named_parameters()}) for m in models]
    return found


def check_half_of_the_world(rank: int, ranks: int, device: str) -> Any:
    """Each half has a model of its own, and the world reduces between their steps."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model, state = wrapped(device, process_group=halves[rank // 2])
    found = []
    for step in range(STEPS):
        found.append(on_host(reduced(model, given(rank, step, device))))
        total = torch.full((3,), rank + 1.0, device=device)
        dist.all_reduce(total)
        found.append(total.cpu())
    return found, state.overflows


def check_static_graph(rank: int, ranks: int, device: str) -> Any:
    model, state = wrapped(device, static_graph=True)
    found = [on_host(reduced(model, given(rank, step, device))) for step in range(STEPS)]
    return found, state.overflows


def check_compiled(rank: int, ranks: int, device: str) -> Any:
    """Forward and backward are graphs, which torch cuts at DDP's buckets."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600)).to(device)
    model = DistributedDataParallel(layers, bucket_cap_mb=1)
    state = pycomm.compress(model, "int4", nodes=NODES[ranks])
    compiled = torch.compile(model, backend="aot_eager")
    found = []
    for step in range(STEPS):
        model.zero_grad()
        x = torch.randn(4, 600, generator=torch.Generator().manual_seed(10 * step + rank))
        compiled(x.to(device)).square().mean().backward()
        found.append(on_host({n: p.grad for n, p in layers.named_parameters()}))
    assert sum(torch._dynamo.utils.counters["frames"].values()) > 0
    return found, state.step, state.overflows


def check_overflow_beside_a_late_stream(rank: int, ranks: int, device: str) -> Any:
    """The last rank's gradients overflow while the first one's stream is late."""
    model, state = wrapped(device)
    found = []
    for step in range(STEPS):
        mine = given(rank, step, device)
        if step == 1 and rank == ranks - 1:
            mine["b"][0, 0] = torch.inf
        if step == 1 and rank == 0 and device != "cpu":
            mine["c"] += 0 * slow(rank, device)[0]
        result = on_host(reduced(model, mine))
        found.append({name: value.nan_to_num(0.5) for name, value in result.items()})
    state.settle()
    return found, state.overflows, state.residual_norms()


def check_steps_of_other_buckets(rank: int, ranks: int, device: str) -> Any:
    """A bucket takes no part in the step that overflows, but in the next one."""
    state = wrapped(device)[1]
    found = []
    for step, names in enumerate(["ab", "ab", "ab", "a", "ab", "ab"]):
        mine = given(rank, step, device)
        if step == 3 and rank == 1:
            mine["a"][0, 0] = torch.inf
        state.begin_step()
        found.append({n: state.wait(state.reduce(mine[n].flatten(), [n])) for n in names})
        found[-1] = {n: value.cpu().nan_to_num(0.5) for n, value in found[-1].items()}
        state.end_step()
        if step == 2:
            state.settle()
    state.settle()
    return found, state.overflows


def check_steps_before_the_host_knows(rank: int, ranks: int, device: str, rule: str) -> Any:
    """Steps overflow, in a row, too, while the host does not know yet of the steps before."""
    nodes = NODES[ranks]
    ddp = DistributedDataParallel(Chosen(SHAPES).to(device), bucket_cap_mb=0.3)
    policy = pycomm.Policy("int4", rules=[Rule(name="b", codec="topk:density=0.1")])
    state = pycomm.compress(ddp, policy, feedback=rule, nodes=nodes)
    found, ahead = [], 0
    for step in range(14):
        mine = given(rank, step, device)
        if step in (2, 4, 5, 7, 8, 9, 12) and rank == step % ranks:
            mine["a"][0, 0] = torch.inf
        result = on_host(reduced(ddp, mine))
        found.append({name: value.nan_to_num(0.5) for name, value in result.items()})
        if step == 6:
            found.append((state.overflows, state.residual_ages()))
        if step == 10:
            state.discard()
        if state._side is not None:
            ahead += state._side.ahead
            with state._side.stream:
                torch.ops.fakegpu.busy(40)
    state.settle()
    _, saved = state.state_dict()[f"rank{rank}"]
    about = {name: one["about"] for name, one in saved.items()}
    assert state.residuals is not None
    kept = {name: on_host(every_value(state.residuals[name])) for name in saved}
    return ahead, [found, state.overflows, kept, about]


def check_memory(rank: int, ranks: int, device: str, nodes: list[int] | None) -> Any:
    """Return what a rank's residuals take, what its state tells, and the values that they have."""
    ddp = DistributedDataParallel(Chosen(SHAPES).to(device), bucket_cap_mb=0.3)
    state = pycomm.compress(ddp, "int4", nodes=nodes)
    for step in range(4):
        reduced(ddp, given(rank, step, device))
    state.settle()
    assert state.residuals is not None
    residuals = [state.residuals[name] for name in state.residuals.norms()]
    pairs = [(role, pair) for residual in residuals for role, pair in residual.pairs()]
    taken = sum(tensor.nbytes for _, pair in pairs for tensor in pair)
    held = {role: sum(pair[0].numel() for name, pair in pairs if name == role) for role, _ in pairs}
    return taken, state.residual_bytes, held, sum(residual.numel for residual in residuals)


CHECKS: list[tuple[Callable[..., Any], int]] = [
    (check_operations_between_buckets, 2),
    (check_operations_between_buckets, 4),
    (check_buffers, 2),
    (check_buffers, 4),
    (check_two_models, 2),
    (check_two_models, 4),
    (check_half_of_the_world, 4),
    (check_static_graph, 2),
    (check_compiled, 2),
    (check_compiled, 4),
    (check_steps_of_other_buckets, 2),
    (check_overflow_beside_a_late_stream, 2),
    (check_overflow_beside_a_late_stream, 4),
]


@pytest.mark.parametrize(("check", "ranks"), CHECKS, ids=lambda it: getattr(it, "__name__", it))
def test_results_are_those_of_the_host(fakes, check, ranks):
    same_as_cpu(fakes, "kernels", check, host="gloo", ranks=ranks)


@pytest.mark.parametrize(("ranks", "nodes"), [(2, None), (4, None), (4, [0, 0, 1, 1])], ids=str)
def test_residuals_take_memory_for_values_that_have_them(fakes, ranks, nodes):
    """Workers for what they code, owners for what they own; the summary tells the same."""
    found = run(fakes, "kernels", check_memory, FAKE, nodes, ranks=ranks)
    shards = 2 if nodes else 1
    for taken, told, _, _ in found:
        assert taken == pytest.approx(told, rel=0.02)
    held = {role: sum(one[2][role] for one in found) for role in ("worker", "owner")}
    values = found[0][3]
    assert held == {"worker": ranks // shards * values, "owner": values}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rule", ["residual:storage=int8", "decay:0.9,storage=bf16"])
def test_the_device_decides_as_a_host_that_waits(fakes, rule, ranks):
    check = check_steps_before_the_host_knows
    want = run(fakes, "kernels", check, "cpu", rule, group="gloo", ranks=ranks)
    got = run(fakes, "kernels", check, FAKE, rule, ranks=ranks)
    for (never, host), (ahead, device) in zip(want, got, strict=True):
        assert never == 0
        assert ahead >= 8
        assert equal(device, host)
