"""`pycomm.horovod` does what Horovod's functions for PyTorch are documented to do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
import pycomm.horovod as hvd
from tests.torch.harness import all_equal, equal, inputs, values
from tests.torch.pool import on_ranks

# ------------------------------------------------------------------------------ collectives


@on_ranks()
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_allreduce(rank, size):
    hvd.init()
    base, ones = torch.arange(5, dtype=torch.float32), range(1, size + 1)
    x, n = base * (rank + 1), torch.arange(5) + rank
    total, integers = base * sum(ones), torch.arange(5) * size + sum(range(size))
    product = torch.stack([torch.arange(5) + one for one in ones]).prod(0)
    for got, want in (
        (hvd.allreduce(x), total / size),
        (hvd.allreduce(x, op=hvd.Sum), total),
        (hvd.allreduce(x, average=False), total),  # the deprecated word
        (hvd.allreduce(n, op=hvd.Max), torch.arange(5) + size - 1),
        (hvd.allreduce(n, op=hvd.Min), torch.arange(5)),
        (hvd.allreduce(n + 1, op=hvd.Product), product),
        (hvd.allreduce(n, op=hvd.Average), (integers / size).to(torch.long)),
        (hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25), total / 2),
        (hvd.allreduce(x, compression=hvd.Compression.fp16), (total / size).half().float()),
        (hvd.allreduce(torch.tensor(float(rank))), torch.tensor(sum(range(size)) / size)),
        (x, base * (rank + 1)),  # none of these has changed it
        (hvd.grouped_allreduce([x, n], op=hvd.Sum), [total, integers]),
        (hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), total),
    ):
        assert equal(got, want)
    handle = hvd.grouped_allreduce_async_([x, n], op=hvd.Sum)
    assert equal(hvd.synchronize(handle), [total, integers])
    assert hvd.poll(handle)
    assert equal([x, n], [total, integers])
    parameter = torch.nn.Parameter(torch.full((2,), rank + 1.0))
    assert hvd.allreduce_(parameter) is parameter
    assert torch.equal(parameter, torch.full((2,), sum(ones) / size))
    turned = torch.nn.Parameter(torch.full((2, 3), rank + 1.0).t())
    hvd.allreduce_(turned, op=hvd.Sum)
    assert torch.equal(turned, torch.full((3, 2), float(sum(ones))))
    table = torch.arange(6.0).view(2, 3) * (rank + 1)
    hvd.allreduce_(table.t(), op=hvd.Sum)  # not contiguous
    assert torch.equal(table, torch.arange(6.0).view(2, 3) * sum(ones))


@on_ranks(3)
def test_allgather_and_broadcast(rank, size):
    hvd.init()
    rows = torch.full((rank, 2), float(rank))  # none on the first rank
    own = torch.full((3,), float(rank))
    gathered = torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]])
    assert torch.equal(hvd.allgather(rows), gathered)
    assert torch.equal(hvd.broadcast(own, root_rank=1), torch.ones(3))
    assert torch.equal(own, torch.full((3,), float(rank)))
    hvd.broadcast_(own, 1)
    assert torch.equal(own, torch.ones(3))
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert hvd.broadcast_object([rank] if rank == 1 else None, root_rank=1) == [1]
    assert (hvd.rank(), hvd.size(), hvd.is_homogeneous()) == (rank, size, True)
    assert (hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (size, 0, 1)
    hvd.barrier()


@on_ranks(2)
def test_gradients_flow_through_collectives(rank, size):
    hvd.init()
    x = torch.full((rank + 1,), 2.0, requires_grad=True)
    (hvd.allgather(x) * torch.arange(float(sum(range(size + 1))))).sum().mul(rank + 1).backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 2.0]) * 1.5 if rank else torch.tensor([0.0]))
    y = torch.ones(2, requires_grad=True)
    hvd.allreduce(y, op=hvd.Sum).sum().mul(rank + 1).backward()
    assert torch.equal(y.grad, torch.full((2,), 3.0))
    z = torch.ones(2, requires_grad=True)
    hvd.broadcast(z, 1).sum().mul(rank + 1).backward()
    assert torch.equal(z.grad, torch.full((2,), 1.5 * rank))  # Horovod averages these
    with pytest.raises(pycomm.Error, match="no gradients flow through Max"):
        hvd.allreduce(y, op=hvd.Max)


# -------------------------------------------------------------------------------- the optimizer


class Net(nn.Module):
    """Some layers, one of which only even ranks use, and one nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(16, 160), nn.Tanh(), nn.Linear(160, 4))
        self.sometimes = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 4, dtype=torch.float64)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = self.body(x)
        x = x if odd else self.sometimes(x)
        return self.wide(x.double()).float()


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(8, 16, generator=data), rank % 2 == 1).square().mean()


def train(
    rank: int,
    size: int,
    options: dict[str, Any],
    passes: int = 1,
    before: str = "nothing",
    by_hand: bool = False,
) -> list[torch.Tensor]:
    """Train; by hand, all gradients are summed, and divided, before the step."""
    hvd.init()
    model = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    codec = options.pop("codec", None)
    if codec is not None:
        options["compression"] = hvd.Compression.codec(codec)
    if not by_hand:
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), backward_passes_per_step=passes, **options
        )
        assert isinstance(optimizer, torch.optim.SGD)
    scaled = before == "unscale" and not by_hand
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    for step in range(4):
        for part in range(passes):
            scaler.scale(loss_of(model, rank, step * passes + part)).backward()
        for parameter in model.parameters() if by_hand else ():
            if parameter.requires_grad:
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(total)
                parameter.grad = total if options.get("op") is hvd.Sum else total / size
        if before == "nothing":
            optimizer.step()
        else:
            if not by_hand:
                optimizer.synchronize()
            if before == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with nullcontext() if by_hand else optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize(
    ("passes", "before", "options"),
    [
        (1, "nothing", {}),
        (2, "nothing", {}),
        (1, "clip", {}),
        (1, "unscale", {}),
        (1, "nothing", {"op": "Sum"}),
        (1, "nothing", {"gradient_predivide_factor": 2.0}),
    ],
    ids=["average", "passes", "clipped", "scaled", "sum", "predivide"],
)
def test_the_optimizer_averages_gradients_before_its_step(pool, passes, before, options):
    options = {k: getattr(hvd, v) if k == "op" else v for k, v in options.items()}
    wanted = pool.run(train, options, passes, before, True)
    all_equal(wanted + pool.run(train, options, passes, before))


@pytest.mark.parametrize("codec", ["int4", "fp16"])
def test_compressed_gradients_are_near_and_equal(pool, codec):
    exact, _ = pool.run(train, {}, 1, "nothing", True)
    options = {"compression": hvd.Compression.fp16} if codec == "fp16" else {"codec": codec}
    first, second = pool.run(train, options)
    assert equal(first, second)
    assert not equal(first, exact)
    # int4 rounds the largest of 128 values to 15 levels, and feedback returns what was lost.
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(first, exact, strict=True))


@on_ranks(2, then=all_equal)
def test_parameters_and_optimizer_become_those_of_the_root(rank, size):
    hvd.init()
    torch.manual_seed(rank)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    if rank == 1:  # only the root has a state, as one that has loaded a checkpoint
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    hvd.broadcast_parameters(list(model.parameters()), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.2
    assert state["state"].keys() == {0, 1}
    return values(model), state


@on_ranks(2)
def test_a_state_travels_that_other_ranks_can_read(rank, size):
    hvd.init()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    group = optimizer.param_groups[0]
    if rank == 0:
        group |= {"lr": np.float64(0.05), "momentum": np.float32(0.5), "nesterov": np.True_}
    hvd.broadcast_optimizer_state(optimizer)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.05, 0.5, True)
    if rank == 0:
        group["betas"] = [0.9, np.ones(2)]
    with pytest.raises(pycomm.Error, match=r"\['param_groups'\]\[0\]\['betas'\]\[1\] numpy"):
        hvd.broadcast_optimizer_state(optimizer)
    assert group["lr"] == 0.05
    dist.barrier()


@on_ranks(2)
def test_mistakes_are_told_and_the_group_stays_usable(rank, size):
    hvd.init()
    model = nn.Linear(4, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, error, text in (
        ({"named_parameters": [("w", model.weight)]}, ValueError, "no name for 1 parameters"),
        ({"named_parameters": [("w", p) for p in model.parameters()]}, ValueError, "twice"),
        ({"op": hvd.Max}, pycomm.Error, "averages or sums"),
        ({"compression": object()}, pycomm.Error, r"Compression\.codec"),
        ({"process_set": hvd.ProcessSet([0])}, pycomm.Error, "call hvd.add_process_set"),
    ):
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(plain, **options)
    with pytest.raises(pycomm.Error, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(pycomm.Error, match="DistributedOptimizer, which keeps"):
        hvd.allreduce(torch.ones(2), compression=hvd.Compression.codec("int4"))
    with pytest.raises(pycomm.Error, match="no gradients flow through Max"):
        hvd.reducescatter(torch.ones(2, requires_grad=True), op=hvd.Max)
    with pytest.raises(ValueError, match="op= and average="):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="a scalar has none"):
        hvd.alltoall(torch.tensor(1.0))
    with pytest.raises(TypeError, match="found a int"):
        hvd.broadcast_parameters([1])
    optimizer = hvd.DistributedOptimizer(plain)
    with pytest.raises(pycomm.Error, match="a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(pycomm.Error, match="on the way"):
        optimizer.zero_grad()
    with pytest.raises(pycomm.Error, match="backward_passes_per_step"):
        model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(pycomm.Error, match="while it travelled"):  # the second one has added to it
        optimizer.synchronize()
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
        optimizer.step()
    dist.barrier()


def test_what_it_does_not_have_says_what_to_write():
    with pytest.raises(AttributeError, match=r"no join: write torch\.distributed\.algorithms"):
        _ = hvd.join
    with pytest.raises(AttributeError, match="no elastic: write checkpoints under torchrun"):
        _ = hvd.elastic
    with pytest.raises(AttributeError, match=r"no nonsense$"):
        _ = hvd.nonsense


def test_a_star_import_takes_its_names_and_no_modules():
    found: dict[str, Any] = {}
    exec("from pycomm.horovod import *", found)
    assert found["allreduce"] is hvd.allreduce
    assert not [name for name in found if isinstance(found[name], type(pycomm))]


def test_before_init_there_is_a_clear_error():
    with pytest.raises(pycomm.Error, match=r"hvd\.init\(\) first"):
        hvd.rank()


# ------------------------------------------------------------------- what changes between two steps


def changes(rank: int, size: int, what: str, by_hand: bool) -> list[torch.Tensor]:
    """Train a layer, and from step 3 on another one, too, or no longer."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(what != "thaw")
    parts = model[1] if what == "add" else model
    optimizer: Any = torch.optim.AdamW(parts.parameters(), lr=0.01, weight_decay=0.1)
    if not by_hand:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(6):
        if step == 3 and what == "add":
            optimizer.add_param_group({"params": list(model[0].parameters())})
        elif step == 3:
            model[0].requires_grad_(what == "thaw")
        optimizer.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        for parameter in (p for g in optimizer.param_groups for p in g["params"]):
            if by_hand and parameter.grad is not None:
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("what", ["thaw", "freeze", "add"])
def test_changing_parameters_are_followed(pool, what):
    all_equal(pool.run(changes, what, True) + pool.run(changes, what, False))


def check_step_is_told(rank: int, size: int, model: nn.Module, optimizer: Any, text: str) -> None:
    """A step that ranks take differently raises on all, and the next one is that of the others."""
    before = values(model)
    with pytest.raises(pycomm.WireMismatch, match=text):
        optimizer.step()
    assert equal(before, list(model.parameters()))
    model.requires_grad_(True)
    optimizer.set_backward_passes_per_step(1)
    check_averages(rank, model, optimizer)


def check_averages(rank: int, model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(inputs(rank, 1)).square().mean().backward()
    wanted = [hvd.allreduce(p.grad) for p in model.parameters()]
    optimizer.synchronize()
    for parameter, average in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, average)


def two_layers(frozen: bool = False, **options: Any) -> tuple[nn.Module, Any]:
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16).requires_grad_(not frozen), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


@on_ranks(2)
@pytest.mark.parametrize(
    ("codec", "frozen"),
    [("fp32", False), ("int4", False), ("fp32", True)],
)
def test_different_trained_parameters_are_told(rank, size, codec, frozen):
    """Of a layer that was frozen, no rank has entered the parameters before."""
    model, optimizer = two_layers(frozen, compression=hvd.Compression.codec(codec))
    model[0].requires_grad_(rank == 0)
    model(inputs(rank, 0)).square().mean().backward()
    text = r"a step that trains 4 .* a step that trains 2"
    if codec == "fp32":
        return check_step_is_told(rank, size, model, optimizer, text)
    with pytest.raises(pycomm.WireMismatch, match=text):
        optimizer.step()
    optimizer.compression_state.settle()
    assert not any(map(any, optimizer.compression_state.residual_norms().values()))


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "other", "text"),
    [
        ("op", hvd.Sum, "by Average, .* by Sum, "),
        ("backward_passes_per_step", 2, " 1 backward passes .* 2 backward passes "),
    ],
)
def test_different_options_of_optimizers_are_told(rank, size, name, other, text):
    model, optimizer = two_layers(**({name: other} if rank else {}))
    model(inputs(rank, 0)).square().mean().backward()
    if name == "backward_passes_per_step":  # it may be set, and then all go on
        return check_step_is_told(rank, size, model, optimizer, text)
    before = values(model)
    with pytest.raises(pycomm.WireMismatch, match=text):
        optimizer.step()
    assert equal(before, list(model.parameters()))
    optimizer.zero_grad()
    dist.barrier()


@on_ranks(2)
def test_a_step_that_cannot_begin_is_begun_anew(rank, size):
    model, optimizer = two_layers()
    fails = patch.object(optimizer.compression_state, "begin_step", side_effect=pycomm.Error)
    with fails, pytest.raises(pycomm.Error):
        model(inputs(rank, 0)).square().mean().backward()
    with fails, pytest.raises(pycomm.Error):
        optimizer.step()
    check_averages(rank, model, optimizer)


@on_ranks(2)
def test_a_scaler_looks_at_averages_for_a_fused_optimizer(rank, size):
    """It skips a step of which it has found an infinity; all ranks must find the same."""
    hvd.init()
    model = nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = values(model)
    loss = model(torch.ones(1, 4)).sum() * (float("inf") if rank else 1.0)
    scaler.scale(loss).backward()
    with pytest.raises(pycomm.Error, match=r"averaged, .* Call optimizer\.synchronize\(\) first"):
        scaler.step(optimizer)
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    assert equal(before, list(model.parameters()))
    assert scaler.get_scale() == 4.0


@on_ranks(2)
def test_nothing_is_set_while_gradients_travel(rank, size):
    model, optimizer = two_layers()
    saved = optimizer.compression_state.state_dict()
    for step in range(2):
        optimizer.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        wanted = [hvd.allreduce(p.grad) for p in model.parameters()]
        if step == 1:
            model[0].requires_grad_(False)  # from the next step on
        for change in (
            lambda: optimizer.set_backward_passes_per_step(1),
            lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
            lambda: optimizer.compression_state.set_policy("int8"),
            lambda: optimizer.compression_state.load_state_dict(saved),
            optimizer.compression_state.state_dict,
        ):
            with pytest.raises(pycomm.Error, match="on the way"):
                change()
        optimizer.step()
        for parameter, average in zip(model.parameters(), wanted, strict=True):
            assert torch.allclose(parameter.grad, average)


class Table(nn.Module):
    """An embedding, most of whose gradient is zero, and its bias."""

    def __init__(self, dtype: torch.dtype, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(40_000, 3, dtype=dtype, sparse=sparse)  # more than one block
        self.bias = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        table = self.rows.weight  # torch looks no complex numbers up with gradients
        rows = table[numbers] if table.is_complex() else self.rows(numbers)
        return (rows + self.bias).abs().square().mean()


def one_value(model: Table) -> None:
    """Change the least significant bit of one value, and no version."""
    gradient = model.rows.weight.grad.data
    values = gradient._values() if gradient.is_sparse else gradient[33_333]
    values = torch.view_as_real(values) if values.is_complex() else values
    values.view(-1)[:1].view(torch.uint8)[0] ^= 1


def swapped(model: Table) -> None:
    gradient = model.rows.weight.grad.data
    gradient = gradient._values() if gradient.is_sparse else gradient
    gradient.copy_(gradient.flip(0))


CHANGES = {
    "scaled by GradScaler": None,
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "zeroed": lambda model: model.zero_grad(set_to_none=False),
    "removed": lambda model: model.zero_grad(),
    "one value": one_value,
    "swapped": swapped,
    "scaled unseen": lambda model: [p.grad.data.mul_(2.0**-9) for p in model.parameters()],
}
FORMS = {
    "float32": (torch.float32, False),
    "sparse": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False),
    "complex64": (torch.complex64, False),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("what", "form"),
    [(what, "float32") for what in CHANGES]
    + [(what, form) for what in ("one value", "swapped") for form in list(FORMS)[1:]],
)
def test_a_gradient_that_changes_while_it_travels_is_an_error(rank, size, what, form):
    hvd.init()
    torch.manual_seed(0)
    model = Table(*FORMS[form])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = values(model)
    scaler.scale(model(torch.tensor([7, 33_333]))).backward()
    if what != "scaled by GradScaler":
        CHANGES[what](model)
    with pytest.raises(pycomm.Error, match=r"while it travelled: call optimizer\.synchronize"):
        scaler.step(optimizer) if what == "scaled by GradScaler" else optimizer.step()
    assert equal(before, list(model.parameters()))


# ----------------------------------------------------------------------------- calls that differ

MISMATCHES = {
    "names": lambda rank: hvd.allreduce(torch.ones(3), name="ab"[rank]),
    "shapes": lambda rank: hvd.allreduce(torch.ones(3 + rank)),
    "dtypes": lambda rank: hvd.allgather(torch.ones(3, dtype=(torch.int32, torch.float32)[rank])),
    "roots": lambda rank: hvd.broadcast_(torch.ones(3), rank),
    "operations": lambda rank: (hvd.reducescatter, hvd.allreduce)[rank](torch.ones(4)),
    "factors": lambda rank: hvd.allreduce(torch.ones(3), prescale_factor=1.0 + rank),
    "rows": lambda rank: hvd.alltoall(torch.ones(4, 2 + rank)),
}


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("what", MISMATCHES)
def test_different_calls_leave_the_group_usable(rank, size, what):
    hvd.init()
    with pytest.raises(pycomm.WireMismatch, match=r"rank 0 calls .* and rank 1 calls"):
        MISMATCHES[what](rank)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]  # it can be used on


@on_ranks(2)
def test_asynchronous_calls_are_matched_by_name(rank, size):
    hvd.init()
    names = ["loss", "accuracy"] if rank else ["accuracy", "loss"]
    handles = [hvd.allreduce_async(torch.ones(1), name=name) for name in names]
    with pytest.raises(pycomm.WireMismatch, match="called 'accuracy'"):
        hvd.synchronize(handles[0])


EXTREMES = {
    torch.uint8: [250, 255, 0],
    torch.int8: [127, -128, -1],
    torch.int16: [30_000, -32_768, 7],
    torch.int32: [2**31 - 1, -(2**31), -5],
    torch.int64: [2**61 - 1, -(2**61), -(2**60) - 3],  # their sum has to fit
}
WAYS = {
    "all-reduce": lambda x: hvd.allreduce(x),
    "in place": lambda x: hvd.allreduce_(x),
    "asynchronous": lambda x: hvd.synchronize(hvd.allreduce_async(x)),
    "divided before": lambda x: hvd.allreduce(x, prescale_factor=2.0, postscale_factor=0.5),
    "a quarter of the sum": lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.25),
    "sparse": lambda x: hvd.sparse_allreduce_async(x.to_sparse())().to_dense(),
    "reduce-scatter": lambda x: hvd.allgather(hvd.reducescatter(x)),
}


@on_ranks(3)
@pytest.mark.parametrize("way", WAYS)
def test_averages_of_integers_are_exact(rank, size, way):
    hvd.init()
    for dtype, extremes in EXTREMES.items():
        if dtype is torch.int64 and way in ("divided before", "a quarter of the sum"):
            continue  # factors are float64
        for shift in range(3):  # other values meet
            rows = [extremes[r * shift % 3 :] + extremes[: r * shift % 3] for r in range(size)]
            got = WAYS[way](torch.tensor(rows[rank], dtype=dtype))
            sums = [sum(column) for column in zip(*rows, strict=True)]
            parts = 4 if way == "a quarter of the sum" else size
            exact = [abs(total) // parts * (1 if total > 0 else -1) for total in sums]
            assert got.dtype == dtype
            assert got.tolist() == exact


# ----------------------------------------------------------------------------- more collectives


@on_ranks(3)
def test_other_collectives_and_process_sets(rank, size):
    hvd.init(process_sets="dynamic")
    odd, even = (hvd.add_process_set(range(first, size, 2)) for first in (1, 0))
    own, other = (odd, even) if rank % 2 else (even, odd)
    rows = torch.arange(float(2 * size)).view(size, 2) + 10 * rank
    start = torch.tensor([2.0 * rank, 2.0 * rank + 1])
    wanted = torch.stack([start + 10 * r for r in range(size)])
    assert torch.equal(hvd.alltoall(rows), wanted)
    grid = torch.full((sum(range(size)),), float(rank))
    parts, splits = hvd.alltoall(grid, torch.arange(size, dtype=torch.int32))
    assert torch.equal(parts, torch.arange(3.0).repeat_interleave(rank))
    assert splits.tolist() == [rank] * size

    table = torch.full((size + 1, 2), float(rank + 1))
    mine = 2 if rank == 0 else 1  # 4 rows on 3 ranks
    assert torch.equal(hvd.reducescatter(table, op=hvd.Sum), torch.full((mine, 2), 6.0))
    averages = hvd.grouped_reducescatter([table, table], op=hvd.Average)
    assert equal(list(averages), [torch.full((mine, 2), 2.0)] * 2)
    gathered = hvd.grouped_allgather([table[: rank + 1], table])
    assert gathered[0][:, 0].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert hvd.allgather(torch.tensor(float(rank))).tolist() == [0.0, 1.0, 2.0]

    assert (own.size(), own.rank()) == ((1, 0) if rank == 1 else (2, rank // 2))
    assert (own.included(), other.rank()) == (True, None)
    summed = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=own)
    assert summed.tolist() == [1 if rank == 1 else 2]
    sparse = hvd.sparse_allreduce_async(torch.eye(3).to_sparse() * (rank + 1))()
    assert torch.equal(sparse.to_dense(), torch.eye(3) * 2)
    assert hvd.allreduce(torch.tensor([2**60 + 1])).tolist() == [2**60 + 1]
    assert hvd.remove_process_set(own) is True
    assert own.size() is None
