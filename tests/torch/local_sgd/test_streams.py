"""LocalSGD in streams: fragments, overlap and mixing; weights; averages over senders."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm.local_sgd import Blocking, Streamed
from pycomm.local_sgd.outer import split
from pycomm.reduction.weights import factors
from tests.torch.harness import alike, all_equal, equal, network, train_step, values
from tests.torch.local_sgd.test_local_sgd import PLAIN, train
from tests.torch.pool import on_ranks

BACKENDS = ["pycomm", "gloo"]


def parameters(*sizes: int) -> dict[str, nn.Parameter]:
    return {f"p{i}": nn.Parameter(torch.zeros(size)) for i, size in enumerate(sizes)}


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
    parts = split(parameters(*sizes), fragments, 10)
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


@pytest.mark.parametrize("options", [STREAM, LATER], ids=str)
def test_overlap_gives_the_same_bits_on_all_backends(pool, options):
    (a, _, _), (b, _, _) = pool.run(train, 12, options)
    (c, _, _), _ = pool.run(train, 12, options, backend="gloo")
    assert equal(a, b)
    assert equal(a, c)


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


def check_senders(rank: int, size: int, average: str) -> list[float]:
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
    return model.weight.detach()[:, :8].flatten().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_averaged_over_the_ranks_that_sent_them(pool, backend):
    a, b = pool.run(check_senders, "senders", backend=backend)
    assert a == b
    assert a[:4] == [9.0, 2.0, 2.0, 0.0]
    assert a[8 + 7] == 1.0
    a, b = pool.run(check_senders, "ranks", backend=backend)
    assert a == b
    assert a[:4] == [9.0, 1.0, 1.0, 0.0]


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
