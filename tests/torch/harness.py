"""What tests of torch's tier share: models with their data, a step of training, and comparison.

On two backends the same function must give the same bits (`same_as_gloo`). A sum of two values does
not depend on their order, so functions that reduce over two ranks at a time may use any floats;
those that reduce over more use small integers.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.codecs import Codec, RandomKey, register
from pycomm.feedback import Residuals
from pycomm.policy import Decision, Parameter
from pycomm.reduction import nodes as by_nodes
from pycomm.reduction.bucket import Bucket
from tests.torch.pool import Pool, on_ranks

# ------------------------------------------------------------------ a codec of somebody else


@register
@dataclass(frozen=True)
class Multiples(Codec):
    """Multiples of a unit, as float16. C++ does not know it."""

    name: ClassVar[str] = "multiples"
    combine: ClassVar = "recode"
    wire_version: ClassVar[int] = 1
    unit: float = 0.125

    @property
    def granule(self) -> int:
        return 1

    def encoded_bytes(self, numel: int) -> int:
        return 4 * -(-numel // 2)

    def reference_encode(self, p: torch.Tensor, key: RandomKey, index: int) -> torch.Tensor:
        padded = torch.zeros(self.encoded_bytes(p.numel()) // 2, dtype=torch.float16)
        padded[: p.numel()] = (p / self.unit).round() * self.unit
        return padded.view(torch.uint8)

    def reference_decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        return payload.view(torch.float16)[:numel].float()


# ------------------------------------------------------------------ comparison


def equal(a: Any, b: Any) -> bool:
    """Return whether two trees of tensors and plain values are the same."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def all_equal(results: list[Any]) -> None:
    """Check that all ranks have returned the same."""
    for rank, result in enumerate(results):
        assert equal(result, results[0]), f"rank {rank} has {result} and rank 0 {results[0]}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the bytes are the same: also those of NaNs, and the sign of zeros."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


def same_as_gloo(pool: Pool, function: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """Run a function on both backends, compare what every rank returns, and return it."""
    ours, theirs = (
        pool.run(function, *args, ranks=ranks, backend=backend) for backend in ("pycomm", "gloo")
    )
    for rank, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert equal(a, b), f"rank {rank} has {a} on pycomm and {b} on Gloo"
    return ours


on_both = functools.partial(on_ranks, run=same_as_gloo)
"""Make a test of a function as `on_ranks` does, whose results are the same on both backends."""


def integers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small integers that differ by rank."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 7 + rank * 5) % 11).to(dtype).reshape(shape)


def check_sum(group: dist.ProcessGroup | None = None) -> None:
    """Check that a group works, by whole numbers, of which the sum is exact."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for numel in (1, 1001):
        numbers = torch.arange(numel) * (rank + 1)
        dist.all_reduce(numbers, group=group)
        assert torch.equal(numbers, torch.arange(numel) * (size * (size + 1) // 2))


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return all ranks' tensors."""
    tensor = tensor.detach()
    mine = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return [torch.view_as_complex(p) if tensor.is_complex() else p for p in parts]


def alike(*tensors: torch.Tensor) -> bool:
    """Return whether all ranks have the same values."""
    return all(torch.equal(part, tensor) for tensor in tensors for part in everywhere(tensor))


def whole(tensor: Any) -> torch.Tensor:
    """Return all of a tensor that may be sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of the parameters."""
    return [whole(p).detach().clone() for p in model.parameters()]


# ------------------------------------------------------------------ the log


@contextmanager
def heard(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect what pycomm's log says meanwhile, from a level on; INFO has to be asked for."""
    texts: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("pycomm")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level or before)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


# ------------------------------------------------------ a classifier and its data

INPUTS, CLASSES = 64, 10


def network() -> nn.Sequential:
    """Return a small classifier, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, 128),
        nn.LayerNorm(128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


class Turn(nn.Module):
    """A complex matrix. FSDP2 has one dtype per unit."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs().float()


def with_complex_numbers(dtype: torch.dtype = torch.complex64) -> nn.Sequential:
    """Return that classifier with a complex matrix between its real ones."""
    return network().insert(4, Turn(dtype))


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around ten fixed centres."""
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(CLASSES, (32,), generator=generator)
    noise = torch.randn(32, INPUTS, generator=generator)
    return centres[labels] + 3 * noise, labels


def train_step(
    model: nn.Module, optimizer: Any, rank: int, step: int, dtype: torch.dtype = torch.float32
) -> float:
    """Train a classifier with a rank's batch of a step; return the loss."""
    x, y = batch(rank, step)
    loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(
    model: nn.Module, rank: int, steps: Iterable[int], dtype: torch.dtype = torch.float32
) -> list[float]:
    """Train a classifier by SGD with momentum; return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return [train_step(model, optimizer, rank, step, dtype) for step in steps]


# ------------------------------------------------------ a perceptron and its data

WIDTH = 16


def perceptron(layers: int = 2) -> nn.Sequential:
    """Return a small perceptron, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(layers)
        )
    )


def inputs(rank: int, step: int, rows: int = 8, width: int = WIDTH) -> torch.Tensor:
    """Return a rank's own batch, of shape [rows, width]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator)


# -------------------------------------------------- gradients chosen by the test

SHAPES: Mapping[str, tuple[int, ...]] = {"big": (64, 96), "small": (40, 70), "bias": (50,)}


CODED = ("big", "small")
"""The parameters that a codec takes: a bias travels exactly."""


class Chosen(nn.Module):
    """A model whose gradients are its inputs. Its parameters are 0, or unit, 2 unit, 3 unit..."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES, unit: float = 0.0) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, nn.Parameter(torch.full(shape, unit * (i + 1))))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        # The order of the dict, so that rebuilt buckets have another order than before.
        return sum((getattr(self, name) * g).sum() for name, g in gradients.items())


def gradients(
    rank: int,
    step: int,
    names: Iterable[str] | None = None,
    *,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    scale: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Return a rank's gradients of a step, of all parameters or of those named."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    chosen = shapes if names is None else names
    return {name: scale * torch.randn(shapes[name], generator=generator) for name in chosen}


def mean(
    size: int, step: int, names: Iterable[str] | None = None, **how: Any
) -> dict[str, torch.Tensor]:
    """Return the mean of all ranks' gradients of a step, each of them as `gradients` gives it."""
    given = [gradients(rank, step, names, **how) for rank in range(size)]
    return {name: sum(g[name] for g in given) / size for name in given[0]}


def reduced(model: nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the gradients after the reduction."""
    model.zero_grad()
    model(given).backward()
    named = getattr(model, "module", model).named_parameters()
    return {name: whole(p.grad).clone() for name, p in named if p.grad is not None}


def compressed(
    spec: Any = "int4", feedback: Any = True, **options: Any
) -> tuple[DistributedDataParallel, pycomm.CompressionState]:
    """Return a model of chosen gradients in DDP, which has several buckets, and its state."""
    model = DistributedDataParallel(Chosen(), **{"bucket_cap_mb": 0.02, **options})
    return model, pycomm.compress(model, spec, feedback=feedback)


def compressed_on(nodes: Sequence[int] | None, model: Any, *args: Any, **options: Any) -> Any:
    """Compress a model on ranks of which those with one number are of one node; None: of one."""
    with pytest.MonkeyPatch.context() as patch:
        if nodes is not None:
            patch.setattr(by_nodes, "host", lambda: f"node {nodes[dist.get_rank()]}")
        return pycomm.compress(model, *args, **options)


def lost(
    model: nn.Module,
    rank: int,
    steps: Iterable[int],
    names: Iterable[str] | None = None,
    **how: Any,
) -> dict[str, torch.Tensor]:
    """Reduce the gradients of some steps; return what the averages lack of the means, in sum."""
    total: dict[str, torch.Tensor] = {}
    for step in steps:
        want = mean(dist.get_world_size(), step, names, **how)
        for name, got in reduced(model, gradients(rank, step, names, **how)).items():
            total[name] = total.get(name, torch.zeros(())) + want[name] - got
    return total


def resumed(
    rank: int,
    size: int,
    folder: Path,
    steps: range,
    make: Callable[[], tuple[nn.Module, Any]],
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> tuple[dict[str, torch.Tensor], ...]:
    """Load, reduce some steps, save; return what ranks owed before, `lost`, and what they owe."""
    model, state = make()
    if steps.start > 0:
        state.load_checkpoint(folder / str(steps.start))
        assert state.step == steps.start
    began = owed(state, shapes)
    missing = lost(model, rank, steps, shapes=shapes)
    dcp.save({"pycomm": state.state_dict()}, checkpoint_id=folder / str(steps.stop))
    return began, missing, owed(state, shapes)


def owed(state: Any, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """Return the sum of all ranks' residuals, as a part of each parameter's average."""
    state.settle()
    result = {}
    for name, shape in shapes.items():
        result[name] = torch.zeros(shape)
        if state.residuals is not None and name in state.residuals:
            one = state.residuals[name]
            rows = [state.residuals.added(name, 0, one.numel, row) for row in range(one.rows)]
            result[name] = torch.cat(rows)[: result[name].numel()].reshape(shape).clone()
        dist.all_reduce(result[name])
    return result


def bucket_of(
    specs: str | Iterable[str],
    sizes: Sequence[int],
    residuals: Residuals | None = None,
    device: str = "cpu",
    **options: Any,
) -> Bucket:
    """Return a bucket of parameters p0, p1... of these sizes, which have the codecs in turn."""
    codecs = itertools.cycle([specs] if isinstance(specs, str) else specs)
    decisions = [
        Decision(Parameter(f"p{i}", (numel,), torch.float32), pycomm.codec(spec), "test")
        for i, (numel, spec) in enumerate(zip(sizes, codecs, strict=False))
    ]
    return Bucket(decisions, range(len(sizes)), residuals, torch.device(device), **options)


def residuals_of(saved: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Return a rank's residuals in what a state has saved, by parameter and role."""
    (mine,) = (key for key in saved if key.startswith("rank"))
    entries = saved[mine][1].items()
    return {n: {k: t for k, t in entry.items() if torch.is_tensor(t)} for n, entry in entries}


def near_zero(*differences: torch.Tensor, atol: float = 1e-5) -> None:
    """Check values: 0 but for the round-off of a few dozen float32 additions of values around 1."""
    for difference in differences:
        torch.testing.assert_close(difference, torch.zeros_like(difference), rtol=0, atol=atol)
