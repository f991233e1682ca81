"""DTensor, DeviceMesh, checkpoints and pipelines on pycomm, as on Gloo."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import pycomm
from pycomm.backend import find
from tests.torch.fsdp.test_compress import SHAPES, Odd, chosen, gradients, reduced
from tests.torch.harness import (
    CODED,
    WIDTH,
    all_equal,
    equal,
    inputs,
    near_zero,
    on_both,
    perceptron,
    resumed,
    same_as_gloo,
)
from tests.torch.pool import on_ranks


def integers(*shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 7 - 3).float().reshape(shape)


@on_both()
@pytest.mark.parametrize("ranks", [2, 3])
def test_redistribute_between_all_placements(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    whole = integers(5, 6)  # no multiple of the number of ranks
    seen = [distribute_tensor(whole, mesh, [Shard(dim)]).to_local() for dim in (0, 1)]
    ways = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max"), Partial("avg")]
    for before, after in itertools.product(ways, [Replicate(), Shard(0), Shard(1)]):
        if isinstance(before, Partial):
            start = DTensor.from_local(whole * (rank + 1), mesh, [before])
        else:
            start = distribute_tensor(whole, mesh, [before])
        end = start.redistribute(mesh, [after])
        seen += [end.to_local().clone(), end.full_tensor()]
    return seen


@on_both(2)
def test_tensor_parallel_perceptron(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    model = perceptron(layers=1)[0]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    y = model(inputs(0, 0))
    y.square().mean().backward()
    return [y.detach().clone(), *(p.grad.full_tensor() for p in model.parameters())]


@on_both(4)
def test_device_mesh_of_two_dimensions(rank, size):
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": dist.get_backend()}
    )
    seen: list[Any] = [mesh.get_coordinate(), mesh["tp"].get_local_rank()]
    for part in (mesh["dp"], mesh["tp"], mesh._flatten("all")):
        group = part.get_group()
        x = integers(4) * (rank + 1)
        dist.all_reduce(x, group=group)
        seen += [x, dist.get_process_group_ranks(group)]
        assert (find(group) is not None) == (dist.get_backend() == "pycomm")
    matrix = integers(4, 6)
    spread = distribute_tensor(matrix, mesh, [Shard(0), Shard(1)])
    return [*seen, spread.to_local().clone(), spread.full_tensor()]


def save_and_load(rank: int, size: int, folder: str) -> None:
    one = init_device_mesh("cpu", (size,))
    two = init_device_mesh("cpu", (2, 2))
    weights = {"a": integers(10, 6), "b": integers(7)}
    state: dict[str, Any] = {
        "a": distribute_tensor(weights["a"], one, [Shard(0)]),
        "b": distribute_tensor(weights["b"], one, [Replicate()]),
        "step": 7,
    }
    dcp.save(state, checkpoint_id=folder)
    loaded: dict[str, Any] = {
        "a": distribute_tensor(torch.zeros(10, 6), two, [Shard(1), Shard(0)]),
        "b": distribute_tensor(torch.zeros(7), two, [Shard(0), Replicate()]),
        "step": 0,
    }
    dcp.load(loaded, checkpoint_id=folder)
    assert loaded["step"] == 7
    for name, want in weights.items():
        assert torch.equal(loaded[name].full_tensor(), want)


def read(rank: int, size: int, folder: str) -> Any:
    state = {"a": torch.zeros(10, 6), "b": torch.zeros(7), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    return state


def test_checkpoint_loads_into_another_mesh_and_on_gloo(pool, tmp_path):
    pool.run(save_and_load, str(tmp_path / "saved"), ranks=4)
    state, _ = same_as_gloo(pool, read, str(tmp_path / "saved"))
    assert torch.equal(state["a"], integers(10, 6))
    assert list((tmp_path / "saved").glob("*.distcp"))


def pipeline(rank: int, size: int, schedule: type) -> Any:
    model = perceptron(layers=size)
    stage = PipelineStage(model[rank], rank, size, torch.device("cpu"))
    losses: list[torch.Tensor] = []

    def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(y, target)

    steps = schedule(stage, n_microbatches=4, loss_fn=loss_of)
    for step in range(2):
        if rank == 0:
            steps.step(inputs(0, step))
        else:
            steps.step(target=inputs(9, step), losses=losses)
    return [
        torch.stack(losses).detach() if losses else 0,
        *(p.grad for p in stage.submod.parameters()),
    ]


def test_pipelines(pool):
    gpipe = same_as_gloo(pool, pipeline, ScheduleGPipe)
    one_forward_one_backward = same_as_gloo(pool, pipeline, Schedule1F1B)
    # This is another schedule of the same micro-batches, with the same sums in the same order.
    assert equal(gpipe, one_forward_one_backward)
    assert gpipe[0][1].shape == (2 * WIDTH, WIDTH)


# --------------------------------------------------------------------------------- FSDP2 and HSDP
# FSDP2 and HSDP on pycomm, as on Gloo.


def sharded(mesh: DeviceMesh, **options: Any) -> FSDPModule:
    model = perceptron()
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model: nn.Module, rank: int, clip: bool = False) -> list[torch.Tensor]:
    """Return the norms of the gradients, followed by the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.01)
            seen.append(norm.full_tensor().detach().clone())
        optimizer.step()
    return seen + [p.full_tensor().detach().clone() for p in model.parameters()]


def one_state(results: list[Any]) -> None:
    (a, whole), (b, nothing) = results
    assert equal(a, b)
    assert len(whole) == 8
    assert equal(nothing, whole)


@on_both(2, then=one_state)
@pytest.mark.parametrize(
    "dtypes",
    [None, (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16,) * 2],
    ids=str,
)
def test_fsdp2(rank, size, dtypes):
    mesh = init_device_mesh("cpu", (size,))
    policy = MixedPrecisionPolicy(*dtypes) if dtypes else MixedPrecisionPolicy()
    model = sharded(mesh, mp_policy=policy)
    seen = train(model, rank, clip=True)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return seen, dict(whole)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_divide_factor(rank, size, dtype):
    """Gloo fails here, so this compares with the plain average: powers of two are exact."""
    found = []
    for factor in (None, 8.0):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        model = sharded(init_device_mesh("cpu", (size,)), mp_policy=policy)
        for module in model.modules() if factor else ():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
        model(inputs(rank, 0)).square().mean().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
    plain, scaled = found
    assert any(gradient.any() for gradient in plain)
    assert equal(scaled, [g / 4 for g in plain])


@on_both(4, then=all_equal)
def test_hsdp(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(sharded(mesh), rank, clip=True)


# -------------------------------------------------------------------------------------- checkpoints
# Residuals of sharded gradients (FSDP2), resumed on another number of ranks.


STEPS = 4


# sign also has errors in the padding; the third is a codec of tests/torch/harness.py
@pytest.mark.parametrize("spec", ["int4", "sign", "multiples"])
def test_other_numbers_of_shards_owe_the_same(pool, tmp_path, spec):
    before: dict[str, torch.Tensor] = {}
    for i, ranks in enumerate((3, 2, 4)):
        steps, make = range(i * STEPS, (i + 1) * STEPS), partial(chosen, ranks, spec)
        began, missing, ended = pool.run(resumed, tmp_path, steps, make, SHAPES, ranks=ranks)[0]
        for name in CODED:
            near_zero(began[name] - (before[name] if before else 0))
            near_zero(missing[name] - (ended[name] - began[name]), atol=2e-5)
        before = ended


def check_other_cuts(rank: int, size: int, path: str) -> None:
    """Two ranks that share columns save; others, which share rows, cannot load."""
    columns = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)} if size == 2 else {}
    model = fully_shard(Odd(), mesh=init_device_mesh("cpu", (size,)), **columns)
    state = pycomm.compress(model, "int4")
    if size == 2:
        reduced(model, gradients(rank, 0))
        dcp.save({"pycomm": state.state_dict()}, checkpoint_id=Path(path))
        return
    if rank == 2:  # takes over no rank's residuals
        state.load_checkpoint(Path(path))
        return
    with pytest.raises(
        ValueError, match=r"saved by 2 ranks that share it \(FSDP\), and it had 2 x"
    ):
        state.load_checkpoint(Path(path))


def test_what_cannot_be_cut_anew_is_refused(pool, tmp_path):
    for ranks in (2, 3):
        pool.run(check_other_cuts, str(tmp_path), ranks=ranks)
