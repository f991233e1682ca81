"""What torch 2.14 and 2.15 ask of a backend: names without warnings, hooks, a flight recorder."""

from __future__ import annotations

import os
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from pycomm.errors import Error, WireMismatch
from tests.torch.interpreter import run
from tests.torch.pool import on_ranks

TORCH = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
since_2_14 = pytest.mark.skipif(TORCH < (2, 14), reason="torch older than 2.14")
since_2_15 = pytest.mark.skipif(TORCH < (2, 15), reason="torch older than 2.15")

# A process in which nothing has imported pycomm: torch finds the backend by its entry point.
QUIET = """
import warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
dist.init_process_group({name!r}, store=dist.HashStore(), rank=0, world_size=1)
group = dist.new_group(backend="pycomm")
x, all = torch.ones(4), torch.ones(4)
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
for g in (None, group):
    dist.all_reduce(x, group=g)
    gather(all, x, group=g)
    scatter(x, all, group=g)
    dist.all_to_all_single(all, x, group=g)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["pycomm", "cpu:pycomm", "cpu:pycomm,cuda:pycomm"])
def test_torch_has_nothing_to_warn_of(installed, name):
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = run("-c", QUIET.format(name=name), env={**os.environ, "PYTHONPATH": path}, autoload=True)
    assert done.returncode == 0, done.stderr
    if TORCH >= (2, 14):  # older versions warn in C++ of devices named one by one
        assert "Warning" not in done.stderr


@on_ranks(2)
@since_2_14
def test_abort_hooks_are_called_when_a_group_fails(rank, ranks):
    called = []
    group = dist.group.WORLD
    group.register_abort_hook(1, lambda: called.append("one"))
    group.register_abort_hook(2, lambda: called.append("two"))
    group.unregister_abort_hook(2)
    dist.all_reduce(torch.ones(3))
    assert called == []
    with pytest.raises(WireMismatch):
        dist.all_reduce(torch.ones(3 + rank))
    assert set(called) == {"one"}


@on_ranks(2)
@since_2_14
def test_abort_hooks_are_called_before_an_abort(rank, ranks):
    called = []
    dist.group.WORLD.register_abort_hook(1, lambda: called.append(rank))
    dist.barrier()
    if rank == 0:
        dist.group.WORLD.abort()
        assert called == [0]
    with pytest.raises(Error, match="rank 0 called abort"):
        dist.all_reduce(torch.ones(1))
    assert set(called) == {rank}


# A group gets hooks before it has members (torch 2.15 attaches its own) and keeps them when they
# change.
ELASTIC = """
import torch, torch.distributed as dist, pycomm
from pycomm import elastic
dist.init_process_group(
    "pycomm", store=dist.HashStore(), rank=0, world_size=1,
    pg_options=pycomm.Options(enable_reconfigure=True),
)
called = []
group = dist.group.WORLD
group.register_abort_hook(7, lambda: called.append("kept"))
group.register_abort_hook(8, lambda: called.append("removed"))
group.unregister_abort_hook(8)
for uuid in (1, 2):
    elastic.reconfigure(uuid, [elastic.handle()])
    dist.all_reduce(torch.ones(1))
assert called == []
group.abort()
print(called)
dist.destroy_process_group()
"""


@since_2_14
def test_hooks_outlive_the_members_of_a_group():
    done = run("-c", ELASTIC)
    assert (done.returncode, done.stdout.strip()) == (0, "['kept']"), done.stderr


def _records(rank, ranks):
    """Torch 2.15 attaches its flight recorder to every group."""
    _distributed_c10d._reset_fr_trace(backend="pycomm")
    x = torch.ones(5)
    # Hooks are called after the wait may have returned, but before the next operation begins.
    dist.all_reduce(x, async_op=True).wait()
    dist.all_reduce(x)
    late = dist.irecv(x, 1 - rank)
    before = pickle.loads(_distributed_c10d._dump_fr_trace(backend="pycomm"))["entries"]
    dist.send(x.clone(), 1 - rank)
    late.wait()
    after = pickle.loads(_distributed_c10d._dump_fr_trace(backend="pycomm"))["entries"]
    return [[(e["profiling_name"], e["state"]) for e in entries] for entries in (before, after)]


@since_2_15
def test_the_flight_recorder_tells_what_has_completed(pool):
    reduced = ("pycomm:all_reduce", "completed")
    for before, after in pool.run(_records):
        assert before[:2] == [reduced, reduced]
        assert [state for name, state in before[2:]] == ["scheduled"]
        assert {state for _, state in after} == {"completed"}
