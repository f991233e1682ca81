"""DDP over "pycomm", and with compressed gradients: equal where exact, close where not."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import replace
from types import CodeType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.codecs import Cast
from pycomm.codecs.base import Codec
from pycomm.policy import Policy, Rule
from pycomm.reduction import paths
from tests.extent import each_value
from tests.torch.harness import (
    CODED,
    SHAPES,
    Chosen,
    Multiples,
    alike,
    all_equal,
    compressed,
    equal,
    gradients,
    inputs,
    lost,
    near_zero,
    network,
    on_both,
    owed,
    perceptron,
    reduced,
    train,
    values,
    with_complex_numbers,
)
from tests.torch.pool import PATIENT, on_ranks

BF16, FP16 = torch.bfloat16, torch.float16
STEPS = 6  # DDP rebuilds its buckets after the first


def trained(
    rank: int,
    size: int,
    spec: Any,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
    **options: Any,
) -> tuple[list[torch.Tensor], list[float]]:
    """Return parameters and losses after some steps."""
    model = model or network().to(dtype)
    model = DistributedDataParallel(model, **{"bucket_cap_mb": 0.02, **options})
    if spec is not None:
        pycomm.compress(model, spec)
    losses = train(model, rank, range(steps), dtype)
    return values(model), losses


@on_ranks(2)
def test_compressed_training_reaches_the_exact_loss(rank, size):
    ends = torch.tensor([trained(rank, size, s, 34)[1][-10:] for s in (None, "int8", "int4")])
    dist.all_reduce(ends, dist.ReduceOp.AVG)
    exact, *compressed = ends.mean(dim=1).tolist()
    assert exact < 1.0  # it started at ln 10 = 2.3
    for loss in compressed:
        # Two runs differ in the last digits of every batch's loss; 20 batches resolve 2 %.
        assert loss == pytest.approx(exact, rel=0.02)


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float64], ids=str)
def test_other_gradient_dtypes(rank, size, dtype):
    ends, losses = trained(rank, size, "int8", 20, dtype)
    assert ends[0].dtype == dtype
    assert losses[-1] < losses[0]
    if dtype == torch.float64:  # no codec takes it, so it is reduced exactly
        assert equal(ends, trained(rank, size, None, 20, dtype)[0])
    return ends


# ------------------------------------------------------- gradients chosen by the test


@on_ranks(then=all_equal)
@each_value
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
@pytest.mark.parametrize("spec", ["int4", "multiples"])
def test_feedback_loses_nothing_over_new_buckets(rank, size, spec):
    model, state = compressed(spec)
    missing = lost(model, rank, range(6), ["small", "bias", "big"])
    layouts = {tuple(p.name for p in b.pieces) for b in state.reducer.buckets.values()}
    assert len(layouts) > len(set(map(frozenset, layouts))) or len(layouts) > 2, layouts
    debts = owed(state)
    assert all(debts[name].any() == (name in CODED) for name in SHAPES)
    near_zero(*(missing[name] - debts[name] for name in SHAPES), atol=1e-5)
    return missing


# ------------------------------------------------------------------ a registered codec


@on_ranks(2)
def test_a_registered_codec_goes_its_path_to_the_bit(rank, size):
    model, state = compressed("multiples:unit=0.25")
    got = reduced(model, gradients(rank, 0))["big"]
    codec = pycomm.codec("multiples:unit=0.25")
    sent = [
        codec.decode(codec.encode(gradients(r, 0)["big"].view(-1)), got.numel()) for r in (0, 1)
    ]
    mean = sum(sent) / size
    assert torch.equal(got.view(-1), codec.decode(codec.encode(mean), got.numel()))
    told = state.summary()
    assert "multiples:unit=0.25 (default): 2 parameters" in told
    assert "payloads (coded one run at a time" in told
    assert "core: it takes no codec multiples" in told


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_ranks_that_lack_a_codec_refuse_it_together(rank, size):
    model = DistributedDataParallel(Chosen())
    state = pycomm.compress(model, "int8")
    name = f"rare_{dist.get_backend()}"
    if rank == 0:
        pycomm.codecs.register(variant(name))
    other = DistributedDataParallel(Chosen())
    for give in (
        lambda: pycomm.compress(other, name),
        lambda: state.set_policy(name),
        lambda: pycomm.CodedSGD(other.parameters(), model=other, lr=0.1, codec=name),
    ):
        with pytest.raises(pycomm.WireMismatch, match=rf"rank 1 has .*unknown codec '{name}'"):
            give()
    pycomm.codecs._registered.pop(name, None)  # these processes run other tests
    reduced(model, gradients(rank, 0))  # the group and the state go on


def variant(name: str, **given: Any) -> Any:
    return dataclasses.make_dataclass(
        "Variant", [], bases=(Multiples,), frozen=True, namespace={"name": name} | given
    )


def test_classes_that_are_no_codecs_are_refused():
    class Plain(Multiples):
        pass

    wrong = [
        (int, TypeError, "class below"),
        (pycomm.codecs.Codec, TypeError, "does not define encoded_bytes, granule"),
        (Plain, TypeError, "frozen dataclass"),
        *((variant(name), ValueError, "already") for name in ("int8", "quant", "auto", "convert")),
        (variant("multiples"), ValueError, "already"),
        (variant("No"), ValueError, "small letters"),
        (variant("e", combine="sum"), ValueError, "recode"),
        (variant("e", wire_version="1"), TypeError, "whole number"),
    ]
    for cls, error, says in wrong:
        with pytest.raises(error, match=says):
            pycomm.codecs.register(cls)
    assert pycomm.codecs.register(Multiples) is Multiples  # again, as a notebook does


# ----------------------------------------------------------------------------- errors


@on_ranks(2)
def test_refusals(rank, size):
    with pytest.raises(TypeError, match="or fully_shard, not Sequential: wrap it first"):
        pycomm.compress(network())
    model = DistributedDataParallel(network())
    with pytest.raises(ValueError, match=r"unknown codec 'int9': did you mean 'int[0-9]'.*int8"):
        pycomm.compress(model, "int9")
    with pytest.raises(ValueError, match="register torch's powerSGD_hook"):
        pycomm.compress(model, "powersgd:4")
    pycomm.compress(model, "int8")
    with pytest.raises(pycomm.Error, match=r"already: .* set_policy.* under pycomm.run"):
        pycomm.compress(model, "int8")


# Arguments of ranks 0 and 1, and the error that both get.
DIFFERENT = [
    (("int8", {}), ("int4", {}), "rank 0 has .codec=.*bits=8.*rank 1 has .codec=.*bits=4"),
    (("auto", {}), ("int8", {}), "rank 0 has .codec='auto'., rank 1 has .*bits=8"),
    (("int8", {}), (Policy("int8", (Rule(codec="int8", max_dims=3),)), {}), "max_dims=3"),
    (("int8", {}), ("int8 guard=off", {}), "rank 1 has 'guard=None'"),
    (("int8 50:int4", {}), ("int8 60:int4", {}), r"schedule=\(\(50.*schedule=\(\(60"),
    (("int8", {}), ("int8", {"feedback": "decay:0.9"}), "rank 1 has .*decay"),
    (("int8", {"seed": 1}), ("int8", {"seed": 2}), "rank 0 has 'seed=1', rank 1 has 'seed=2'"),
]


@on_ranks(2)
@pytest.mark.parametrize("backend", ["pycomm", "gloo"])
def test_different_options_are_told_before_sending(rank, size):
    model = DistributedDataParallel(Chosen())
    for *given, words in DIFFERENT:
        spec, options = given[rank]
        with pytest.raises(pycomm.WireMismatch, match=words):
            pycomm.compress(model, spec, **options)
    equal = [Policy("int8"), "int8"][rank]  # spelled differently, but equal
    pycomm.compress(model, equal)
    model(gradients(rank, 1)).backward()


# ---------------------------------------------------------------------------------- many parameters
# Models with a large number of small parameters, where calls cost more than bytes.


@on_ranks(2, **PATIENT)
def test_a_later_bucket_takes_few_calls_of_python(rank, size):
    """Of buckets after the first and before the last, whose matrices have no factors."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    model = DistributedDataParallel(layers, bucket_cap_mb=1)
    state = pycomm.HookState("int4 factors=off", model)
    later: list[list[CodeType]] = []

    def counted(state, bucket):  # DDP takes no annotations that are text
        calls: list[CodeType] = []
        sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code))
        try:
            return pycomm.compress_hook(state, bucket)
        finally:
            sys.setprofile(None)
            if bucket.index() > 0 and not bucket.is_last():
                later.append(calls)

    model.register_comm_hook(state, counted)
    for step in range(7):
        torch.manual_seed(step)
        model(torch.randn(4, 512)).sum().backward()
    assert ": core (" in state.summary()
    assert len(later) >= 7
    assert len(later[-1]) <= 8, [code.co_name for code in later[-1]]
    assert len({code.co_filename for code in later[-1]}) <= 4


@on_ranks(2, backend="gloo", **PATIENT)
def test_exact_parameters_are_coded_together(rank, size):
    """Where Python codes one run at a time, it calls the codecs of the others alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(48, 48) for _ in range(20)]))
    pycomm.compress(model, Policy("int8", guard=None))
    encoded: list[Codec] = []
    encode = Codec.encode

    def counted(codec: Codec, *args: object, **options: object) -> object:
        encoded.append(codec)
        return encode(codec, *args, **options)

    with (
        patch.object(paths, "BATCHED", replace(paths.BATCHED, needs=lambda *_: "not here")),
        patch.object(Codec, "encode", counted),
    ):
        for _ in range(3):
            encoded.clear()
            model(torch.ones(2, 48)).sum().backward()
    assert len(encoded) >= 20
    assert Cast("float32") not in encoded


# ------------------------------------------------------------------------------------- uncompressed
# Optimizers, compilers and dtypes with DistributedDataParallel, as on Gloo. `make conformance` has
# torch's own tests of its options, of Join and of object collectives.


@on_both(2)
def test_zero_redundancy_optimizer(rank, size):
    model = DistributedDataParallel(perceptron())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True
    )
    for step in range(3):
        optimizer.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict() if rank == 0 else None
    return values(model), state


@on_both(2)
def test_torch_compile(rank, size):
    from torch.distributed import _functional_collectives as functional

    def reduce(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        parts = functional.reduce_scatter_tensor(total, "sum", 0, dist.group.WORLD)
        return functional.all_gather_tensor(parts, 0, dist.group.WORLD) + 1

    # aot_eager traces and partitions like inductor, without the seconds of the C++ compiler.
    results = [torch.compile(reduce, backend="aot_eager", fullgraph=True)(inputs(rank, 0))]
    torch._dynamo.reset()
    model = torch.compile(DistributedDataParallel(perceptron()), backend="aot_eager")
    for step in range(2):
        model(inputs(rank, step)).square().mean().backward()
    torch._dynamo.reset()
    return results + [p.grad.clone() for p in model.parameters()]


@on_ranks(2, then=all_equal)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_gradients_in_another_memory_format_are_those_of_contiguous_ones(rank, size, codec):
    """What is coded in the order of memory has other blocks, and the same sums."""
    shapes, found = {"filters": (64, 8, 3, 3)}, []
    for layout in (torch.channels_last, torch.contiguous_format):
        model = DistributedDataParallel(Chosen(shapes).to(memory_format=layout))
        pycomm.compress(model, codec)
        for step in range(3):
            found.append(reduced(model, gradients(rank, step, shapes=shapes))["filters"])
    atol = 0 if codec == "fp32" else 0.1
    torch.testing.assert_close(found[:3], found[3:], rtol=0, atol=atol)
    return [one.contiguous() for one in found]


# ------------------------------------------------------------------------------------------ complex
# Complex parameters are reduced exactly, as two reals each; fsdp/test_compress.py has shards.


BACKENDS = ["pycomm", "gloo"]


@on_both(2, then=all_equal)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("mb", [25, 0.02])
def test_ddp_has_the_bits_of_plain_ddp(rank, size, dtype, mb):
    """Complex matrices between real ones, in a shared bucket and in one of their own."""
    found = []
    specs = (None, "fp32", "int8", "auto", "int4 warmup=2")
    with patch.dict(os.environ, DDP_DISABLE_COMM_MEM="1"):  # buckets in ordinary memory
        for spec in specs:
            options = {"bucket_cap_mb": mb, "gradient_as_bucket_view": mb < 1}
            model = with_complex_numbers(dtype)
            found.append(trained(rank, size, spec, 4, model=model, **options)[0])
    plain, exact, coded, auto, warmed = found
    assert equal(exact, plain)
    assert not equal(coded, plain)
    assert alike(*auto)  # which chooses codecs by the clock
    return exact, coded, warmed


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bucket_of_another_size_is_refused(rank, size):
    """The sizes of a bucket and of its parameters are compared before anything is sent."""
    state = pycomm.CompressionState("int8")
    state.add("weight", torch.zeros(64, 64))
    state.begin_step()
    with pytest.raises(pycomm.Error, match=rf"rank {rank}: a bucket has 8192 values, .* have 4096"):
        state.reduce(torch.zeros(8192), ["weight"])
    assert dist.is_initialized()
