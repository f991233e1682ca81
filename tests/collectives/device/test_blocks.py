"""Groups of one process share a GPU's thread blocks, so that all kernels can run at once."""

from __future__ import annotations

import pytest

from pycomm import _C

MOST = 32


@pytest.mark.parametrize("room", [36, 81, 99])
@pytest.mark.parametrize("groups", [1, 2, 4, 9])
def test_groups_do_not_take_more_than_there_is(room, groups):
    shares = [_C.BlockShare(7, room, MOST) for _ in range(groups)]
    counts = [share.count for share in shares]
    assert counts[0] == MOST
    assert min(counts) >= 1
    assert sum(count for count in counts if count > 1) <= room
    assert counts == sorted(counts, reverse=True)


def test_what_a_group_gives_back_another_takes():
    first = _C.BlockShare(7, 81, MOST)
    second = _C.BlockShare(7, 81, MOST)
    other = _C.BlockShare(8, 81, MOST)
    assert (first.count, second.count, other.count) == (32, 24, 32)
    first.shrink(2)  # its peers have no more blocks
    third = _C.BlockShare(7, 81, MOST)
    assert (first.count, third.count) == (2, 27)
    del first, second, third
    assert _C.BlockShare(7, 81, MOST).count == 32


def test_a_gpu_that_is_full_gives_one():
    shares = [_C.BlockShare(7, 3, MOST) for _ in range(3)]
    assert [share.count for share in shares] == [3, 1, 1]
