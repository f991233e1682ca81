"""Collectives with codecs over peers' memory give the bytes of the communicator's."""

from __future__ import annotations

import pytest

import pycomm
from tests import ranks as channels
from tests.collectives import device_jobs as jobs
from tests.collectives.device_ranks import Rank, run


class OnChannels(Rank):
    """A rank of a communicator with the calls of a device group."""

    def __init__(self, communicator):
        self.rank, self.size, self.cuda = communicator.rank, communicator.size, False
        self.group = communicator._core

    def call(self, op, *args, **kwargs):
        getattr(self.group, op)(*args, **kwargs)

    def synchronize(self):
        pass


def by_channels(ranks, specs, **options):
    return channels.run(ranks, lambda c: jobs.coded(OnChannels(c), specs, **options))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("feedback", [True, False])
def test_bytes_of_the_communicator(ranks, feedback):
    """Pieces with all codecs in one bucket."""
    specs = jobs.SPECS[:6] if feedback else jobs.SPECS[3:]
    want = by_channels(ranks, specs, feedback=feedback)
    got = run(ranks, lambda c: jobs.coded(c, specs, feedback), coded_bytes=1 << 21)
    assert got == want


@pytest.mark.parametrize("spec", ["int8", "randomk:10", "lossless"])
def test_stages_change_nothing(spec):
    """Places of a few kilobytes: a tensor goes in many stages."""
    assert run(3, lambda c: jobs.coded(c, [spec]), coded_bytes=1 << 15) == by_channels(3, [spec])


def test_a_tensor_that_does_not_fit_is_refused():
    def job(c):
        with pytest.raises(pycomm.Error, match=r"all_reduce needs places of .* coded_bytes = 4096"):
            jobs.coded(c, ["topk:0.5"])

    run(2, job, coded_bytes=4096)


def test_other_codecs_are_a_mismatch():
    def job(c):
        with pytest.raises(pycomm.WireMismatch, match=r"all_reduce #1 \(avg of 25239 float32, "):
            jobs.coded(c, ["int8" if c.rank == 0 else "int4"])

    run(2, job)
