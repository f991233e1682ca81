"""Groups with a remote store: a round trip to it takes longer than the steps of a wait."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import pycomm
from tests.torch.interpreter import run, run_ranks
from tests.torch.pool import on_ranks


class FarStore:
    """A server with a delaying proxy in front of it.

    Args:
        round_trip: seconds between a request and its answer.
    """

    def __init__(self, round_trip: float) -> None:
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.delay = round_trip / 2
        self.answers = 0  # that all clients together have received
        self._lock = threading.Lock()
        self._start(self._accept)

    @staticmethod
    def _start(target, *args) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self.server.port))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._start(self._read, client, server, False)
                self._start(self._read, server, client, True)

    def _read(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        late: queue.Queue[tuple[float, bytes]] = queue.Queue()
        self._start(self._write, late, sink)
        data = b"start"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            if answers and data:
                with self._lock:
                    self.answers += 1
            late.put((time.monotonic() + self.delay, data))

    @staticmethod
    def _write(late: queue.Queue[tuple[float, bytes]], sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                when, data = late.get()
                time.sleep(max(0.0, when - time.monotonic()))
                if not data:
                    break
                sink.sendall(data)
        sink.close()

    def close(self) -> None:
        self.listener.close()


def client(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=40))


@pytest.fixture(params=[0.06, 0.2], ids=["60ms", "200ms"])
def port(request) -> Iterator[int]:
    """Return the port of a store that is so many seconds away."""
    store = FarStore(request.param)
    yield store.port
    store.close()


def init(rank: int, size: int, port: int, **options) -> None:
    store = client(port)
    options = {"timeout": timedelta(seconds=30), **options}
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, **options)


def check_groups(rank: int, size: int, _, port: int, transport: str) -> None:
    init(rank, size, port, pg_options=pycomm.Options(transport=transport))
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [size] * 3
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.tolist() == [2 * size] * 3
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_groups_are_made(pool, port, transport):
    pool.run(check_groups, port, transport, ranks=3, backend=None)


def test_a_group_takes_few_round_trips(pool):
    """Earlier, each of 2 ranks made 22 requests for a group and 14 for the next one."""
    far = FarStore(0.1)
    pool.run(check_groups, far.port, "tcp", ranks=2, backend=None)
    # Each of the two groups takes a rank two waits, and connecting to the store takes two steps.
    # Ranks that do not arrive at the same time poll again.
    assert far.answers <= 2 * 24
    far.close()


LATE = """
import sys, time, torch.distributed as dist
rank, size, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port)
if rank == 1: time.sleep(1.5)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
dist.barrier()
print("met")
dist.destroy_process_group()
"""


def test_who_waits_for_a_late_rank_prints_nothing(tmp_path):
    far = FarStore(0.0)
    script = tmp_path / "late.py"
    script.write_text(LATE)
    ranks = run_ranks(str(script), words=["2", str(far.port)], merged=True, autoload=True)
    said = [rank.stdout for rank in ranks]
    far.close()
    # Rank 0 tells of its group, and nothing else.
    assert [re.sub("pycomm: version .*\n", "", text) for text in said] == ["met\n"] * 2


@on_ranks(3, backend=None, dies=[1])
def test_a_death_is_told_while_others_are_awaited(rank, size, own, port):
    store = client(port)
    if rank == 1:
        # By then ranks 0 and 1 are in the rendezvous, which rank 2 keeps from beginning.
        threading.Timer(4.0, os._exit, (1,)).start()
    if rank == 2:
        store.get("told")
        return
    with pytest.raises(pycomm.PeerLost, match="rank 1 died while group"):
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
    store.set("told", "")


@on_ranks(4, backend=None)
def test_monitored_barrier_names_the_missing_alone(rank, size, own, port):
    """The time that is left is then shorter than a round trip."""
    init(rank, size, port)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("over")
    elif rank == 0:
        for other in (2, 3):
            store.get(f"comes {other}")
        time.sleep(0.5)
        with pytest.raises(pycomm.Timeout, match="Ranks 1 failed to pass monitoredBarrier"):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=0.3), True)
        store.set("over", "")
    else:
        store.set(f"comes {rank}", "")
        with pytest.raises(RuntimeError, match="Ranks 1 failed"):
            dist.group.WORLD.monitored_barrier(timedelta(seconds=5), True)
    dist.barrier()
    dist.destroy_process_group()


@on_ranks(1, backend=None)
def test_a_store_that_is_gone_is_told_in_one_sentence(rank, size, store):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = client(server.port)
    servers = [server]
    del server
    threading.Timer(0.5, servers.clear).start()
    with pytest.raises(pycomm.Error, match="the store failed at the key") as caught:
        dist.init_process_group("pycomm", store=store, rank=0, world_size=2)
    assert "\n" not in str(caught.value)  # torch's stack says nothing to a user


# -------------------------------------------------------------------------------- few descriptors
# A rank that has hardly a descriptor left: its group is made, or all learn at once why not.


RANKS = """
import contextlib, json, os, resource, signal, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
import pycomm._build, pycomm.backend, pycomm.straggler.monitor
pycomm._build.load_c10d()
options = {"timeout": timedelta(seconds=100)}

def keep(free):
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, highest + 20))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for fd in taken[len(taken) - free:]:
        os.close(fd)

def outcome(rank, port, free):
    signal.alarm(90)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, **options)
    store.set(f"here {rank}", "")
    store.get(f"here {1 - rank}")
    if free is not None:
        keep(free)
    start = time.monotonic()
    try:
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=2, **options)
        x = torch.ones(4)
        dist.all_reduce(x)
        said = f"sum {x[0].item()}"
    except pycomm.Error as error:
        said = str(error).splitlines()[0]
    return time.monotonic() - start, said

for poor in range(2):
    for free in range(1, 5):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [os.pipe(), os.pipe()]
        for rank in range(2):
            if os.fork() == 0:
                said = outcome(rank, server.port, free if rank == poor else None)
                os.write(pipes[rank][1], json.dumps(said).encode())
                os._exit(0)
        said = []
        for reader, writer in pipes:
            os.close(writer)
            said.append(json.loads(os.read(reader, 1 << 16) or "null"))
        print(json.dumps([poor, free, said]), flush=True)
"""
SOON = 20.0
"""Seconds; the group's own deadline is 100."""


def test_a_group_is_made_or_all_learn_why_not():
    """With 3 left, rank 0 could make shared memory, but not accept who fetches it."""
    ended = run("-c", RANKS, timeout=200)
    cases = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(cases) == 8, ended.stderr
    for poor, free, said in cases:
        assert all(one and one[0] < SOON for one in said), (poor, free, said)
        texts = [text for _, text in said]
        fine = texts == ["sum 2.0"] * 2
        # Who has said why leaves at once, and may be seen to be gone before its words are read.
        assert fine or "Too many open files" in texts[poor], (poor, free, said)
        gone = f"rank {poor} died" in texts[1 - poor]
        assert fine or gone or "Too many open files" in texts[1 - poor], (poor, free, said)
