"""Collectives with codecs over peers' memory give the bytes of the communicator's."""

from __future__ import annotations

import ctypes
import re
import time

import numpy as np
import pytest

import pycomm
from pycomm import _C
from tests import ranks as channels
from tests.collectives.device import jobs
from tests.collectives.device.jobs import SPECS, Bucket
from tests.collectives.device.ranks import Rank, run
from tests.extent import each_value


class OnChannels(Rank):
    """A rank of a communicator with the interface of a device group."""

    def __init__(self, communicator):
        self.rank, self.size, self.cuda = communicator.rank, communicator.size, False
        self.group = communicator._core

    def call(self, op, *args, **kwargs):
        getattr(self.group, op)(*args, **kwargs)

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
            return c.group.all_reduce_coded(data.address, pieces, **options)
        c.call("all_reduce_coded", data.address, pieces, found_inf=flag.address, **options)
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
@pytest.mark.parametrize("op", ["all_reduce_coded", "reduce_scatter_coded", "all_gather_coded"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_failed_call_leaves_the_peers_memory(op, spec):
    def job(c):
        bucket = Bucket(c, [spec], c.size if op == "reduce_scatter_coded" else 1)
        out = c.put(np.zeros(bucket.data.shape[1] * c.size, np.float32))
        targets = [] if op == "all_reduce_coded" else [out.address]
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
        c.call(op, bucket.data.address, *targets, bucket.pieces, seed=1, step=2)
        with pytest.raises(pycomm.Timeout):
            c.group.check()
        return True

    assert run(2, job) == [True, True]
