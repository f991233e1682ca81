"""A new member gets model and optimizer of one that has them: pycomm.elastic.hand_over."""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm import elastic
from pycomm.elastic import transfer
from pycomm.elastic.contents import write
from tests.extent import each_value
from tests.torch.elastic.member import on_members
from tests.torch.harness import all_equal, check_sum, equal, values
from tests.torch.pool import on_ranks

SMALL = 4096  # bytes of a chunk: the models here take many


def chunks_of(nbytes: int) -> Any:
    """Within it, messages have this size."""
    return patch.object(transfer, "_CHUNK", nbytes)


class Counter(nn.Module):
    """A module with an extra state, which is no tensor, and one which is."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = {"steps": 0, "scale": torch.zeros(3), "kind": torch.float16}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class Net(nn.Module):
    """Tied, empty, odd, scalar and non-contiguous parameters and buffers of all kinds of dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(129, 33)
        self.norm = nn.BatchNorm1d(33)  # its count of batches is int64
        self.head = nn.Linear(33, 129)
        self.head.weight = self.embed.weight
        self.brain = nn.Parameter(torch.zeros(70, 61, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.scalar = nn.Parameter(torch.zeros(()))
        self.turned = nn.Parameter(torch.zeros(31, 47).t())
        self.halved = nn.Parameter(torch.zeros(40, 90, dtype=torch.float64)[:, ::2])
        self.small = nn.Parameter(torch.zeros(777, dtype=torch.float16))
        self.register_buffer("mask", torch.zeros(1001, dtype=torch.bool))
        self.register_buffer("complex", torch.zeros(7, dtype=torch.complex64))
        self.register_buffer("none", None)
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.counter = Counter()


def state_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Return all tensors of a state that a hand-over promises, in one order."""
    found = [p.detach() for p in model.parameters()]
    for module in model.modules():
        kept = module._buffers.items()
        found += [b for n, b in kept if n not in module._non_persistent_buffers_set]
    for module in model.modules():
        if isinstance(module, Counter):
            found += [torch.tensor(module.seen["steps"]), module.seen["scale"]]
            found.append(torch.tensor(list(str(module.seen["kind"]).encode())))
    if optimizer is not None:
        for group in optimizer.param_groups:
            found.append(torch.tensor([float(group["lr"])], dtype=torch.float64))
            for parameter in group["params"]:
                found += [v for _, v in sorted(optimizer.state.get(parameter, {}).items())]
    return [t for t in found if isinstance(t, torch.Tensor)]


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().resolve_conj().reshape(-1).contiguous().view(torch.uint8).tolist()


def digest(model: nn.Module, optimizer: Any) -> list[tuple[str, list[int], list[int]]]:
    return [(str(t.dtype), list(t.shape), bits(t)) for t in state_of(model, optimizer)]


def train(model: Net, optimizer: Any, steps: int) -> None:
    """Fill a state with values that are easily lost: NaNs of several bits, denormals, -0."""
    torch.manual_seed(steps)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randn(tensor.shape) * 3)
        model.complex.copy_(torch.randn(7) + 1j * torch.randn(7))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        optimizer.step()
    model.counter.seen = {"steps": steps, "scale": torch.tensor([1.0, float("nan"), -0.0])}
    model.counter.seen["kind"] = OrderedDict(dtype=torch.bfloat16, device=torch.device("cpu"))
    odd = torch.tensor([0x7FC00001, 0x7F800001, 1, -(2**31), 0x007FFFFF, 0x7F800000])
    model.embed.weight.data.view(-1)[:6] = odd.to(torch.int32).view(torch.float32)
    odd = torch.tensor([0x7FC1, 0x7F81, 1, -(2**15), 0x7F, 0x7F80], dtype=torch.int16)
    model.brain.data.view(-1)[-6:] = odd.view(torch.bfloat16)
    model.head.bias.data[:3] = torch.tensor([1, 0x007FFFFF, -(2**31) + 5]).int().view(torch.float32)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), amsgrad=True),
}


def give(rank: int, size: int, new: Sequence[int], optimizer: str, chunk: int) -> Any:
    """All take part; return the state, its optimizer's type, and who has sent."""
    torch.manual_seed(100 + rank)
    model = Net()
    made = OPTIMIZERS[optimizer](model.parameters()) if optimizer else None
    if rank not in new:
        trained = made or torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, trained, 3)
        if made is not None:
            made.param_groups[0]["lr"] = 0.125  # by a schedule
    held = [id(p) for p in model.parameters()]
    strides = [p.stride() for p in model.parameters()]
    cache = model.cache.clone()
    with chunks_of(chunk):
        source = elastic.hand_over(model, made, has=rank not in new)
    assert held == [id(p) for p in model.parameters()]
    assert strides == [p.stride() for p in model.parameters()]
    assert torch.equal(cache, model.cache)
    assert model.head.weight is model.embed.weight
    given = digest(model, made)
    if made is not None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        made.step()
    dist.barrier()
    return given, digest(model, made), source


@each_value
@pytest.mark.parametrize(
    ("ranks", "new", "backend"),
    [(2, [1], "pycomm"), (3, [0, 2], "pycomm"), (4, [0, 1, 3], "gloo"), (5, [0, 2, 3], "pycomm")],
)
@pytest.mark.parametrize(
    ("optimizer", "chunk"), [("adamw", SMALL), ("", SMALL + 3), ("adam", 16 << 20)]
)
def test_new_members_have_the_same_bits(pool, ranks, new, backend, optimizer, chunk):
    done = pool.run(give, new, optimizer, chunk, ranks=ranks, backend=backend)
    first = min(set(range(ranks)) - set(new))
    for given, stepped, source in done:
        assert source == first
        assert given == done[first][0]
        assert stepped == done[first][1]


@on_ranks(2, then=all_equal)
def test_a_state_of_ones_own_is_lost_to_the_one_handed_over(rank, size):
    model = Net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, 3 + rank)
    assert elastic.hand_over(model, optimizer, has=rank == 0) == 0
    assert elastic.hand_over(model, optimizer, has=True) is None  # nobody is new
    assert optimizer.state[model.brain]["momentum_buffer"].dtype == torch.bfloat16
    return digest(model, optimizer)


class Wide(torch.optim.SGD):
    """An optimizer of bfloat16 parameters whose state is float32."""

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["master"] = torch.randn(parameter.shape)


@on_ranks(2, then=all_equal)
def test_states_of_another_dtype_than_their_parameter_keep_it(rank, size):
    torch.manual_seed(rank)
    model = nn.Linear(300, 7, dtype=torch.bfloat16)
    optimizer = Wide(model.parameters(), lr=0.5)
    if rank == 1:
        optimizer.step()
    with chunks_of(SMALL):
        elastic.hand_over(model, optimizer, has=rank == 1)
    assert optimizer.state[model.weight]["master"].dtype == torch.float32
    return digest(model, optimizer)


@on_members(3, formed=False, then=all_equal)
def test_a_member_that_joins_goes_on_with_the_others(rank, member, handles):
    """One of three joins a group of two that trains in DDP; afterwards all go on together."""
    member.form(1, handles[2:] if rank == 2 else handles[:2])
    torch.manual_seed(rank)
    net = nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(model: nn.Module) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 40) * dist.get_rank()).sum().backward()
        optimizer.step()

    if rank < 2:
        ddp = DistributedDataParallel(net)
        step(ddp)
        del ddp
    member.form(2, [handles[2], handles[0], handles[1]])
    assert elastic.hand_over(net, optimizer, has=rank < 2) == 1
    step(DistributedDataParallel(net))
    return digest(net, optimizer)


# ------------------------------------------------------------------ what does not fit


def changed(what: str, model: Any) -> tuple[nn.Module, Any]:
    """Return model and optimizer of the rank that is unlike the others."""
    kind: Any = torch.optim.AdamW
    if what == "shape":
        model.scalar = nn.Parameter(torch.zeros(2))
    elif what == "dtype":
        model.brain = nn.Parameter(model.brain.detach().float())
    elif what == "name":
        model.another, model.small = model.small, None
    elif what == "tie":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    elif what == "expanded":
        model.mask = torch.zeros(1, dtype=torch.bool).expand(1001)
    elif what == "optimizer":
        kind = torch.optim.Adam
    parts = list(model.parameters())
    groups: list[Any] = [{"params": parts[:2]}, {"params": parts[2:]}]
    if what == "groups":
        groups = [{"params": parts}]
    if what == "fewer":
        groups = groups[:1]
    if what == "foreign":
        groups.append({"params": [nn.Parameter(torch.zeros(3))]})
    optimizer = None if what == "none" else kind(groups, lr=0.1)
    if what == "pickle":
        optimizer.param_groups[0]["callback"] = lambda: None
    if what == "class":
        optimizer.param_groups[0]["callback"] = os.system
    return model, optimizer


UNLIKE = [  # what differs, the error on all ranks, its text, and the rank that is unlike the others
    ("shape", "WireMismatch", r"rank 0 has .*scalar, float32 \[\].*rank 2 has .*\[2\]", 2),
    ("dtype", "WireMismatch", "rank 0 has .*bfloat16.*rank 1 has .*float32", 1),
    ("name", "WireMismatch", "another", 1),
    ("tie", "WireMismatch", "which is embed.weight", 0),
    ("optimizer", "WireMismatch", r"adamw.AdamW.*adam.Adam", 2),
    ("groups", "WireMismatch", "group 0", 1),
    ("fewer", "WireMismatch", "group 1 .*rank 2 has 'nothing more'", 2),
    ("none", "WireMismatch", "no optimizer", 1),
    ("nobody", "Error", "no rank has the state", 1),
    ("expanded", "Error", "rank 1 cannot take part .*mask is expanded", 1),
    ("foreign", "Error", "rank 2 cannot take part .*none of the model's", 2),
    ("pickle", "Error", r"rank 0 cannot .* reads .*\['callback'\] builtins.function", 0),
    ("class", "Error", r"rank 0 cannot .*\['callback'\] builtins\.builtin_function", 0),
]


@on_ranks(3)
def test_what_does_not_fit_is_told_on_all_before_sending(rank, size):
    for what, kind, text, who in UNLIKE:
        model, optimizer = changed(what if rank == who else "", Net())
        before = digest(model, optimizer)
        with pytest.raises(getattr(pycomm, kind), match=text) as raised:
            elastic.hand_over(model, optimizer, has=rank == 0 and what != "nobody")
        assert type(raised.value).__name__ == kind, what
        assert str(raised.value).startswith(f"rank {rank}: ")
        assert digest(model, optimizer) == before
        check_sum()  # the group goes on


@on_ranks(2)
def test_bad_arguments_raise_at_the_call(rank, size):
    model = nn.Linear(2, 2)
    for given in ({"has": 1}, {"has": True, "optimizer": model}):
        with pytest.raises(TypeError):
            elastic.hand_over(model, **given)
    with pytest.raises(TypeError):
        elastic.hand_over(model.parameters(), has=True)
    check_sum()


# ------------------------------------------------------------------ a member that is lost


def at_chunk(number: int, then: Callable[[], None]) -> Any:
    """Call `then` when this rank's chunk of this number has arrived."""
    calls, answer = [], transfer.answer

    def counted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            then()
        return answer(*args)

    return patch.object(transfer, "answer", counted)


@on_ranks(3)
@pytest.mark.parametrize("dies", [(0,), (1,)])
def test_a_lost_member_is_told_and_the_others_are_as_before(rank, size, dies):
    """A rank dies when some of the chunks have been sent."""
    (who,) = dies
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
    before = digest(model, optimizer)
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    dies = at_chunk(40, die) if rank == who else nullcontext()
    told = pytest.raises(pycomm.Error, match=f"rank {rank}: the hand-over of rank 0's")
    start = time.monotonic()
    with chunks_of(4 * SMALL), dies, told as raised:
        elastic.hand_over(model, optimizer, has=rank == 0)
    assert time.monotonic() - start < 15, "long before the group's timeout of 20 s"
    assert isinstance(raised.value, pycomm.PeerLost)
    assert raised.value.rank == who
    assert digest(model, optimizer) == before


@on_ranks(3)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_holds_nobody_up(rank, size, who):
    """A rank fails and lives: all ranks are told, none has changed, and the group goes on."""
    torch.manual_seed(rank)
    model = nn.Linear(300, 300)
    before = values(model)

    def gives_up(what: Any) -> Any:
        if isinstance(what, int) and what <= SMALL:
            return room(what)
        raise MemoryError

    room = transfer._room
    name = "rows_of" if who == 0 else "_room"
    fails = patch.object(transfer, name, gives_up) if rank == who else nullcontext()
    refused = pytest.raises(
        MemoryError if rank == who else pycomm.Error,
        match="" if rank == who else f"rank {who} has failed",
    )
    start = time.monotonic()
    with chunks_of(SMALL), fails, refused:
        elastic.hand_over(model, has=rank == 0)
    assert time.monotonic() - start < 15, "long before the group's timeout of 20 s"
    assert equal(values(model), before)
    check_sum()
    assert elastic.hand_over(model, has=rank == 0) == 0
    wanted = model.weight.detach().clone()
    dist.broadcast(wanted, 0)
    assert torch.equal(wanted, model.weight)


class Acts:
    """What would act while it is read."""

    def __reduce__(self) -> Any:
        return os.system, ("false",)


@on_ranks(2)
def test_a_sender_that_lies_is_refused(rank, size):
    """It sends less than the new member has tensors for, no state, or what would act."""
    torch.manual_seed(rank)
    model = nn.Linear(100, 100)
    before = values(model)

    def lie(self: Any, pack: Any, what: str) -> tuple[bytes, list[Any]]:
        if what == "more":
            return pack(self)[0], [torch.zeros(3)]
        return {"text": b"junk", "acts": write(Acts()), "other": write([1])}[what], []

    for what in ("more", "text", "acts", "other"):
        packs = partialmethod(lie, transfer.Contents.pack, what)
        lies = patch.object(transfer.Contents, "pack", packs)
        with lies if rank == 0 else pytest.raises(pycomm.Error, match="another member has sent"):
            assert elastic.hand_over(model, has=rank == 0) == 0
        assert equal(values(model), before)
        check_sum()


@on_ranks(2)
def test_a_sharded_model_is_refused(rank, size):
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(pycomm.Error, match=r"is a DTensor, .*use torch\.distributed\.checkpoint"):
        elastic.hand_over(model, has=rank == 0)
    check_sum()
