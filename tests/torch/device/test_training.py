"""Training on a device: its results are those of the CPU over Gloo, with `==`.

Hooks call the group from the thread of backward, in the order of the buckets, on a stream of their
own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

import pycomm
from pycomm.local_sgd import Streamed
from pycomm.policy import Rule
from tests.extent import pairs
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.device.fake_device import launched, run, same_as_cpu
from tests.torch.device.test_operations import every_value, slow
from tests.torch.harness import Chosen, compressed_on, equal, gradients, reduced

# ------------------------------------------------------------------------------- the caller's group
# Compressed buckets travel in a group that its caller uses meanwhile.

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
    return ddp, compressed_on(nodes, ddp, "int4")


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
    state = compressed_on(NODES[ranks], model, "int4")
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
    state = compressed_on(nodes, ddp, policy, feedback=rule)
    found, ahead = [], 0
    for step in range(14):
        mine = given(rank, step, device)
        if step in (2, 4, 5, 7, 8, 9, 12) and rank == step % ranks:
            mine["a"][0, 0] = torch.inf
        result = on_host(reduced(ddp, mine))
        found.append({name: value.nan_to_num(0.5) for name, value in result.items()})
        if step == 6:
            found.append(state.overflows)
        if step == 10:
            state.discard()
        if state.reducer.side is not None:
            ahead += state.reducer.side.ahead is not None
            with state.reducer.side.stream:
                torch.ops.fakegpu.busy(40)
    state.settle()
    _, saved = state.state_dict()[f"rank{rank}"]
    about = {name: one["about"][:3] for name, one in saved.items()}  # the host learns steps late
    kept = {name: on_host(every_value(state.residuals[name])) for name in saved}
    return ahead, [found, state.overflows, kept, about]


def check_memory(rank: int, ranks: int, device: str, nodes: list[int] | None) -> Any:
    """Return what a rank's residuals take, what its state tells, and the values that they have."""
    ddp = DistributedDataParallel(Chosen(SHAPES).to(device), bucket_cap_mb=0.3)
    state = compressed_on(nodes, ddp, "int4")
    for step in range(4):
        reduced(ddp, given(rank, step, device))
    state.settle()
    residuals = [state.residuals[name] for name in state.residuals.norms()]
    taken, held = 0, {"worker": 0, "owner": 0}
    for residual in residuals:
        for role, pair in residual.pairs():
            taken += sum(tensor.nbytes for tensor in pair)
            begin, end = residual.span(role, residual.side)
            held[role] += (end - begin) * (residual.rows if role == "worker" else 1)
    return taken, state.residual_bytes, held, sum(residual.numel for residual in residuals)


ALONE_AND_BY_NODES = (
    *(check_operations_between_buckets, check_buffers, check_two_models, check_compiled),
    check_overflow_beside_a_late_stream,
)
CHECKS: list[tuple[Callable[..., Any], int]] = [
    *itertools.product(ALONE_AND_BY_NODES, NODES),
    *((check_static_graph, 2), (check_steps_of_other_buckets, 2), (check_half_of_the_world, 4)),
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
@pytest.mark.parametrize("rule", ["residual:storage=int8", "decay:0.9,storage=int8"])
def test_the_device_decides_as_a_host_that_waits(fakes, rule, ranks):
    check = check_steps_before_the_host_knows
    want = run(fakes, "kernels", check, "cpu", rule, group="gloo", ranks=ranks)
    got = run(fakes, "kernels", check, FAKE, rule, ranks=ranks)
    for (never, host), (ahead, device) in zip(want, got, strict=True):
        assert never == 0
        assert ahead >= 8
        assert equal(device, host)


# --------------------------------------------------------------------------- from run to run
# A state is saved after a few steps, of which some overflow, and loaded by a run that may differ in
# buckets, nodes, codecs and devices.

MORE_SHAPES = {**SHAPES, "d": (70000,)}
CODECS = ["int4", "int8", "topk:density=0.05", "sign", "eden2"]
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
    for number in range(5):
        device = devices[number % len(devices)]
        names = same.sample(list(MORE_SHAPES), len(MORE_SHAPES))
        model = Chosen({name: MORE_SHAPES[name] for name in names}).to(device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=same.choice([0.05, 0.3, 25]))
        policy = pycomm.Policy(same.choice(CODECS), guard=None)
        state = compressed_on(same.choice([None, nodes]), ddp, policy, feedback=rule)
        loaded_to = same.choice([device, "cpu"])
        if saved is not None:
            state.load_state_dict(moved(saved, loaded_to))
        for step in range(same.randrange(1, 5)):
            given = gradients(rank, 10 * number + step, shapes=MORE_SHAPES)
            if same.random() < 0.3 and rank == step % ranks:
                given["a"][0, 0] = torch.inf
            result = reduced(ddp, {name: g.to(device) for name, g in given.items()})
            found.append({name: value.cpu().nan_to_num(0.5) for name, value in result.items()})
        saved = moved(state.state_dict(), "cpu")
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
    assert equal(run(fakes, "kernels", check_runs, devices, nodes, seed, ranks=ranks), want)


# --------------------------------------------------------------------------- coded optimizers
# Their kernels wait for nothing.

OPTIMIZED = 10
# Of the steps that accumulate two backwards and are clipped, that are clipped, whose gradient
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
    for step in range(OPTIMIZED):
        optimizer.zero_grad()
        for last in (False, True) if step == TWICE else (True,):
            mine = {n: g.to(dtype) for n, g in given(rank, 10 * last + step, device).items()}
            if step == SKIPPED and rank == ranks - 1:
                mine["a"][3, 3] = torch.inf
            with nullcontext() if last else ddp.no_sync():
                ddp(mine).backward()
        if step in (TWICE, CLIPPED):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != SKIPPED:
            optimizer.step()
        if step == LOADED:
            optimizer.load_state_dict(optimizer.state_dict())
            state.load_state_dict(state.state_dict())
        ahead += state.reducer.side is not None and state.reducer.side.ahead is not None
        found.append(on_host({name: p.detach() for name, p in model.named_parameters()}))
    state.settle()
    found.append((state.overflows, state.residual_norms()))
    for parameter in model.parameters():
        found.append(
            on_host({k: torch.as_tensor(v) for k, v in optimizer.state[parameter].items()})
        )
    momenta = optimizer.momenta
    for name in momenta.moments:
        if name in momenta.own:
            found.append(momenta.own[name].current("worker").cpu())
    return ahead, found


F32, BF16 = torch.float32, torch.bfloat16
MOMENTUM_CODECS = ["sign", "int4", "eden:bits=2,size=128,scale=mmse", "topk:0.05"]


@pytest.mark.parametrize(
    ("kind", "codec", "dtype", "way", "feedback", "ranks"),
    [
        *((*of, "kernels", "", 2) for of in pairs(list(KINDS), MOMENTUM_CODECS, (F32, BF16))),
        ("adamw", "sign", F32, "kernels", "", 1),
        ("adamw", "sign", F32, "kernels", "residual:storage=int8", 4),
        *(("adamw", codec, F32, "both", "", 2) for codec in ("sign", "int4")),
    ],
)
def test_training_has_the_bits_of_the_host(fakes, kind, codec, dtype, way, feedback, ranks):
    how = kind, codec, dtype, feedback
    want = run(fakes, way, check_training, "cpu", *how, ranks=ranks)
    got = run(fakes, way, check_training, FAKE, *how, ranks=ranks)
    for (_, host), (ahead, device) in zip(want, got, strict=True):
        for i, (a, b) in enumerate(zip(device, host, strict=True)):
            assert equal(a, b), i
        # Steps that began before the host knew of the last one.
        assert way == "both" or ranks == 1 or ahead >= 2


def check_sharded(
    rank: int, ranks: int, device: str, dtype: torch.dtype, replicas: int
) -> list[Any]:
    """Train in FSDP2, or HSDP; return the results."""
    shape, names = (ranks,), ("shards",)
    if replicas > 1:
        shape, names = (replicas, ranks // replicas), ("replicas", "shards")
    # The stand-in gives no memory back before its end, which FSDP2 asks for in between.
    fsdp_param.free_storage = fsdp_param.alloc_storage = lambda *_: None
    mesh = dist.init_device_mesh(device, shape, mesh_dim_names=names)
    model = fully_shard(Chosen(SHAPES).to(device, dtype), mesh=mesh)
    optimizer = pycomm.CodedAdamW(model.parameters(), lr=0.01, model=model, codec="sign")
    found = []
    for step in range(6):
        optimizer.zero_grad()
        mine = {n: g.to(dtype) for n, g in given(rank, step, device).items()}
        if step == CLIPPED:
            mine["a"] *= 500
        model(mine).backward()
        optimizer.step()
        found.append([p.detach().to_local().cpu().clone() for p in model.parameters()])
    for parameter in model.parameters():
        state = optimizer.state[parameter].items()
        found.append([v.to_local().cpu() if hasattr(v, "to_local") else v.cpu() for _, v in state])
    return found


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2)])
def test_sharded_training_has_the_bits_of_the_host(fakes, dtype, ranks, replicas):
    same_as_cpu(fakes, "kernels", check_sharded, dtype, replicas, ranks=ranks)


def check_streams(rank: int, ranks: int, device: str) -> list[torch.Tensor]:
    """Train by LocalSGD on a stream of one's own, and load a state that was moved to the CPU."""
    model = Chosen(SHAPES).to(device)
    options = {"every": 2, "codec": "int4", "exchange": Streamed(overlap=2), "weighted": True}
    with nullcontext() if device == "cpu" else torch.Stream(device):
        local = pycomm.LocalSGD(model, **options)
        for step in range(6):
            with torch.no_grad():
                torch._foreach_sub_([*model.parameters()], [*given(rank, step, device).values()])
            local.step(1.0)
            if step == 3:
                saved = tree_map_only(torch.Tensor, torch.Tensor.cpu, local.state_dict())
                local = pycomm.LocalSGD(model, **options)
                local.load_state_dict(saved)
        local.finish()
        return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["kernels", "held"])
def test_local_sgd_on_a_thread_has_the_bits_of_the_host(fakes, way):
    same_as_cpu(fakes, way, check_streams)


class Operations(TorchDispatchMode):
    """Collects the operations of torch on the device that are more than views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_device = any(isinstance(one, torch.Tensor) and not one.is_cpu for one in args)
        if on_device and not op.is_view:
            self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def check_launches(rank: int, ranks: int, device: str, count: int) -> list[Any]:
    """Return how a step's momenta of so many matrices are made: by kernels, and by torch."""
    fsdp_param.free_storage = fsdp_param.alloc_storage = lambda *_: None
    shapes = {f"p{i}": (256, 260) for i in range(count)}  # more than 2^16 values
    model = Chosen(shapes).to(device)
    fully_shard(model, mesh=dist.init_device_mesh(device, (ranks,)))
    operations = Operations()

    def within(function: Any, context: Callable[[], Any]) -> Any:
        """Call a function in a context."""

        def call(*args: Any, **options: Any) -> Any:
            with context():
                return function(*args, **options)

        return call

    with launched() as names:
        optimizer = pycomm.CodedAdamW(model.parameters(), model=model)
        momenta, reducer = optimizer.momenta, optimizer.compression.reducer
        momenta.scatter = within(momenta.scatter, lambda: operations)
        reducer.scatter = within(reducer.scatter, _disable_current_modes)
        for step in range(3):
            operations.names.clear()
            names.clear()
            mine = gradients(rank, step, shapes=shapes).items()
            model({name: gradient.to(device) for name, gradient in mine}).backward()
            with operations:
                optimizer.step()
            optimizer.zero_grad()
    passes = [name.partition("moments::")[2].partition("<")[0] for name in names]
    return [[name for name in passes if name], operations.names]


def test_passes_of_shards_are_kernels_for_all_matrices_at_once(fakes):
    for count in (2, 9):
        for kernels, operations in run(fakes, "kernels", check_launches, FAKE, count):
            assert kernels == ["squares", "encode", "sent", "land", "collect", "commit", "move"]
            assert len(operations) <= 2, operations
