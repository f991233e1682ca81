"""Which path reduces a bucket of device tensors, by name, with default options.

A path that is not taken is slower by an order, and its results are the same: so only its name
tells. Results are compared with those of the CPU, with `==`.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from pycomm import _C, backend
from pycomm.doctor import gpu as doctor
from pycomm.feedback import Feedback, Residuals
from pycomm.feedback.rule import LARGE
from pycomm.reduction import paths, two_shot
from tests.ranks import without_threads
from tests.torch.device.fake_device import GROUP, launched, on_fakes, run, same_as_cpu
from tests.torch.device.fake_device import NAME as FAKE
from tests.torch.device.test_operations import check_bits, generator
from tests.torch.harness import Chosen, bucket_of, compressed_on, equal, gradients, heard, reduced
from tests.torch.pool import Pool

# On both sides of the size from which a residual is kept in int8.
MATRICES = {"large": (LARGE // 256, 256), "small": (255, 257), "bias": (50,)}


# ------------------------------------------------------------------ default options


def check_ddp(rank: int, ranks: int, device: str, codec: str, nodes: Any = None) -> Any:
    with heard(logging.INFO) as log, launched() as kernels:
        model = nn.parallel.DistributedDataParallel(Chosen(MATRICES).to(device))
        state = compressed_on(nodes, model, codec)
        results = []
        for step in range(3):
            given = gradients(rank, step, shapes=MATRICES)
            result = reduced(model, {name: g.to(device) for name, g in given.items()})
            results.append({name: g.cpu() for name, g in result.items()})
        state.settle()
    residuals = {
        name: (str(residual.worker[0].dtype), residual.current("worker").cpu())
        for name in MATRICES
        if name in state.residuals and (residual := state.residuals[name]).worker is not None
    }
    lines = [line for line in log if line.startswith("all_reduce of the bucket")]
    chosen = [line for line in state.summary().splitlines() if line.startswith("path of")]
    return results, residuals, lines, chosen, kernels


@on_fakes()
@pytest.mark.parametrize("way", ["kernels", "peers"])
def test_the_doctor_tells_the_path_on_a_gpu(rank, ranks, way):
    assert f"values: {way} (" in doctor.check(FAKE)


@pytest.mark.parametrize("codec", ["int8", "int4", "sign", "topk:0.01", "bf16"])
def test_default_options_take_kernels_among_peers(fakes, codec):
    got, want = with_the_bits_of_the_host(fakes, "peers", check_ddp, codec)
    for _, residuals, lines, chosen, _ in got:
        large = "torch.float32" if codec.startswith("topk") else "torch.uint8"
        assert (residuals["large"][0], residuals["small"][0]) == (large, "torch.float32")
        assert chosen
        assert all("values: peers (coded by kernels" in line for line in chosen)
        assert all("values: peers" in line for line in lines)
    assert 0 < len(set(got[0][2])) == len(got[0][2])  # the first rank tells it, once for each
    assert not got[1][2]
    assert all("values: core (" in line for line in want[0][3])


def with_the_bits_of_the_host(
    fakes: Pool, way: str, check: Any, codec: str, *args: Any, host: str = GROUP, **more: Any
) -> list[Any]:
    """Return what ranks on the device found, and on the host, where results are the same."""
    want = run(fakes, way, check, "cpu", codec, *args, group=host, **more)
    got = run(fakes, way, check, FAKE, codec, *args, **more)
    for (results, residuals, *_), (also, kept_there, *_) in zip(got, want, strict=True):
        assert equal(results, also)
        assert equal(residuals, kept_there)
    return [got, want]


def check_factors(rank: int, ranks: int, device: str, codec: str) -> Any:
    """Return the results of steps whose columns differ, residuals and factors."""
    model = nn.parallel.DistributedDataParallel(Chosen(MATRICES).to(device))
    state = pycomm.compress(model, codec)
    found = []
    for step in range(8):
        given = gradients(rank, step, shapes=MATRICES)
        sizes = {name: torch.linspace(-8, 8, g.shape[-1]).exp2() for name, g in given.items()}
        turned = step in (3, 4)
        given = {n: g * (sizes[n].flip(0) if turned else sizes[n]) for n, g in given.items()}
        if step == 5 and rank == 1:
            given["small"][0, 0] = float("inf")
        result = reduced(model, {name: g.to(device) for name, g in given.items()})
        found.append({name: g.cpu() for name, g in result.items() if step != 5})
    state.settle()
    assert state.overflows == 1
    assert set(state.reducer.factors.current) == {"large", "small"}
    return found, dict(state.reducer.factors.current), state.residual_norms()


@pytest.mark.parametrize("way", ["kernels", "peers"])
@pytest.mark.parametrize("codec", ["int8", "topk:0.01"])
def test_devices_have_the_factors_of_the_cpu(fakes, codec, way):
    same_as_cpu(fakes, way, check_factors, codec)


@pytest.mark.parametrize("codec", ["int8", "int4", "sign", "eden2", "nvfp4", "topk:0.01", "bf16"])
def test_default_options_take_kernels_on_any_carrier(fakes, codec):
    got, _ = with_the_bits_of_the_host(fakes, "kernels", check_ddp, codec)
    for *_, chosen, kernels in got:
        assert chosen
        for line in chosen:
            assert "values: kernels (coded by kernels on a stream beside backward" in line
            assert line.endswith("; not peers: this pycomm has no kernels for fakegpu:0")
        assert kernels


def check_launches(rank: int, ranks: int, codec: str) -> int:
    """Return the launches for a bucket of four matrices and eight biases."""
    shapes = {f"w{i}": (256, 256 + i) for i in range(4)} | {f"b{i}": (50 + i,) for i in range(8)}
    with launched() as kernels:
        model = nn.parallel.DistributedDataParallel(Chosen(shapes).to(FAKE))
        state = pycomm.compress(model, codec)
        for step in range(3):
            kernels.clear()
            given = gradients(rank, step, shapes=shapes)
            reduced(model, {name: g.to(FAKE) for name, g in given.items()})
        state.settle()
    return len(kernels)


@pytest.mark.parametrize(("codec", "most"), [("int4", 7), ("sign", 7), ("eden2", 10)])
def test_a_launch_takes_all_parameters_of_a_bucket(fakes, codec, most):
    assert max(run(fakes, "kernels", check_launches, codec)) == most


def test_default_options_by_way_of_the_host_say_why(fakes):
    *_, chosen, _ = run(fakes, "held", check_ddp, FAKE, "int8")[0]
    assert chosen
    for line in chosen:
        assert "values: payloads (coded one run at a time" in line
        assert "; not peers: this pycomm has no kernels for fakegpu:0" in line
        assert line.endswith("; kernels: cast, quant on fakegpu is coded by another implementation")


def test_another_backend_is_the_reason(fakes):
    for group in ("cpu:gloo,fakegpu:pycomm", "gloo"):
        *_, chosen, _ = run(fakes, "held", check_ddp, "cpu", "int8", group=group)[0]
        assert chosen
        for line in chosen:
            assert "values: batched (coded in C++" in line
            assert line.endswith("; not core: the group's backend for cpu is not pycomm")


# ------------------------------------------------------------------ bits

RULES = [
    Feedback(),
    Feedback(storage="int8"),
    Feedback("decay", storage="int8"),
    Feedback("decay", storage="float32"),
]
CASES = [
    *((2, rule, torch.float32) for rule in RULES),
    (2, RULES[0], torch.bfloat16),
    (3, RULES[0], torch.float32),
    (4, RULES[2], torch.float16),
]


@pytest.mark.parametrize("way", ["peers", "kernels"])
@pytest.mark.parametrize(("ranks", "rule", "dtype"), CASES)
def test_kernels_give_the_bits_of_the_cpu(fakes, way, ranks, rule, dtype):
    check = partial(check_bits, exchanged=way == "kernels")
    same_as_cpu(fakes, way, check, rule, dtype, ranks=ranks)


# A launch takes the arguments of 28 encodes or of 63 decodes. Each of two ranks encodes what it
# contributes, of all parameters, and the results of its half; it decodes all results.
@pytest.mark.parametrize(
    ("parameters", "encodes", "decodes"),
    [(14, 1 + 1, 1), (15, 2 + 1, 1), (31, 3 + 2, 1), (32, 3 + 2, 2)],
)
def test_a_launch_takes_as_many_tensors_as_fit(fakes, parameters, encodes, decodes):
    (got, kernels), *_ = run(fakes, "kernels", check_many, FAKE, parameters, None)
    (want, _), *_ = run(fakes, "kernels", check_many, "cpu", parameters, None)
    assert equal(got, want)
    assert sum(name.startswith("encode_blocks") for name in kernels) == encodes
    assert sum(name.startswith("decode_blocks") for name in kernels) == decodes


def test_runs_share_the_scratch_memory_that_there_is(fakes):
    """What does not fit beside the others is launched after them: with the same bits."""
    (want, together), *_ = run(fakes, "kernels", check_many, FAKE, 5, None, "topk:0.1")
    (got, apart), *_ = run(fakes, "kernels", check_many, FAKE, 5, 1, "topk:0.1")
    assert equal(got, want)
    assert len(apart) > len(together)


def check_many(
    rank: int,
    ranks: int,
    device: str,
    parameters: int,
    fits: int | None,
    spec: str = "int8",
) -> Any:
    """Return the results of two steps of many parameters, and the kernels of the second.

    Args:
        fits: so many of the runs fit into the scratch memory; None: as usual.
    """
    residuals = Residuals(Feedback(storage="int8"), ranks)
    with launched() as kernels, pytest.MonkeyPatch.context() as patch:
        if fits is not None:
            all_of_them = _C.CodedBucket.scratch_bytes
            patch.setattr(
                _C.CodedBucket,
                "scratch_bytes",
                lambda self, dtype: fits * all_of_them(self, dtype) // (ranks * parameters),
            )
        # Each rank owns whole parameters.
        bucket = bucket_of(spec, [256] * (ranks * parameters), residuals, device)
        results = []
        for step in range(2):
            kernels.clear()
            x = torch.randn(bucket.numel, generator=generator(rank, step)).to(device)
            flag = torch.zeros(1, device=device)
            how: dict[str, Any] = {"seed": 5, "step": step, "found_inf": flag}
            two_shot.all_reduce(x, bucket, dist.group.WORLD, **how)
            assert not flag.cpu().any()
            results.append(x.cpu())
    return results, kernels


# ------------------------------------------------------------------ the table


@on_fakes("peers")
def test_the_table_says_what_kernels_among_peers_take(rank, ranks):
    group, x = dist.group.WORLD, torch.ones(64, device=FAKE)
    for kind in paths.KINDS:
        for storage in ("float32", "int8"):
            residuals = Residuals(Feedback(kind, storage=storage), ranks)
            bucket = bucket_of("int8", [64], residuals, FAKE)
            chosen = paths.choose(bucket, group, x)
            if kind == "momentum":
                assert chosen.path is paths.PAYLOADS
                assert chosen.why.startswith("peers: it takes no feedback momentum; kernels: ")
            else:
                assert chosen == paths.ChosenPath(paths.PEERS)
    assert (
        paths.choose(bucket_of("topk:0.1", [64], device=FAKE), group, x, senders=True).why
        == "peers: it averages over all ranks, not over those that have sent; "
        "kernels: it averages over all ranks, not over those that have sent"
    )
    # Takes 24 MiB, which cannot be cut.
    large = bucket_of("topk:0.75,indices=int32", [1 << 22], device=FAKE)
    chosen = paths.choose(large, group, torch.empty(1 << 22, device=FAKE))
    assert chosen.path is paths.PAYLOADS
    assert chosen.why.startswith("peers: p0 has a payload of 25165824 bytes that cannot be cut")
    # The operation refuses what the table does.
    bucket = bucket_of("int8", [64], Residuals(Feedback("momentum"), ranks), FAKE)
    native: Any = backend.find(device=torch.device(FAKE))
    with pytest.raises(pycomm.Error, match="takes no feedback of the kind momentum"):
        native.compressed_all_reduce(x, bucket.native, bucket.sides, seed=1, step=1)


@on_fakes("peers", ranks=1)
def test_a_group_of_one_rank_has_no_peers(rank, ranks):
    x = torch.ones(64, device=FAKE)
    chosen = paths.choose(bucket_of("int8", [64], device=FAKE), dist.group.WORLD, x)
    assert chosen.path is paths.PAYLOADS
    assert chosen.why.startswith("peers: the group has one rank; kernels: ")


@on_fakes("peers")
def test_a_rank_without_threads_keeps_all_ranks_from_peers(rank, ranks):
    """It could not watch whether the others live, and each of them must choose the same path."""
    group = dist.new_group(backend=GROUP)
    dist.all_reduce(torch.ones(1), group=group)
    native: Any = backend.find(group, torch.device(FAKE))
    with without_threads() if rank == 1 else contextlib.nullcontext():
        why = native.why_no_peers(torch.device(FAKE))
    assert ("cannot start a thread" if rank == 1 else "another rank's device") in why
    x = torch.ones(10, device=FAKE)
    dist.all_reduce(x, group=group)
    assert x.cpu().eq(2).all()


# ------------------------------------------------------------------ by nodes


@pytest.mark.parametrize("codec", ["int4", "sign", "topk:0.01"])
def test_devices_reduce_by_nodes_with_the_bits_of_the_host(fakes, codec):
    how = "kernels", check_ddp, codec, [0, 0, 1, 1]
    got, _ = with_the_bits_of_the_host(fakes, *how, host="gloo", ranks=4)
    for *_, chosen, kernels in got:
        assert all("values: kernels (" in line for line in chosen)
        assert kernels
