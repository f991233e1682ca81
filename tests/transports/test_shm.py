"""The shared memory transport: messages over rings, membership, and clean-up."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from pycomm import _C
from pycomm.errors import Error, PeerLost, Timeout, WireMismatch
from tests.extent import each_value
from tests.ranks import good
from tests.transports.transport_ranks import RUNNERS, address, processes, sample

# Sizes: empty, shorter than a frame, odd, one ring (256 KiB), and more than the ring holds.
SIZES = [0, 1, 16, 79, 1000, 65536, 262144, 262145, 3_000_001]


def exchange(transport, lane, pairs, timeout=20.0):
    """Post every (peer, tag, outgoing, incoming) and wait for all; either array may be None."""
    goals = []
    for peer, tag, outgoing, incoming in pairs:
        channel = transport.channel(peer, lane)
        sent = received = 0
        if outgoing is not None:
            sent = channel.send(tag, address(outgoing), outgoing.nbytes)
        if incoming is not None:
            received = channel.recv(tag, address(incoming), incoming.nbytes)
        goals.append((channel, sent, received))
    transport.wait(lane, goals, timeout)


@each_value
@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_messages_of_every_size_arrive_in_order(size, kind):
    def job(transport, rank):
        for lane in (0, 1):
            after, before = (rank + 1) % size, (rank - 1) % size
            outgoing = [sample(rank + 10 * n, n) for n in SIZES]
            incoming = [np.zeros(n, np.uint8) for n in SIZES]
            tags = [_C.OpTag("send", seq=i, numel=n) for i, n in enumerate(SIZES)]
            exchange(
                transport,
                lane,
                [(after, t, x, None) for t, x in zip(tags, outgoing, strict=True)]
                + [(before, t, None, x) for t, x in zip(tags, incoming, strict=True)],
            )
            for n, got in zip(SIZES, incoming, strict=True):
                assert np.array_equal(got, sample(before + 10 * n, n)), n
        assert transport.sent_bytes >= 2 * sum(SIZES)

    good(RUNNERS[kind](size, job))


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_receive_that_waits_does_not_stop_the_other_lane(kind):
    def job(transport, rank):
        peer = 1 - rank
        late, early = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
        tag = _C.OpTag("send")
        ticket = transport.channel(peer, 1).recv(tag, address(late), 8)
        for _ in range(100):
            exchange(transport, 0, [(peer, tag, sample(rank, 8), early)])
        assert np.array_equal(early, sample(peer, 8))
        assert transport.channel(peer, 1).received < ticket
        outgoing = sample(7, 8)
        transport.channel(peer, 1).send(tag, address(outgoing), 8)
        transport.wait(1, [(transport.channel(peer, 1), 0, ticket)], 20.0)
        assert np.array_equal(late, outgoing)

    good(RUNNERS[kind](2, job))


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize(("seq", "nbytes", "words"), [(2, 8, "all_to_all #2"), (1, 16, "16 bytes")])
def test_messages_that_differ_from_what_is_expected_are_described(seq, nbytes, words, kind):
    def job(transport, rank):
        data = np.zeros(16, np.uint8)
        if rank == 0:
            exchange(transport, 0, [(1, _C.OpTag("all_to_all", seq=1, numel=2), data[:8], None)])
        else:
            exchange(
                transport, 0, [(0, _C.OpTag("all_to_all", seq=seq, numel=2), None, data[:nbytes])]
            )

    outcome = RUNNERS[kind](2, job)[1]
    assert isinstance(outcome, WireMismatch)
    assert words in str(outcome)
    assert "rank 0 sends 8 bytes of all_to_all #1" in str(outcome)


@pytest.mark.parametrize("kind", RUNNERS)
def test_what_a_rank_sent_before_it_left_still_arrives(kind):
    def job(transport, rank):
        tag = _C.OpTag("send")
        data = sample(1, 1000)
        if rank == 0:
            return exchange(transport, 0, [(1, tag, data, None)])
        time.sleep(0.2)
        got = np.zeros(1000, np.uint8)
        exchange(transport, 0, [(0, tag, None, got)])
        assert np.array_equal(got, data)
        with pytest.raises(PeerLost, match="rank 0 left") as lost:
            exchange(transport, 0, [(0, tag, None, got)])
        assert lost.value.rank == 0

    good(RUNNERS[kind](2, job))


def test_a_rank_that_dies_is_named_on_its_channels():
    def job(transport, rank):
        data = np.zeros(8, np.uint8)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1 died"):
            exchange(transport, 0, [(1, _C.OpTag("send"), None, data)])
        assert time.monotonic() - start < 5  # by the death, not by the group's deadline

    good(processes(2, job))


@pytest.mark.parametrize("kind", RUNNERS)
def test_an_abort_ends_a_wait_on_a_channel(kind):
    def job(transport, rank):
        if rank == 0:
            time.sleep(0.05)
            return transport.abort("enough")
        with pytest.raises(Error, match="rank 0 aborted the group: enough"):
            exchange(transport, 0, [(0, _C.OpTag("send"), None, np.zeros(8, np.uint8))])

    good(RUNNERS[kind](2, job))


def test_workers_forked_from_a_rank_do_not_keep_it_alive():
    """DataLoader workers may outlive a killed trainer; its peers must not wait for them."""

    def job(transport, rank):
        if rank == 1:
            worker = os.fork()
            if worker == 0:
                time.sleep(3.0)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(PeerLost, match="rank 1 died"):
            exchange(transport, 0, [(1, _C.OpTag("send"), None, np.zeros(8, np.uint8))])
        assert time.monotonic() - start < 2  # the worker still sleeps

    good(processes(2, job))


def test_a_forked_child_that_cleans_up_does_not_leave_for_its_parent():
    def job(transport, rank):
        child = os.fork()
        if child == 0:
            transport.close()
            os._exit(0)
        os.waitpid(child, 0)
        for seq in range(1, 4):
            transport.run_shared(_C.OpTag("barrier", seq=seq))

    good(processes(2, job))


def test_ranks_that_miss_the_rendezvous_are_all_named():
    with pytest.raises(Timeout, match=r"did not come .*: 1, 2"):
        _C.Transport("local", _C.Store.local(), "group", 0, 3, timeout=0.1)


def memfds() -> list[str]:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except OSError:  # the descriptor that listed the folder
            continue
    return [link for link in links if "memfd:pycomm" in link]


def own_doors() -> list[str]:
    """Return the names of this process's pycomm sockets, abstract or in a folder.

    Other tests run at the same time, with abstract sockets that end when their processes do.
    """
    held = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if os.path.islink(fd)}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    named = [(row[6], row[7]) for row in rows if len(row) == 8 and "pycomm-" in row[7]]
    return [name for inode, name in named if name.startswith("/") or f"socket:[{inode}]" in held]


def mapped_memfds() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pycomm")


def test_nothing_is_left_behind_by_a_crash():
    doors, inherited, mapped = own_doors(), memfds(), mapped_memfds()

    def job(transport, rank):
        assert len(memfds()) > len(inherited)
        assert mapped_memfds() > 0
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLost):
            transport.run_shared(_C.OpTag("barrier"))
        transport.close()
        assert len(memfds()) <= len(inherited)
        assert mapped_memfds() <= mapped

    good(processes(3, job))
    assert own_doors() == doors
    assert not [name for name in os.listdir("/dev/shm") if "pycomm" in name]


def test_shm_needs_another_rank_on_this_host():
    with pytest.raises(Error, match="rank 0 shares memory with no other rank"):
        _C.Transport("shm", _C.Store.local(), "alone", 0, 1, timeout=5.0)


def reach(transport, rank):
    return [r for r in range(3) if transport.reaches(r)], transport.has_window


def assert_third_rank_is_left_out(outcomes, *, has_window):
    assert outcomes[0] == ([1], has_window)
    assert outcomes[1] == ([0], has_window)
    assert "rank 2 shares memory with no other rank" in str(outcomes[2])


def test_a_rank_that_cannot_have_the_shared_region_is_left_out():
    def forbid_more_files(rank):
        if rank == 2:
            # There is room for the store's folder and a socket, not for the file passed over it.
            free = [os.dup(0), os.dup(0)]
            for descriptor in free:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[1] + 1, free[1] + 1))

    outcomes = processes(3, reach, forbid_more_files)
    assert_third_rank_is_left_out(outcomes, has_window=False)  # it has a place in the shared region


def test_ranks_in_different_network_namespaces_are_different_hosts():
    new_network = 0x40000000  # CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    probe = os.fork()
    if probe == 0:
        os._exit(libc.unshare(new_network) != 0)
    if os.waitpid(probe, 0)[1] != 0:
        pytest.skip("this user may not make a network namespace")

    def move(rank):
        if rank == 2:
            assert libc.unshare(new_network) == 0

    outcomes = processes(3, reach, move)
    assert_third_rank_is_left_out(outcomes, has_window=True)  # of the host's two ranks
