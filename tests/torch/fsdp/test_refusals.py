"""What `pycomm.compress` refuses of models in fully_shard, on all ranks alike."""

from __future__ import annotations

import re

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pycomm
from tests.torch.fsdp.test_compress import Odd, chosen, sharded
from tests.torch.harness import network


def check_refusals(rank: int, size: int) -> None:
    model, _ = chosen(size)
    with pytest.raises(pycomm.Error, match="is compressed already"):
        pycomm.compress(model, "int8")
    fresh = fully_shard(Odd(), mesh=init_device_mesh("cpu", (size,)))
    with pytest.raises(ValueError, match="averages whole matrices"):
        pycomm.compress(fresh, "powersgd:4")
    with pytest.raises(pycomm.WireMismatch, match=r"rank 0 has .codec=.*bits=8.*bits=4"):
        pycomm.compress(fresh, ["int8", "int4"][rank])
    holder = nn.Module()
    holder.module = nn.parallel.DistributedDataParallel(network())
    with pytest.raises(TypeError, match=r"pass what is in it, its \.module"):
        pycomm.compress(holder)
    with pytest.raises(ValueError, match="weights= is for fully_shard"):
        pycomm.compress(holder.module, weights="bf16")


def test_refusals(pool):
    pool.run(check_refusals)


def check_other_weights(rank: int, size: int, shape: str, given: list[str | None]) -> list[str]:
    """Return the error of each rank, before the parameters have been sent."""
    model = sharded(size, shape)
    with pytest.raises(pycomm.WireMismatch) as told:
        pycomm.compress(model, "int8", weights=given[rank])
    assert not any("CompressedAllGather" in repr(vars(unit)) for unit in model.modules())
    return [str(told.value)]


def check_other_gradients(rank: int, size: int) -> None:
    model = sharded(size, "hsdp")
    given = ["int8", "int4", "int8", "int4"]  # replicas agree, shards do not
    with pytest.raises(pycomm.WireMismatch, match=r"rank 0 has .gradients: .*rank 1 has"):
        pycomm.compress(model, given[rank])


def test_other_codecs_of_shards_are_told_on_all_ranks(pool):
    pool.run(check_other_gradients, ranks=4)


EXACT = "rank {} has .weights: exactly"


@pytest.mark.parametrize(
    ("shape", "given", "differs"),
    [
        ("fsdp", ["int8", None], EXACT.format(1)),
        ("fsdp", ["bf16", "int4"], r"rank 0 has .weights: .*bfloat16.*rank 1 has .weights: "),
        ("hsdp", ["int8", None, "int8", None], EXACT.format(1)),  # replicas agree, shards do not
        ("hsdp", ["int8", "int8", "int8", None], EXACT.format(3)),
    ],
)
def test_other_weights_are_told_on_all_ranks(pool, shape, given, differs):
    told = pool.run(check_other_weights, shape, given, ranks=len(given))
    assert all(re.search(differs, text) for (text,) in told), told
