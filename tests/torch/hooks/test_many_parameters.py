"""Models with a large number of small parameters, where calls cost more than bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.codecs import Cast
from pycomm.codecs.base import Codec
from pycomm.policy import PROTECT, Policy, Rule
from pycomm.reduction import batched
from tests.extent import each_pair
from tests.torch.pool import on_ranks
from tests.torch.reduction.test_saved_state import PATIENT

LAYERS = 20
BATCHED = batched.BATCHED


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(48, 48) for _ in range(LAYERS)]).to(dtype)


RULES = {
    "int8": PROTECT,
    # Gathered parameters, and those of another codec, lie between the exact ones.
    "int4": (
        Rule(codec="topk:0.1", name="3.weight"),
        Rule(codec="sign", name="7.*"),
        *PROTECT,
    ),
}


@on_ranks(3, backend="gloo", **PATIENT)
@each_pair
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", list(RULES))
def test_any_backend_has_the_same_bits(rank, size, spec, dtype, bad):
    groups = {"gloo": None, "pycomm": dist.new_group(backend="pycomm")}
    states, models = [], []
    for name, group in groups.items():
        model = DistributedDataParallel(network(dtype), process_group=group)
        states.append(pycomm.compress(model, Policy(spec, RULES[spec], guard=None)))
        models.append(model)
        assert dist.get_backend(model.process_group) == name or group is not None
    for step in range(3):
        for model in models:
            generator = torch.Generator().manual_seed(100 * step + rank)
            model.zero_grad()
            x = torch.randn(4, 48, generator=generator).to(dtype)
            if bad and step == 1 and rank == 0:
                x[0, 0] = float("nan")
            model(x).float().square().mean().backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(p.grad.view(torch.uint8), q.grad.view(torch.uint8))
    assert states[0].residual_norms() == states[1].residual_norms()
    assert states[0].overflows == states[1].overflows == bad


def check_calls(rank: int, size: int, in_cpp: bool) -> None:
    if not in_cpp:
        batched.BATCHED = replace(BATCHED, needs=lambda *_: "not here")
    model = DistributedDataParallel(network(torch.float32))
    pycomm.compress(model, Policy("int8", guard=None))
    exact, lossy = 0, 0
    encode = Codec.encode

    def counted(codec: Codec, *args: object, **options: object) -> object:
        nonlocal exact, lossy
        exact += codec == Cast("float32")
        lossy += codec != Cast("float32")
        return encode(codec, *args, **options)

    Codec.encode = counted
    try:
        for _ in range(3):
            exact = lossy = 0
            model(torch.ones(2, 48)).sum().backward()
    finally:
        Codec.encode = encode
        batched.BATCHED = BATCHED
    if in_cpp:
        assert exact == lossy == 0
        return
    assert lossy >= LAYERS
    # One call per owner rank, and one for the result, instead of one per bias.
    assert 0 < exact <= size + 1


def test_exact_parameters_are_coded_together(pool):
    pool.run(check_calls, False, backend="gloo", **PATIENT)


def test_where_codecs_are_in_cpp_python_encodes_nothing(pool):
    pool.run(check_calls, True, backend="gloo", **PATIENT)
