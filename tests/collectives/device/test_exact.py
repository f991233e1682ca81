"""Collectives by kernels that read peers' memory, run by the CPU over shared memory.

Sources, flags and memory are those of GPUs without peer access; a thread takes the role of a thread
block. test_gpu.py runs the same jobs on a GPU.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pycomm
from pycomm import _C
from tests.collectives.device import jobs
from tests.collectives.device.jobs import DType, ReduceOp
from tests.collectives.device.ranks import attempt, run, run_processes
from tests.collectives.ways import RANKS, integers

every_count = pytest.mark.parametrize("ranks", RANKS)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_type_and_op_has_the_bits_of_the_processor(ranks):
    assert run(ranks, jobs.reduce_all_types) == [(3 if ranks == 2 else 2) * 115] * ranks


@every_count
def test_every_algorithm_at_every_size(ranks):
    run(ranks, jobs.reduce_sizes)


@every_count
def test_parts_are_reduced_in_rank_order(ranks):
    run(ranks, jobs.reduce_and_scatter)


@every_count
def test_data_arrive_where_they_belong(ranks):
    run(ranks, jobs.moves)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_operations_close_behind_each_other(ranks):
    run(ranks, jobs.mixture)


def test_the_count_of_barriers_passes_its_end():
    run(3, jobs.mixture, first_barrier=2**32 - 20)


@pytest.mark.parametrize("ranks", [2, 4])
def test_between_processes(ranks):
    run_processes(ranks, jobs.mixture)


def test_a_call_can_be_made_again_as_it_is():
    """A captured graph does so: its arguments stay the same, and counters advance by themselves."""

    def job(c):
        x = c.put(np.ones(5000, dtype="f4"))
        for _ in range(7):
            c.call("all_reduce", x.address, 5000, DType.float32, ReduceOp.sum, algo="two_shot")
        return x.get()

    for result in run(3, job):
        assert np.array_equal(result, np.full(5000, 3.0**7, dtype="f4"))


# ------------------------------------------------------------------------------ failures


def reduce_once(c, numel=1000, op=ReduceOp.sum):
    x = c.put(integers(c.rank, numel))
    c.call("all_reduce", x.address, numel, DType.float32, op)
    return x.get()


def test_a_late_rank_is_waited_for():
    def job(c):
        if c.rank == 1:
            time.sleep(0.3)
        return reduce_once(c)

    for result in run(3, job):
        assert np.array_equal(result, sum(integers(r, 1000) for r in range(3)))


def test_an_absent_rank_is_named_within_the_limit():
    def job(c):
        reduce_once(c)
        c.group.set_timeout(0.3)
        if c.rank == 2:
            time.sleep(1.2)
            with pytest.raises(pycomm.Timeout) as caught:  # reported by the other ranks
                c.group.check()
            return str(caught.value)
        start = time.monotonic()
        with pytest.raises(pycomm.Timeout) as caught:
            reduce_once(c)
        assert time.monotonic() - start < 1.0
        with pytest.raises(pycomm.Timeout):  # and in every later call
            reduce_once(c)
        return str(caught.value)

    for text in run(4, job):
        assert "all_reduce #2 (sum of 1000 float32) waited 300 ms for rank(s) 2" in text


@pytest.mark.parametrize(
    "other", [{"numel": 1001}, {"op": ReduceOp.max}], ids=["another size", "another op"]
)
def test_a_mismatch_is_an_error_on_all_ranks(other):
    def job(c):
        reduce_once(c, **(other if c.rank == 1 else {}))

    for outcome in attempt(2, job):
        assert isinstance(outcome, pycomm.WireMismatch)
        assert "all_reduce #1" in str(outcome)


def test_an_abort_ends_what_runs_and_what_comes():
    def job(c):
        if c.rank == 0:
            time.sleep(0.2)
            c.group.abort("out of coffee")
        start = time.monotonic()
        with pytest.raises(pycomm.Error, match="rank 0 aborted the group: out of coffee"):
            reduce_once(c)
        assert time.monotonic() - start < 5

    run(3, job)


def test_a_missing_rank_is_named_at_the_rendezvous():
    with pytest.raises(pycomm.Timeout, match=r"did not come .*: 1"):
        _C.DeviceGroup(_C.Store.local(), 0, 2, timeout=0.2)


def test_other_options_are_an_error():
    store, errors = _C.Store.local(), []

    def main(rank, staging):
        try:
            _C.DeviceGroup(store, rank, 2, timeout=5.0, staging_bytes=staging)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=main, args=(r, (1 + r) << 20)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [pycomm.WireMismatch] * 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"memory": "disk"}, 'no memory is called "disk"'),
        ({"memory": "device"}, "have no memory of a GPU"),
        ({"staging_bytes": 4096, "blocks": 4}, "4096 bytes of staging are too few for 4 blocks"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(pycomm.Error, match=text):
        _C.DeviceGroup(_C.Store.local(), 0, 1, **options)


def test_wrong_arguments_are_refused_before_anything_runs():
    def job(c):
        with pytest.raises(pycomm.Error, match="band has no meaning for float32"):
            c.call("all_reduce", 0, 1, DType.float32, ReduceOp.band)
        with pytest.raises(pycomm.Error, match="broadcast got root 2 in a group of 2"):
            c.call("broadcast", 0, 1, DType.float32, 2)
        with pytest.raises(pycomm.Error, match='no algorithm "tree"'):
            c.call("all_reduce", 0, 1, DType.float32, ReduceOp.sum, algo="tree")
        return reduce_once(c)

    run(2, job)


def test_a_group_says_how_it_talks():
    assert (
        run(2, lambda c: c.group.describe()) == ["2 ranks: processor, shared memory, 3 blocks"] * 2
    )
