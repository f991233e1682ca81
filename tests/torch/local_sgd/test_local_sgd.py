"""Local SGD and DiLoCo: equal to plain averaging where expected; equal ranks after outer steps."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.local_sgd import Blocking, Streamed
from pycomm.local_sgd.outer import split
from pycomm.reduction.weights import factors
from tests.extent import each_value
from tests.torch.harness import (
    alike,
    all_equal,
    batch,
    equal,
    everywhere,
    heard,
    network,
    on_both,
    residuals_of,
    train_step,
    values,
)
from tests.torch.pool import on_ranks

PLAIN = {"codec": "fp32", "lr": 1.0, "momentum": 0.0}


def train(
    rank: int, size: int, steps: int, options: dict[str, Any], inner: float = 0.1
) -> tuple[list[torch.Tensor], list[float], bool]:
    """Return parameters, losses, and whether ranks were equal after each outer step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=inner)
    local = pycomm.LocalSGD(model, **options)
    losses, equal_then = [], True
    for step in range(steps):
        losses.append(train_step(model, optimizer, rank, step))
        if local.step():
            equal_then = alike(*values(model)) and equal_then
    local.finish()
    return values(model), losses, equal_then


SPARSE = {"codec": "topk:0.0625,indices=int12,values=bins2", "feedback": "decay:0.95"}
CONVERGES = [
    {"codec": "fp32"},
    {"codec": "int8"},
    {"codec": "int4"},
    {"codec": "int8", "lr": 1.0, "momentum": 0.0},
    {"lr": 1.0, "momentum": 0.0, "average": "senders", **SPARSE},
]


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("options", CONVERGES, ids=str)
def test_it_converges_and_ranks_are_equal(rank, size, options):
    ends, losses, equal_then = train(rank, size, 80, {"every": 4, **options})
    assert equal_then
    last = torch.tensor(losses[-8:])
    dist.all_reduce(last)
    # The loss started at ln 10 = 2.3; training step by step reaches 0.9 after 60 steps.
    assert (last / size).mean() < 1.3
    return ends


@on_ranks(1)
def test_options_stay_as_the_ranks_agreed(rank, size):
    local = pycomm.LocalSGD(nn.Linear(2, 2), every=4)
    for name, value in (
        *(("every", 2), ("exchange", Blocking()), ("lr", 0.1), ("momentum", 0.5)),
        *(("weighted", True), ("average", "senders")),
    ):
        before = getattr(local, name)
        with pytest.raises(AttributeError, match=f"LocalSGD: {name} stays"):
            setattr(local, name, value)
        assert getattr(local, name) is before


@on_ranks(2)
def test_a_round_that_is_not_finite_leaves_no_trace(rank, size):
    model = network()
    local = pycomm.LocalSGD(model, every=1, codec="int8")
    with torch.no_grad():
        model[0].weight += 0.1 * (rank + 1)
    local.step()
    before, owed = values(model), residuals_of(local.state.state_dict())
    with torch.no_grad():
        model[0].weight += 0.1
        if rank == 0:
            model[0].weight[0, 0] = float("nan")
    local.step()
    assert (local.rounds, local.skipped) == (2, 1)
    assert equal(values(model), before)
    assert equal(residuals_of(local.state.state_dict()), owed)


@on_ranks(4, then=all_equal)
def test_shards_of_fsdp2_meet_between_groups(rank, size):
    """Two groups of two ranks: FSDP2 inside, local SGD between them; in bfloat16."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "shard"))
    model = fully_shard(network().bfloat16(), mesh=mesh["shard"])
    local = pycomm.LocalSGD(model, every=2, codec="int8", process_group=mesh.get_group("apart"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        train_step(model, optimizer, rank, step, torch.bfloat16)
        with torch.no_grad():
            model(batch(rank, step)[0].bfloat16())  # leaves whole parameters
        local.step()
    local.finish()
    assert model[0].weight.dtype == torch.bfloat16
    return values(model)


# ------------------------------------------------------------------------------------- unlike steps
# One rank has a gradient that is not finite, or takes fewer steps than the others.


FORMS = {
    "blocking": {"exchange": Blocking()},
    "fragments": {"exchange": Streamed(2, overlap=0)},
    "overlapped fragments": {"exchange": Streamed(2, overlap=1)},
    "a round later": {"exchange": Streamed(overlap=4)},
    "on a thread": {"exchange": Streamed(2, overlap=2), "weighted": True},
}


@on_ranks(2)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_one_gradient_of_nan_costs_one_round(rank, size, options):
    """Rank 1 has one gradient of NaN; with AdamW that once cost all rounds that followed."""
    with heard(logging.WARNING) as lines:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        local = pycomm.LocalSGD(model, every=4, codec="int8", **options)
        for step in range(32):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if rank == 1 and step == 5:
                model[0].weight.grad[0, 0] = float("nan")
            optimizer.step()
            local.step(*(len(x),) if local.weighted else ())
        local.finish()
    assert 1 <= local.skipped <= 2 < local.rounds  # two fragments may have it
    assert all(value.isfinite().all() for value in values(model))
    assert alike(*values(model))
    skipped = [text for text in lines if "LocalSGD skips round" in text]
    assert len(skipped) == local.skipped
    assert all("the outer gradient of rank 1 is not" in text for text in skipped)
    reset = [text for text in lines if "has reset the inner optimizer's state" in text]
    assert [text.partition(":")[0] for text in reset] == (["rank 1"] if rank else [])
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())
        assert state["step"] > 0


@on_ranks(3)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_ranks_of_different_numbers_of_steps_end_equal(rank, size, options):
    model = network()
    local = pycomm.LocalSGD(model, every=4, codec="fp32", **options)
    for _ in range((0, 3, 14)[rank]):
        with torch.no_grad():
            model[0].weight += 0.1 * (1 + rank)
        local.step(*(1,) if local.weighted else ())
    local.finish()
    assert alike(*values(model))
    local.finish()  # with nothing to do
    assert alike(*values(model))


# ------------------------------------------------------------------------------------------ streams
# LocalSGD in streams: fragments, overlap and mixing; weights; averages over senders.


BACKENDS = ["pycomm", "gloo"]


@pytest.mark.parametrize(
    ("sizes", "fragments", "want"),
    [
        ((4, 4, 4, 4), 2, [["p0", "p1"], ["p2", "p3"]]),
        ((100, 1, 1, 1), 2, [["p0"], ["p1", "p2", "p3"]]),
        ((1, 1, 1, 100), 3, [["p0", "p1"], ["p2"], ["p3"]]),
        ((5,), 1, [["p0"]]),
        ((3, 3, 2, 4), 4, [["p0"], ["p1"], ["p2"], ["p3"]]),
    ],
)
def test_fragments_have_about_equal_sizes(sizes, fragments, want):
    named = {f"p{i}": nn.Parameter(torch.zeros(size)) for i, size in enumerate(sizes)}
    parts = split(named, fragments, 10)
    assert [list(part) for part, _ in parts] == want
    ends = [end for _, end in parts]
    assert ends[-1] == 10
    assert sorted(set(ends)) == ends


def streaming(
    rank: int, size: int, steps: int, every: int, fragments: int, overlap: int, mixing: float
) -> list[torch.Tensor]:
    """Algorithm 2 of Streaming DiLoCo for plain averages, as the paper has it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = split(dict(model.named_parameters()), fragments, every)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    due: list[tuple[int, dict[str, torch.Tensor]]] = []
    for step in range(1, steps + 1):
        train_step(model, optimizer, rank, step - 1)
        with torch.no_grad():
            while due and due[0][0] == step:
                for name, mean in due.pop(0)[1].items():
                    start[name] -= mean
                    parameter = model.get_parameter(name)
                    parameter.copy_(mixing * parameter + (1 - mixing) * start[name])
            for part, end in parts:
                if step % every != end % every:
                    continue
                means = {name: start[name] - p.detach() for name, p in part.items()}
                for mean in means.values():
                    dist.all_reduce(mean)
                    mean /= size
                if overlap:
                    due.append((step + overlap, means))
                    continue
                for name, mean in means.items():
                    start[name] -= mean
                    model.get_parameter(name).copy_(start[name])
    return values(model)


@on_ranks(3)
@pytest.mark.parametrize(
    ("fragments", "overlap", "mixing"), [(1, 0, 0.5), (3, 0, 0.5), (3, 2, 0.5), (3, 1, 0.0)]
)
def test_fragments_travel_as_in_streaming_diloco(rank, size, fragments, overlap, mixing):
    options = {"fragments": fragments, "overlap": overlap, "mixing": mixing}
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = pycomm.LocalSGD(model, every=6, exchange=Streamed(**options), **PLAIN)
    ended = []
    for step in range(15):
        train_step(model, optimizer, rank, step)
        ended.append(local.step())
    assert [i + 1 for i, end in enumerate(ended) if end] == [6, 12]
    want = streaming(rank, size, 15, 6, **options)
    for a, b in zip(values(model), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    local.finish()
    assert alike(*values(model))


STREAM = {"every": 4, "codec": "int8", "exchange": Streamed(2, overlap=1)}
LATER = {"every": 4, "codec": "int4", "exchange": Streamed(overlap=3)}


@on_both(2, then=all_equal)
@pytest.mark.parametrize("options", [STREAM, LATER], ids=str)
def test_overlap_gives_the_same_bits_on_all_backends(rank, size, options):
    return train(rank, size, 12, options)[0]


# ---------------------------------------------------------------- weights and senders


@pytest.mark.parametrize(
    ("weights", "want"),
    [
        ([5.0], [1.0]),
        ([0.0], [0.0]),
        ([1.0, 3.0], [0.5, 1.5]),
        ([0.0, 8.0], [0.0, 2.0]),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
        ([1e308, 1e308], [1.0, 1.0]),
        ([5e-324, 5e-324, 0.0], [1.5, 1.5, 0.0]),
    ],
)
def test_factors_add_up_to_the_number_of_ranks(weights, want):
    assert factors(weights) == want


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"exchange": Streamed(overlap=1, mixing=0.0)}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_movements_are_weighted_by_their_tokens(rank, size, options):
    """A round's movement counts by the tokens of all its steps."""
    model = nn.Linear(40, 60, bias=False)
    nn.init.zeros_(model.weight)
    local = pycomm.LocalSGD(model, every=2, weighted=True, **PLAIN, **options)
    for tokens in (1 + 2 * rank, 3):  # 4 and 6 in all, with 2 and 6 of movement
        with torch.no_grad():
            model.weight += 1.0 + 2 * rank
        local.step(tokens)
    local.finish()
    want = torch.full_like(model.weight, (4 * 2 + 6 * 6) / 10)
    torch.testing.assert_close(model.weight.detach(), want, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="pass step"):
        local.step()
    with pytest.raises(ValueError, match="weight=-1"):
        local.step(-1)
    with pytest.raises(ValueError, match="weighted=True in LocalSGD"):
        pycomm.LocalSGD(nn.Linear(4, 4), every=2).step(3)


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("average", ["senders", "ranks"])
def test_values_are_averaged_over_the_ranks_that_sent_them(rank, size, average):
    """Two ranks send different values and one value that both have."""
    model = nn.Linear(4096, 2, bias=False)
    nn.init.zeros_(model.weight)
    local = pycomm.LocalSGD(
        model,
        every=1,
        codec="topk:0.00048828125,indices=int12",  # 2 of 4096
        lr=1.0,
        momentum=0.0,
        average=average,
        feedback=False,
    )
    with torch.no_grad():
        model.weight[0, 0] = 6.0 * (rank + 1)
        model.weight[0, 1 + rank] = 2.0
        model.weight[1, 7] = 1.0 * rank
    local.step()
    ends = model.weight.detach()[:, :8].flatten().tolist()
    own = 2.0 if average == "senders" else 1.0
    assert ends[:4] == [9.0, own, own, 0.0]
    assert average == "ranks" or ends[8 + 7] == 1.0
    return ends


# ---------------------------------------------------------------- summary and misuse


@on_ranks(3)
def test_the_summary_tells_bytes_in_all_and_at_once(rank, size):
    model = nn.Sequential(*[nn.Linear(1000, 100, bias=False) for _ in range(4)])
    stream = Streamed(4, overlap=2)
    local = pycomm.LocalSGD(model, every=8, codec="fp32", exchange=stream, weighted=True)
    line = local.summary().splitlines()[-1]
    # Three ranks send two thirds of 4 bytes a value to its owners, and as much to all.
    assert "Streamed(fragments=4, overlap=2, mixing=0.5), every 8 steps" in line
    assert f"sends {4 * 400_000 * 4 / 3 / 1e6:.3g} MB in a round" in line
    assert f"{4 * 400_000 * 4 / 3 / 8 / 1e3:.3g} kB for each step" in line
    assert f"at most {400_000 * 4 / 3 / 1e6:.3g} MB at once" in line


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_options_are_refused_before_anything_is_sent(rank, size):
    for options, why in [
        ({"exchange": Streamed(9)}, "use 1 to every=8"),
        ({"exchange": Streamed(3)}, "has 2 parameters"),
        ({"exchange": Streamed(2, overlap=5)}, "more than every // fragments = 4"),
        ({"average": "all"}, "use 'ranks' or 'senders'"),
    ]:
        with pytest.raises(ValueError, match=why):
            pycomm.LocalSGD(nn.Linear(4, 4), every=8, **options)
    for wide in (torch.float64, torch.complex128):
        model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=wide))])
        with pytest.raises(ValueError, match="not in the float64 of 0: train them in float32"):
            pycomm.LocalSGD(model, every=8)
    with pytest.raises(pycomm.WireMismatch, match="do not compress alike: rank 0 has"):
        pycomm.LocalSGD(nn.Linear(4, 4 + rank), every=8)
    forms = (Blocking(), Streamed()), (Streamed(), Streamed(overlap=2))
    differ = [("exchange", form[rank]) for form in forms]
    for name, theirs in [("every", 8 + rank), ("weighted", rank == 1), *differ]:
        with pytest.raises(pycomm.WireMismatch, match=f"LocalSGD: {name}="):
            pycomm.LocalSGD(nn.Linear(4, 4), **{"every": 8, name: theirs})


# --------------------------------------------------------------------------- dtypes


def moves_of_an_ulp(
    rank: int, size: int, dtype: torch.dtype, options: dict[str, Any]
) -> list[float]:
    """Rank 0 moves its weights by one ulp of 1 in each step of 20 rounds."""
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    model = model.to(dtype)
    local = pycomm.LocalSGD(model, codec="fp32", **{"every": 1, **options})
    for _ in range(20 * local.every):
        with torch.no_grad():
            model.weight += torch.finfo(dtype).eps * (rank == 0)
        local.step()
    local.finish()
    outer = local.state_dict()["fragments"][0]["start"]
    assert torch.equal(model.weight.view(-1), outer.to(dtype))
    return outer.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_add_up_with_momentum(pool, dtype):
    """Updates below the precision of the model's dtype accumulate in the outer optimizer."""
    stream = Streamed(overlap=1, mixing=0.0)  # drops the first of two steps, but in the first round
    options = {"every": 2, "lr": 0.5, "momentum": 0.5, "exchange": stream}
    got, other = pool.run(moves_of_an_ulp, dtype, options)
    assert got == other
    eps, velocity, start = torch.finfo(dtype).eps, 0.0, 1.0
    for gradient in [-eps, *[-eps / 2] * 19, 0.0]:  # the last one is `finish`
        velocity = 0.5 * velocity + gradient
        start -= 0.5 * (gradient + 0.5 * velocity)
    assert got == pytest.approx([start] * 64, rel=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("spec", ["fp32", "int8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_complex_parameters_are_averaged_exactly(rank, size, spec):
    generator = torch.Generator().manual_seed(rank)
    dtypes = (torch.float32, torch.complex64)

    def numbers(dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(40, 70, generator=generator, dtype=dtype)

    model = nn.ParameterList([nn.Parameter(numbers(dtype)) for dtype in dtypes])
    before = [p.detach().clone() for p in model]
    local = pycomm.LocalSGD(model, every=1, **PLAIN | {"codec": spec})
    for parameter, was in zip(model, before, strict=True):
        assert torch.equal(parameter.detach(), everywhere(was)[0])  # all its bits
    with torch.no_grad():
        for parameter in model:
            parameter += numbers(parameter.dtype)
    ends = [everywhere(p) for p in model]
    local.step()
    for parameter, end, dtype in zip(model, ends, dtypes, strict=True):
        assert alike(parameter)
        if dtype == torch.float32 and spec != "fp32":
            continue
        # start - mean(start - end) rounds twice where mean(end) rounds once.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(parameter.detach(), sum(end) / size, rtol=0, atol=16 * eps)
    assert "complex numbers travel exactly" in local.state.summary()


# --------------------------------------------------------------------------- models


class Net(nn.Module):
    """A body, which is frozen at first, statistics, and a head; ranks begin differently."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.body = nn.Linear(48, 48).requires_grad_(False)
        self.norm = nn.BatchNorm1d(48, affine=False)
        self.norm.running_mean += rank
        self.head = nn.Linear(48, 48)


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_start_with_equal_buffers(rank, size):
    model = Net(rank)
    model.register_buffer("turns", torch.tensor([rank, 7]), persistent=False)
    model.register_buffer("phase", torch.full((3,), complex(rank, 1)))
    pycomm.LocalSGD(model, every=4)
    assert alike(*model.parameters(), *model.buffers())
    assert model.turns.tolist() == [0, 7]
    assert model.phase[0].item() == complex(0, 1)


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_other_trained_parameters_are_refused(rank, size, who):
    """On all ranks, also where one alone has them."""

    def added(model: Net) -> None:
        model.head = nn.Sequential(model.head, nn.Linear(48, 10))

    def replaced(model: Net) -> None:
        model.head = nn.Linear(48, 64)

    changes = [
        ("body.weight", lambda model: model.body.requires_grad_(True)),
        ("head.bias", lambda model: model.head.bias.requires_grad_(False)),
        ("head.weight", added),
        ("head.weight", replaced),
    ]
    for name, change in changes:
        model = Net(rank)
        local = pycomm.LocalSGD(model, every=2, codec="int4")
        for _ in range(3):
            local.step()
        if rank in who:
            change(model)
        named = name if rank in who else "its error names them"
        told = (
            rf"on rank {', '.join(map(str, who))} others are trained now \({named}.*: call finish"
        )
        with pytest.raises(pycomm.Error, match=told):
            local.step()
        with pytest.raises(pycomm.Error, match="make a new LocalSGD after it"):
            local.finish()


class Ordered(nn.Module):
    """Layers in the order of their names here."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(4, 4, bias=False))


@on_ranks(2)
def test_a_state_loads_whatever_the_order_of_parameters(rank, size):
    model, other = Ordered("first", "last"), Ordered("last", "first")
    nn.init.constant_(model.first.weight, 1.0)
    nn.init.constant_(model.last.weight, 2.0)
    saved = pycomm.LocalSGD(model, every=1, **PLAIN).state_dict()
    local = pycomm.LocalSGD(other, every=1, **PLAIN)
    local.load_state_dict(saved)
    local.step()
    assert torch.equal(other.first.weight, torch.ones(4, 4))
    assert torch.equal(other.last.weight, torch.full((4, 4), 2.0))


@on_ranks(2)
def test_a_wrapper_over_the_same_ranks_is_refused(rank, size):
    with pytest.raises(pycomm.Error, match=r"DistributedDataParallel over ranks \[0, 1\]"):
        pycomm.LocalSGD(DistributedDataParallel(Net(rank)), every=4)
    inside = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(nn.Linear(4, 4)))
    with pytest.raises(pycomm.Error, match="would meet in every step"):
        pycomm.LocalSGD(inside, every=4)
    # Different ranks hold different shards: averaging them would mix up rows.
    sharded = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (size,)))
    with pytest.raises(pycomm.Error, match="parameters are distributed over ranks"):
        pycomm.LocalSGD(sharded, every=4)
    whole = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    with pytest.raises(pycomm.Error, match="FullyShardedDataParallel over ranks"):
        pycomm.LocalSGD(whole, every=4)
    alone = dist.new_group([rank], use_local_synchronization=True)
    pycomm.LocalSGD(DistributedDataParallel(nn.Linear(4, 4), process_group=alone), every=4)


# ------------------------------------------------------------------------------------------ loading
# A state of LocalSGD that is loaded at any point of a step, with exchanges in flight.


SAVED, LOADED, END = 8, 11, 15
POINTS = ("made", "forward", "backward", "optimizer", "step", "zero_grad")


class Run:
    """A model in training, of which one can load a state at a point of a step."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        self.rank, self.model = rank, network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.local = pycomm.LocalSGD(self.model, every=4, codec="int4", **options)

    def saved(self) -> tuple[Any, ...]:
        parts = self.model, self.optimizer, self.local
        return copy.deepcopy(tuple(part.state_dict() for part in parts))

    def load(self, saved: tuple[Any, ...]) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch's keeps the tensors
        self.local.load_state_dict(saved[2])

    def points(self, steps: range) -> Iterator[tuple[int, str]]:
        """Train, and stop behind each part of a step."""
        for step in steps:
            x, y = batch(self.rank, step)
            loss = nn.functional.cross_entropy(self.model(x), y)
            yield step, "forward"
            loss.backward()
            yield step, "backward"
            self.optimizer.step()
            yield step, "optimizer"
            self.local.step(*(len(x),) if self.local.weighted else ())
            yield step, "step"
            self.optimizer.zero_grad()
            yield step, "zero_grad"

    def train(self, steps: range, load: tuple[str, tuple[Any, ...]] | None = None) -> None:
        """Train; load a state at the named point of the last step, and end there."""
        for step, point in self.points(steps):
            if load is not None and (step + 1, point) == (steps.stop, load[0]):
                self.load(load[1])
                return


@on_ranks(2)
@each_value
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_a_state_may_be_loaded_at_any_point_of_a_step(rank, size, options):
    run = Run(rank, options)
    run.train(range(SAVED))
    saved = run.saved()
    run.train(range(SAVED, END))
    run.local.finish()
    want, rounds = values(run.model), run.local.rounds
    for point in POINTS:
        other = Run(rank, options)
        if point == "made":
            other.load(saved)
        else:
            other.train(range(LOADED), (point, saved))
        other.optimizer.zero_grad()
        other.train(range(SAVED, END))
        other.local.finish()
        assert equal(values(other.model), want), point
        assert other.local.rounds == rounds, point


@on_ranks(2)
@pytest.mark.parametrize("backend", ["gloo"])
def test_residuals_are_read_after_what_travels(rank, size):
    """A thread exchanges on Gloo: who looked meanwhile took its step back."""
    model = network()
    local = pycomm.LocalSGD(model, every=1, codec="int4", exchange=Streamed(overlap=1))
    end_step = local.state.end_step

    def late() -> None:
        time.sleep(0.3)
        end_step()

    with torch.no_grad(), patch.object(local.state, "end_step", late):
        model[0].weight += torch.randn_like(model[0].weight)
        local.step()
        assert any(map(any, local.state.residual_norms().values()))
    local.finish()


@on_ranks(2)
def test_states_of_other_models_and_options_are_refused(rank, size):
    saved = pycomm.LocalSGD(Net(rank), every=2).state_dict()
    with pytest.raises(ValueError, match=r"only one of them has body\.bias"):
        pycomm.LocalSGD(Net(rank).requires_grad_(True), every=2).load_state_dict(saved)
    saved = pycomm.LocalSGD(network(), every=4, exchange=Streamed(2, overlap=2)).state_dict()
    with pytest.raises(ValueError, match="has 2 fragments, not 1"):
        pycomm.LocalSGD(network(), every=4).load_state_dict(saved)
    with pytest.raises(ValueError, match="with momentum or without"):
        pycomm.LocalSGD(
            network(), every=4, exchange=Streamed(2, overlap=2), momentum=0.0
        ).load_state_dict(saved)
    local = pycomm.LocalSGD(network(), every=4, exchange=Streamed(2, overlap=2))
    before = copy.deepcopy(local.state_dict())
    first, last = saved["fragments"]
    moved = {**first, "start": first["start"] + 1}
    for change, why in (
        ({"version": 1}, "has version 1, not 3: load it with the pycomm that"),
        ({"fragments": [moved, {**last, "names": ("other",)}]}, "only one of them has"),
        ({"fragments": [moved, last], "compression": {}}, "an entry .about."),
    ):
        with pytest.raises(ValueError, match=why):
            local.load_state_dict({**saved, **change})
        assert equal(local.state_dict(), before)
