"""Collectives by kernels that read peers' memory, run by the CPU over shared memory.

Sources, flags and memory are those of GPUs without peer access; a thread takes the role of a thread
block. test_gpu.py runs the same jobs on a GPU.
"""

from __future__ import annotations

import ctypes
import re
import time

import numpy as np
import pytest

import pycomm
from pycomm import _C, _test
from tests import ranks as channels
from tests.collectives.device import jobs
from tests.collectives.device.jobs import (
    SPECS,
    Bucket,
    DType,
    Rank,
    attempt,
    run,
    run_processes,
)
from tests.collectives.ways import RANKS, integers
from tests.compiling import run_preloaded
from tests.extent import each_value


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_type_and_op_has_the_bits_of_the_processor(ranks):
    assert run(ranks, jobs.reduce_all_types) == [2 * 115] * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("job", [jobs.reduce_sizes, jobs.reduce_and_scatter, jobs.moves])
def test_results_are_those_of_rank_order_at_every_size(job, ranks):
    run(ranks, job)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_operations_close_behind_each_other(ranks):
    run(ranks, jobs.mixture)


@pytest.mark.parametrize("ranks", [2, 4])
def test_between_processes(ranks):
    run_processes(ranks, jobs.mixture)


def test_a_call_can_be_made_again_as_it_is():
    """A captured graph does so: its arguments stay the same, and counters advance by themselves."""

    def job(c):
        x = c.put(np.ones(5000, dtype="f4"))
        for _ in range(7):
            c.all_reduce(x, algo="two_shot")
        return x.get()

    for result in run(3, job):
        assert np.array_equal(result, np.full(5000, 3.0**7, dtype="f4"))


# ------------------------------------------------------------------------------ failures


def reduce_once(c, numel=1000, op="sum"):
    x = c.put(integers(c.rank, numel))
    c.all_reduce(x, op)
    return x.get()


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
        assert "all_reduce #2 (sum of 1000 float32) waited 300 ms for rank 2" in text


@pytest.mark.parametrize(
    "other", [{"numel": 1001}, {"op": "max"}], ids=["another size", "another op"]
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
        _test.DeviceGroup(_C.Store.local(), 0, 2, timeout=0.2)


def test_other_options_are_an_error():
    for error in attempt(2, jobs.moves, of_rank=lambda rank: {"staging_bytes": (1 + rank) << 20}):
        assert isinstance(error, pycomm.WireMismatch)


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
        _test.DeviceGroup(_C.Store.local(), 0, 1, **options)


def test_wrong_arguments_are_refused_before_anything_runs():
    def job(c):
        x = c.put(np.zeros(1, np.float32))
        with pytest.raises(pycomm.Error, match="band has no meaning for float32"):
            c.all_reduce(x, "band")
        with pytest.raises(pycomm.Error, match="broadcast got root 2 in a group of 2"):
            c.call("broadcast", 0, 0, 1, DType.float32, root=2)
        with pytest.raises(pycomm.Error, match='no algorithm "tree"'):
            c.all_reduce(x, algo="tree")
        return reduce_once(c)

    run(2, job)


def test_a_group_says_how_it_talks():
    assert (
        run(2, lambda c: c.group.describe()) == ["2 ranks: processor, shared memory, 3 blocks"] * 2
    )


# -------------------------------------------------------------------------------- blocks of a GPU
# Groups of one process share a GPU's thread blocks, so that all kernels can run at once.


MOST = 32


@pytest.mark.parametrize("room", [36, 81, 99])
@pytest.mark.parametrize("groups", [1, 2, 4, 9])
def test_groups_do_not_take_more_than_there_is(room, groups):
    shares = [_test.BlockShare(7, room, MOST) for _ in range(groups)]
    counts = [share.count for share in shares]
    assert counts[0] == MOST
    assert min(counts) >= 1
    assert sum(count for count in counts if count > 1) <= room
    assert counts == sorted(counts, reverse=True)


def test_what_a_group_gives_back_another_takes():
    first = _test.BlockShare(7, 81, MOST)
    second = _test.BlockShare(7, 81, MOST)
    other = _test.BlockShare(8, 81, MOST)
    assert (first.count, second.count, other.count) == (32, 24, 32)
    first.shrink(2)  # its peers have no more blocks
    third = _test.BlockShare(7, 81, MOST)
    assert (first.count, third.count) == (2, 27)
    del first, second, third
    assert _test.BlockShare(7, 81, MOST).count == 32


def test_a_gpu_that_is_full_gives_one():
    shares = [_test.BlockShare(7, 3, MOST) for _ in range(3)]
    assert [share.count for share in shares] == [3, 1, 1]


# ----------------------------------------------------------------------------- how a group starts
# Signals end the wait, and shared memory has whole pages.


KERNEL = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

// Pages of 64 KiB, as kernels for Arm and POWER have them.
long sysconf(int what) {
  extern long __sysconf(int);
  return what == _SC_PAGESIZE && getenv("LARGE_PAGES") ? 65536 : __sysconf(what);
}
// A memory file that never gets its size: who makes it stays there, and the others wait.
int ftruncate(int fd, off_t bytes) {
  while (getenv("STUCK")) sleep(60);
  return syscall(SYS_ftruncate, fd, bytes);
}
"""
SIZES = r"""
import threading
from pathlib import Path
from pycomm import _C, _test

store, groups, ranks = _C.Store.local(), {}, 3
def make(rank):
    options = {"timeout": 20.0, "blocks": 1, "staging_bytes": 5 * 4096, "coded_bytes": 0}
    groups[rank] = _test.DeviceGroup(store, rank, ranks, **options)
threads = [threading.Thread(target=make, args=(r,)) for r in range(ranks)]
[t.start() for t in threads]; [t.join() for t in threads]
lines = Path("/proc/self/maps").read_text().splitlines()
places = [line.split()[0].split("-") for line in lines if "pycomm-device" in line]
parts = [(int(end, 16) - int(begin, 16)) / ranks / 65536 for begin, end in places]
print(len(parts), all(part == int(part) > 0 for part in parts))
"""
WAITING = r"""
import os, signal, sys, threading
from pycomm import _C, _test

def meet(rank): _test.DeviceGroup(_C.Store.file(sys.argv[1]), rank, 2, timeout=30.0)

maker = os.fork()
if maker == 0:
    os.environ["STUCK"] = "yes"
    meet(0)
# A shell starts its background jobs deaf to SIGINT, and these tests may be one.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try: meet(1)
except BaseException as error: print(type(error).__name__)
finally: os.kill(maker, signal.SIGKILL)
"""


def test_each_rank_shows_whole_pages(tmp_path):
    assert run_preloaded(SIZES, KERNEL, tmp_path, LARGE_PAGES="yes") == "3 True\n"


def test_a_signal_ends_the_wait_for_the_file(tmp_path):
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    assert run_preloaded(WAITING, KERNEL, tmp_path, str(store)) == "KeyboardInterrupt\n"


# -------------------------------------------------------------------------------------------- coded
# Collectives with codecs over peers' memory give the bytes of the communicator's.


class OnChannels(Rank):
    """A rank of a communicator with the interface of a device group."""

    def __init__(self, communicator):
        self.rank, self.size, self.cuda = communicator.rank, communicator.size, False
        self.group = communicator._core

    def call(self, op, *args, **kwargs):
        run = self.group.run_coded if op.endswith("_coded") else self.group.run
        run(op.removesuffix("_coded"), *args, **kwargs)

    def synchronize(self):
        pass


def by_channels(ranks, specs, segment=0, nodes=(), **options):
    return channels.run(
        ranks,
        lambda c: jobs.coded(OnChannels(c), specs, **options),
        segment_bytes=segment,
        nodes=list(nodes),
    )


@each_value
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("feedback", [True, False])
def test_bytes_of_the_communicator(ranks, feedback):
    """One bucket has pieces with all codecs."""
    specs = jobs.SPECS[:5] if feedback else jobs.SPECS[3:]
    want = by_channels(ranks, specs, feedback=feedback)
    got = run(ranks, lambda c: jobs.coded(c, specs, feedback), coded_bytes=1 << 21)
    assert got == want


@each_value
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("specs", [jobs.SPECS[:5], jobs.SPECS[5:]], ids=["blocks", "others"])
def test_small_floats_are_rounded_once(dtype, specs):
    """Results equal those of a float32 bucket, over channels and over peers' memory."""
    options = {"feedback": specs is not jobs.SPECS[5:], "dtype": dtype}
    want = by_channels(3, specs, wide=True, **options)
    assert by_channels(3, specs, **options) == want
    assert by_channels(3, specs, segment=1 << 10, **options) == want
    assert run(3, lambda c: jobs.coded(c, specs, **options), coded_bytes=1 << 21) == want


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_floats_of_several_nodes(dtype):
    nodes = [0, 0, 1, 1]
    want = by_channels(4, ["int8", "fp16"], nodes=nodes, wide=True, dtype=dtype)
    assert by_channels(4, ["int8", "fp16"], nodes=nodes, dtype=dtype) == want


@pytest.mark.parametrize(("dtype", "overflows"), [("float16", True), ("bfloat16", False)])
def test_overflow_in_the_cast_is_found_on_all_ranks(dtype, overflows):
    """With 40000 on two ranks the sum is no float16."""

    def job(c):
        values = jobs.converted(np.full(70, 40000, dtype="f4"), "float32", dtype)
        data, flag, pieces = c.put(values), c.put(np.zeros(1, dtype="f4")), _C.Pieces()
        codec = _C.Codec("cast:dtype=float32")
        pieces.add(70, codec, tensor=1)
        options = {**jobs.KEY, "dtype": _C.DType.__members__[dtype], "average": False}
        if isinstance(c, OnChannels):
            return c.group.run_coded("all_reduce", data.address, data.address, pieces, **options)
        options["found_inf"] = flag.address
        c.call("all_reduce_coded", data.address, data.address, pieces, **options)
        return flag.get()[0] == 0

    assert channels.run(2, lambda c: job(OnChannels(c))) == [not overflows] * 2
    assert run(2, job) == [not overflows] * 2


@pytest.mark.parametrize("spec", ["int8", "topk:0.05,indices=int12", "lossless"])
def test_stages_change_nothing(spec):
    """With slots of a few kilobytes a tensor goes in many stages."""
    assert run(3, lambda c: jobs.coded(c, [spec]), coded_bytes=1 << 15) == by_channels(3, [spec])


def test_a_tensor_that_does_not_fit_is_refused():
    def job(c):
        with pytest.raises(
            pycomm.Error, match=r"all_reduce needs .* payload, but coded_bytes = 4096"
        ):
            jobs.coded(c, ["topk:0.5"])

    run(2, job, coded_bytes=4096)


def test_other_codecs_are_a_mismatch():
    def job(c):
        with pytest.raises(pycomm.WireMismatch, match=r"all_reduce #1 \(avg of 25239 float32, "):
            jobs.coded(c, ["int8" if c.rank == 0 else "int4"])

    run(2, job)


# ---------------------------------------------------------------------------------------- failure
# After a failed synchronization, queued operations write into no peer's memory.


# Each rank's layout in the memory file: a page, flags, and shared data (device/peer_pointers.h).
CONTROL, FLAGS = 4096, 64 * 16 * 8


def shown(size: int) -> list[bytes]:
    """Return each rank's shared data, of the only group of this process."""
    with open("/proc/self/maps") as maps:
        line = next(line for line in maps if "memfd:pycomm-device" in line)
    begin, end = (int(word, 16) for word in re.match(r"(\w+)-(\w+)", line).groups())
    each = (end - begin) // size
    starts = [begin + r * each + CONTROL + FLAGS for r in range(size)]
    return [ctypes.string_at(start, each - CONTROL - FLAGS) for start in starts]


@each_value
@pytest.mark.parametrize("op", ["all_reduce_coded", "reduce_scatter_coded"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_failed_call_leaves_the_peers_memory(op, spec):
    def job(c):
        bucket = Bucket(c, [spec], c.size if op == "reduce_scatter_coded" else 1)
        out = c.put(np.zeros(bucket.data.shape[1] * c.size, np.float32))
        c.call("barrier")
        before = shown(c.size)
        c.call("barrier")
        if c.rank == 1:  # it synchronizes no further
            time.sleep(0.8)
            after = shown(c.size)
            with pytest.raises(pycomm.Timeout):  # reported by rank 0
                c.group.check()
            return before[1] == after[1]
        c.group.set_timeout(0.2)
        c.call(op, bucket.data.address, out.address, bucket.pieces, seed=1, step=2)
        with pytest.raises(pycomm.Timeout):
            c.group.check()
        return True

    assert run(2, job) == [True, True]
