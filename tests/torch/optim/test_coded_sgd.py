"""CodedSGD against its formula in plain torch, torch's SGD, and what may go wrong."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.policy.quality import nominal_error
from tests.extent import each_value
from tests.torch.harness import all_equal, equal, near, values
from tests.torch.interpreter import ROOT, Interpreter
from tests.torch.optim import table
from tests.torch.optim.table import gradients, train
from tests.torch.pool import on_ranks

SIZES = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}
STORED = "residual:storage=float32"  # as the formula has it


def make(codec: Any, **options: Any) -> tuple[Any, Any]:
    return table.make("sgd", codec=codec, **{"feedback": STORED, **SIZES, **options})


class Plain:
    """The formula of `CodedSGD` for one parameter on all ranks, with o and e times 1 - momentum."""

    def __init__(self, x: torch.Tensor, codec: str, ranks: int) -> None:
        self.x, self.codec, self.ranks = x.clone(), pycomm.codec(codec), ranks
        self.o = [torch.zeros_like(x) for _ in range(ranks)]
        self.e = [torch.zeros_like(x) for _ in range(ranks)]
        self.v, self.t, self.mu = nominal_error(self.codec) ** 2, 0, SIZES["momentum"]

    def code(self, p: torch.Tensor) -> torch.Tensor:
        return self.codec.decode(self.codec.encode(p.reshape(-1)), p.numel()).view_as(p)

    def step(self, gs: list[torch.Tensor], mu: float) -> None:
        left, coded = 0.0, 0.0
        for one in (*self.o, *self.e):
            one *= (1 - mu) / (1 - self.mu)
        self.mu = mu
        b = max(0.0, math.floor(1024 * (mu - self.v) / (1 - self.v)) / 1024)
        for r, g in enumerate(gs):
            left += float(self.e[r].square().sum())
            p = b * self.o[r] + (1 - b) * (g + SIZES["weight_decay"] * self.x) + self.e[r]
            self.o[r] = self.code(p)
            self.e[r] = p - self.o[r]
            coded += float(p.square().sum())
        self.x = self.x - SIZES["lr"] * sum(self.o) / self.ranks / (1 - mu)
        self.t += 1
        if self.t % 16 == 2:
            self.v = 0.75 * self.v + 0.25 * left / coded


@on_ranks(then=all_equal)
@each_value
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ["topk:0.02", "sign"])  # gathered: nobody codes the mean
@pytest.mark.parametrize("momenta", [[SIZES["momentum"]], [0.9, 0.5, 0.99]])
def test_a_step_is_that_of_the_formula(rank, size, codec, momenta):
    model, optimizer = make(pycomm.Policy(codec, rules=(), guard=None))
    plain = {n: Plain(p.detach(), codec, size) for n, p in model.module.named_parameters()}
    for step in range(20):  # past the second measurement
        mu = momenta[step // 6 % len(momenta)]  # as a schedule changes it
        optimizer.param_groups[0]["momentum"] = mu
        train(model, optimizer, rank, range(step, step + 1))
        for name, one in plain.items():
            one.step([gradients(r, step)[name] for r in range(size)], mu)
    for name, parameter in model.module.named_parameters():
        torch.testing.assert_close(parameter.detach(), plain[name].x, rtol=1e-4, atol=2e-5)
    return values(model)


@on_ranks(2)
@pytest.mark.parametrize("codec", ["fp32", "sign"])
def test_a_float64_parameter_keeps_its_digits(rank, size, codec):
    model = table.wrap("sgd", table.net().double())
    optimizer = table.coded("sgd", model, codec=codec, lr=2.0**-24, weight_decay=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    mine = {name: one.double() for name, one in gradients(rank, 0).items()}
    table.step(model, optimizer, mine)
    for x, parameter in zip(before, model.parameters(), strict=True):
        mean = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(parameter.detach(), x - 2.0**-24 * mean)


@on_ranks(2)
@pytest.mark.parametrize("codec", ["int4", "sign"])
def test_what_was_sent_in_another_layout(rank, size, codec):
    """What a rank has sent is what it had to send without what is left, also if the bucket is
    another one, for which the residual of the owner comes to that of the worker."""
    policy = pycomm.Policy(codec, rules=(), guard=None)
    model, optimizer = make(policy, feedback="residual:storage=float32")
    exchange, residuals = optimizer._exchange, optimizer.compression.residuals
    given: dict[str, torch.Tensor] = {}

    def recorded(values, names, store):
        parameters = dict(model.module.named_parameters())
        sizes = [parameters[name].numel() for name in names]
        given.update(zip(names, torch.split(values.clone(), sizes), strict=True))
        for name, one in given.items():
            if name in residuals:
                residual = residuals[name]
                residual.layouts = ["another", "another"]
                one += residual.current("worker") + size * residual.current("owner")
        return exchange(values, names, store)

    optimizer._exchange = recorded
    for step in range(3):
        train(model, optimizer, rank, range(step, step + 1))
        for name, sent in optimizer.momenta.own.items():
            left = residuals[name].current("worker")
            torch.testing.assert_close(sent.reshape(-1), given[name] - left, rtol=1e-5, atol=1e-6)


@on_ranks()
@pytest.mark.parametrize(("codec", "ranks"), [("fp32", 2), ("fp32", 3), ("sign", 1), ("sign", 2)])
def test_a_schedule_moves_exact_values_as_with_torch(rank, size, codec):
    """Of `sign` with two ranks that is the bias, which the policy leaves exact."""
    (a, one), b = make(codec), table.wrap("sgd", table.net())
    two = torch.optim.SGD(b.parameters(), **SIZES)
    settings = [(0.01, 0.9, 0.1), (0.0, 0.5, 0.1), (0.02, 0.0, 0.0), (0.01, 0.95, 0.5)]
    # DDP divides before the sum, which of three ranks is another rounding.
    same = equal if size < 3 else near
    for step in range(12):
        for optimizer in (one, two):
            named = zip(("lr", "momentum", "weight_decay"), settings[step % 4], strict=True)
            optimizer.param_groups[0].update(named)
        train(a, one, rank, range(step, step + 1))
        train(b, two, rank, range(step, step + 1))
        coded = 2 if codec == "sign" and size == 2 else 0
        assert same(values(a)[coded:], values(b)[coded:])
    buffers = (
        optimizer.state[model.module.bias]["momentum_buffer"]
        for optimizer, model in ((one.to_sgd(), a), (two, b))
    )
    assert same(*([one] for one in buffers))
    one.param_groups[0]["momentum"] = 1.0
    with pytest.raises(ValueError, match=r"momentum=1\.0 must be from 0 to below 1"):
        one.step()


def learns(rank: int, size: int, codec: str) -> tuple[float, float]:
    """Fit a linear map from noisy batches of each rank; return exact SGD's loss and this one's."""
    found = []
    for coded in (False, True):
        torch.manual_seed(1)
        net = torch.nn.Linear(64, 48, bias=False)
        model = DistributedDataParallel(net)
        wanted = torch.randn(48, 64, generator=torch.Generator().manual_seed(2)) / 8
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        if coded:
            optimizer = pycomm.code_optimizer(optimizer, model, codec)
        generator = torch.Generator().manual_seed(3 + rank)
        for _ in range(150):
            x = torch.randn(32, 64, generator=generator)
            optimizer.zero_grad()
            (model(x) - x @ wanted.T).square().mean().backward()
            optimizer.step()
        found.append(float((net.weight.detach() - wanted).square().mean()))
    return found[0], found[1]


@pytest.mark.parametrize("codec", ["sign", "eden:bits=1,scale=mmse"])
def test_one_bit_learns_what_exact_momentum_learns(pool, codec):
    untrained = 1 / 64 + 1 / (3 * 64)  # of the wanted map and of torch's initial one
    for _, coded in pool.run(learns, codec):
        assert coded < 1e-3 * untrained


ON_NODES = """
import sys, torch, torch.distributed as dist
from tests.torch.optim.test_coded_sgd import make, train, values
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 4)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=4)
model, optimizer = make("int4")
train(model, optimizer, rank, range(4))
bucket = optimizer.compression.reducer.bucket_of(("big", "small", "bias"), torch.device("cpu"))
print(bool(bucket.levels), len(optimizer.momenta.own))
buffer = optimizer.state[model.module.big]["momentum_buffer"]
print([float(x.double().sum()) for x in (*values(model), buffer)])
dist.destroy_process_group()
"""


def test_nodes_that_code_sums_keep_the_momentum(tmp_path):
    """Two nodes of two ranks: none has sent anything of its own."""
    ranks = [
        Interpreter(
            *("-c", ON_NODES, str(rank), str(tmp_path / "store")),
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "PYCOMM_HOST_ID": f"node{rank // 2}",
                "PYCOMM_ALGO": "hierarchical",
            },
            merged=True,
        )
        for rank in range(4)
    ]
    found = []
    for rank in ranks:
        assert rank.wait(100) == 0, rank.output()
        found.append(rank.output().strip().splitlines()[-2:])
    assert found[0][0] == "True 0"
    assert all(one == found[0] for one in found)


@on_ranks(2)
def test_a_state_of_before_steps_were_counted_is_taken(rank, size):
    model, optimizer = make("sign")
    train(model, optimizer, rank, range(3))
    saved = optimizer.compression.state_dict()
    key = f"sent{rank}"
    assert len(saved[key]) == 3
    optimizer.compression.load_state_dict({**saved, key: saved[key][:2]})
    assert optimizer.momenta.steps == saved[key][0]
