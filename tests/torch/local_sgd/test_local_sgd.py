"""Local SGD and DiLoCo: equal to plain averaging where expected; equal ranks after outer steps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm
from pycomm.local_sgd import Blocking, Streamed
from pycomm.local_sgd.outer import split
from pycomm.reduction.weights import factors
from tests.torch.harness import (
    alike,
    all_equal,
    batch,
    equal,
    heard,
    near_zero,
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


@on_ranks(3)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_without_momentum_it_averages_parameters(rank, size):
    options = {"every": 4, **PLAIN}
    got, _, equal_then = train(rank, size, 8, options)
    assert equal_then
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        train_step(model, optimizer, rank, step)
        if step % 4 == 3:
            for p in model.parameters():
                dist.all_reduce(p.data)
                p.data /= size
    # start - mean(start - end) rounds twice where mean(end) rounds once.
    near_zero(*(a - b for a, b in zip(got, values(model), strict=True)), atol=1e-6)


CONVERGES = [
    {"codec": "fp32"},
    {"codec": "int8"},
    {"codec": "int4"},
    {"codec": "powersgd:4"},
    {"codec": "int8", "lr": 1.0, "momentum": 0.0},
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
@pytest.mark.parametrize(("overlap", "mixing"), [(0, 0.5), (2, 0.5), (1, 0.0)])
def test_fragments_travel_as_in_streaming_diloco(rank, size, overlap, mixing):
    options = {"fragments": 3, "overlap": overlap, "mixing": mixing}
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
    assert local.weight == 4 + 2 * rank
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


@on_ranks(2, then=all_equal)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
def test_muon_is_an_inner_optimizer(rank, size):
    """MuLoCo: Muon inside, and what travels is coded with feedback."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 96, bias=False), nn.ReLU(), nn.Linear(96, 80, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    codec = "topk:0.015625,indices=int12,values=bins2"
    sparse = {"lr": 1.0, "momentum": 0.0, "feedback": "decay:0.95", "average": "senders"}
    generator = torch.Generator().manual_seed(rank)
    local = pycomm.LocalSGD(model, every=4, codec=codec, **sparse)
    losses = []
    for _ in range(32):
        x = torch.randn(16, 80, generator=generator)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        local.step()
        losses.append(loss.item())
    # Eight rounds that send a 64th of the values: exact averages come to 0.69 of the first losses.
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    return values(model)


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
    forms = (Blocking(), Streamed()), (Streamed(), Streamed(overlap=2))
    differ = [("exchange", form[rank]) for form in forms]
    for name, theirs in [("every", 8 + rank), ("weighted", rank == 1), *differ]:
        with pytest.raises(pycomm.WireMismatch, match=f"LocalSGD: {name}="):
            pycomm.LocalSGD(nn.Linear(4, 4), **{"every": 8, name: theirs})
