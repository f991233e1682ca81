"""The jobs of test_exact.py on a GPU that all ranks share.

Ranks are streams of this process or processes; both ways of sharing memory are tested.
"""

from __future__ import annotations

import os
import time

# Kernels of ranks wait for each other, so each stream needs its own queue. All kernels are loaded
# before the first runs, since loading may wait for running kernels.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import numpy as np
import pytest

import pycomm
from pycomm import _C
from tests.collectives.device import jobs
from tests.collectives.device.jobs import run, run_processes
from tests.collectives.ways import integers

pytestmark = pytest.mark.skipif(_C.device_count() == 0, reason="needs a GPU and a build with CUDA")

every_memory = pytest.mark.parametrize("memory", ["device", "host"])
every_count = pytest.mark.parametrize("ranks", [2, 4, 8])


@every_memory
@every_count
@pytest.mark.parametrize("job", [jobs.reduce_sizes, jobs.reduce_and_scatter, jobs.moves])
def test_as_on_the_processor(job, ranks, memory):
    run(ranks, job, cuda=True, memory=memory)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_type_and_op_has_the_bits_of_the_processor(ranks):
    assert run(ranks, jobs.reduce_all_types, cuda=True) == [(3 if ranks == 2 else 2) * 115] * ranks


@every_memory
@every_count
def test_operations_close_behind_each_other(ranks, memory):
    run(ranks, jobs.mixture, cuda=True, memory=memory)


@every_memory
@pytest.mark.parametrize("ranks", [2, 4])
def test_between_processes(ranks, memory):
    """They take turns on the GPU, so every synchronization costs a turn."""
    run_processes(ranks, jobs.reduce_and_scatter, cuda=True, memory=memory)


@every_memory
@every_count
def test_large_messages_fill_all_blocks(ranks, memory):
    numel = (4 << 20) + 5

    def job(c):
        x = c.put(integers(c.rank, numel))
        c.all_reduce(x)
        return x.get()

    want = sum(integers(r, numel) for r in range(ranks))
    for result in run(ranks, job, cuda=True, memory=memory, blocks=0, staging_bytes=32 << 20):
        assert np.array_equal(result, want)


@every_memory
@every_count
def test_codecs_give_the_bytes_of_the_processor(ranks, memory):
    specs = ["int8", "int4:block=64,rounding=stochastic", "fp16", "sign", "mxfp8", "eden2"]

    def job(c):
        return jobs.coded(c, specs)

    want = run(ranks, job, coded_bytes=1 << 21)
    assert run(ranks, job, cuda=True, memory=memory, coded_bytes=1 << 21) == want


def test_a_graph_can_be_replayed():
    import torch

    def job(c):
        x = c.put(np.ones(5000, dtype="f4"))
        graph = torch.cuda.CUDAGraph()
        c.torch_stream.synchronize()
        with torch.cuda.graph(graph, stream=c.torch_stream, capture_error_mode="thread_local"):
            c.all_reduce(x)
            c.call("barrier")
        with torch.cuda.stream(c.torch_stream):
            for _ in range(5):
                graph.replay()
        return x.get()

    for result in run(2, job, cuda=True):
        assert np.array_equal(result, np.full(5000, 2.0**5, dtype="f4"))


@every_memory
def test_an_absent_rank_is_named_within_the_limit(memory):
    def job(c):
        c.group.set_timeout(0.5)
        if c.rank == 1:
            time.sleep(2)
            with pytest.raises(pycomm.Timeout, match=r"for rank 1"):
                c.group.check()
            return
        x = c.put(integers(c.rank, 1000))
        c.all_reduce(x)
        with pytest.raises(pycomm.Timeout, match=r"all_reduce #1 .* waited 500 ms for rank 1"):
            x.get()

    run(3, job, cuda=True, memory=memory)


def test_an_abort_ends_a_kernel_that_waits():
    def job(c):
        if c.rank == 0:
            time.sleep(0.3)
            c.group.abort("out of coffee")
            return
        x = c.put(integers(c.rank, 1000))
        c.all_reduce(x)
        with pytest.raises(pycomm.Error, match="rank 0 aborted the group: out of coffee"):
            x.get()

    run(2, job, cuda=True)
