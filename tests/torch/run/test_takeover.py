"""Hard-coded backend names get pycomm, and look as if they had got what they asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pycomm
from pycomm import takeover
from pycomm.backend import find
from tests.torch.pool import on_ranks


@contextmanager
def taken(*names: str) -> Iterator[None]:
    """Names are taken over within it; ranks of the pool outlive it."""
    takeover.install(names)
    try:
        yield
    finally:
        takeover._answers.clear()


def works(group: dist.ProcessGroup | None = None) -> bool:
    x = torch.full((5,), 1.0 + dist.get_rank(group))
    dist.all_reduce(x, group=group)
    size = dist.get_world_size(group)
    return torch.equal(x, torch.full((5,), size * (size + 1) / 2))


def looks(group: dist.ProcessGroup | None = None) -> tuple[Any, ...]:
    """All the ways by which a library may ask what a group is."""
    group = group or dist.group.WORLD
    return (
        dist.get_backend(group),
        dist.get_backend_config(group),
        sorted(map(str, group._device_types)),
        dist.distributed_c10d._get_object_coll_device(group),
    )


@on_ranks(2, backend=None)
def test_gloo(rank, size, store):
    def start(name: str) -> None:
        keys = dist.PrefixStore(name, store)  # torch counts its groups from 0 again
        dist.init_process_group("gloo", store=keys, rank=rank, world_size=size)

    start("plain")
    as_gloo = looks()
    assert find() is None
    dist.barrier()  # Gloo hangs on a rank that still connects while another leaves
    dist.destroy_process_group()
    with taken("gloo"):
        start("taken")
        assert find() is not None
        assert looks() == as_gloo
        assert works()
        dist.monitored_barrier()

        # Lightning waits for rank 0 in this way.
        for_ever = dist.new_group(backend="gloo", timeout=timedelta(days=10000))
        for_ever.monitored_barrier()
        assert looks(for_ever) == as_gloo
        assert find(for_ever) is not None

        half = dist.new_group([1])
        if rank == 1:
            assert looks(half) == as_gloo
            assert works(half)

        with takeover.released():
            own = dist.new_group(backend="gloo")
        assert isinstance(own._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        assert find(own) is None
        assert works(own)
        assert works()
        dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_other_names(rank, size, store):
    with taken("gloo", "nccl"):
        for asked in ("nccl", None, "cpu:gloo,cuda:nccl", "cpu:gloo", "pycomm"):
            dist.init_process_group(asked, store=store, rank=rank, world_size=size)
            assert dist.get_backend() == (asked or "undefined")  # as torch calls it
            assert find() is not None
            assert works()
            assert works(dist.new_group())
            objects = [None] * size
            dist.all_gather_object(objects, rank)
            assert objects == list(range(size))
            dist.destroy_process_group()
    with taken("nccl"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        assert find() is None
        dist.barrier()  # Gloo's ranks do not wait for each other when they connect
        dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_only_pycomms_options_count(rank, size, store):
    with taken("gloo"):
        options = dist.ProcessGroupGloo._Options()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, pg_options=options)
        group = dist.new_group(backend="gloo", pg_options=pycomm.Options(transport="tcp"))
        native = find(group)
        assert native is not None
        assert "tcp" in native.describe()
        dist.destroy_process_group()


@on_ranks(2, backend=None)
def test_detailed_debugging_checks_over_the_real_gloo(rank, size, store):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with taken("gloo"):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            assert find() is not None
            assert works()
            dist.destroy_process_group()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@on_ranks(4, backend=None)
def test_device_mesh(rank, size, store):
    with taken("gloo"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": "gloo"}
        )
        for name in ("dp", "tp"):
            group = mesh[name].get_group()
            assert dist.get_backend(group) == "gloo"
            assert find(group) is not None
            assert works(group)
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["mpi", "fake", "undefined", "pycomm", "cpu:gloo", ""])
def test_names_that_cannot_be_answered_for(name):
    with pytest.raises(ValueError, match=r"cannot answer for|is not the name of a backend"):
        takeover.install(["gloo", name])
    assert takeover.names() == ()
