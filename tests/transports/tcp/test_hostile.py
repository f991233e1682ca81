"""Strangers on the network of a running group: they neither end nor stall it, and learn nothing."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pycomm
from pycomm import _C, _test
from pycomm.communicator import Communicator, Store
from tests.ranks import on_threads
from tests.soak.held import descriptors
from tests.transports.wire_peer import HELLO, MAGIC, hello

SECRET = "nobody may see this"
RANKS = 2
# Seconds without a completed all-reduce that are no stall: strangers take processors from us, too.
PATIENCE = 5.0


def listeners() -> dict[str, str]:
    """The sockets of this process that listen, by inode, with their addresses in hexadecimal."""
    ours = {link[8:-1] for link in descriptors().values() if link.startswith("socket:")}
    found = {}
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in ours:
                    found[fields[9]] = fields[1].split(":")[0]
    return found


class Group:
    """Two ranks that reduce until they are told to stop."""

    def __init__(self) -> None:
        self.store = Store.local()
        self.others = listeners()  # of tests that came before
        self.done = [0] * RANKS
        self.longest = 0.0
        self.errors: list[BaseException] = []
        self.stopping = False
        self.threads = [threading.Thread(target=self._run, args=(r,)) for r in range(RANKS)]
        for thread in self.threads:
            thread.start()
        card = self.store.get("default/tcp-card/0", 10).decode()
        _, _, ip, port = card.split(":")  # "sealed", and a proof
        self.address = ip, int(port)
        self.wait_for(1)

    def _run(self, rank: int) -> None:
        try:
            options = dict(transport="tcp", timeout=20, secret=SECRET, tls="off")
            with Communicator(self.store, rank, RANKS, **options) as c:
                going = np.ones(1)
                while going[0] == RANKS or self.done[rank] == 0:
                    start = time.monotonic()
                    x = np.full(50_000, c.rank + 1, np.float32)
                    c.all_reduce(x)
                    assert (x == 3).all()
                    # Both leave after the same call.
                    going[0] = not self.stopping
                    c.all_reduce(going)
                    self.done[rank] += 1
                    self.longest = max(self.longest, time.monotonic() - start)
        except BaseException as error:
            self.errors.append(error)

    def wait_for(self, more: int) -> None:
        goal, end = self.done[0] + more, time.monotonic() + 10
        while self.done[0] < goal and not self.errors and time.monotonic() < end:
            time.sleep(0.001)
        assert not self.errors, self.errors
        assert self.done[0] >= goal, "the group stands still"

    def stop(self) -> None:
        self.stopping = True
        for thread in self.threads:
            thread.join(30)
        assert not self.errors, self.errors
        assert self.longest < PATIENCE


@pytest.fixture
def group():
    running = Group()
    yield running
    running.stop()


def knock(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 10)


def test_a_flood_of_connections(group):
    held = []
    for _ in range(3000):
        with contextlib.suppress(OSError):
            held.append(knock(group.address))
        if len(held) > 800:  # more than a rank lets wait
            held.pop(0).close()
    group.wait_for(20)
    for each in held:
        each.close()


FLOOD = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = [socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) for _ in range(300)]
print("held", flush=True)
time.sleep(30)
"""


def test_a_flood_that_takes_all_descriptors(group):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        where = [group.address[0], str(group.address[1])]
        command = [sys.executable, "-c", FLOOD, *where]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
            assert flood.stdout.readline() == b"held\n"
            group.wait_for(20)
            flood.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    group.wait_for(5)


def test_a_port_scanner(group):
    for _ in range(1000):
        knock(group.address).close()
    group.wait_for(20)


def test_slow_lorises(group):
    lorises = [knock(group.address) for _ in range(100)]
    words = hello()
    for i in range(30):  # a byte each, now and then
        for loris in lorises:
            with contextlib.suppress(OSError):
                loris.send(words[i : i + 1])
        time.sleep(0.01)
    group.wait_for(20)
    for loris in lorises:
        loris.close()


def test_random_and_mutated_words(group):
    chance = random.Random(5)
    for _ in range(500):
        words = bytearray(hello(chance.choice([0, 1, 0xFFFF, 0xFFFE]), generation=1) + bytes(64))
        for _ in range(chance.randrange(4)):
            words[chance.randrange(len(words))] = chance.randrange(256)
        if chance.random() < 0.3:
            words = chance.randbytes(chance.randrange(1, 5000))
        with knock(group.address) as stranger, contextlib.suppress(OSError):
            stranger.send(words)
    group.wait_for(20)


def test_a_stranger_cannot_take_the_place_of_a_connection(group):
    """Who knows everything but the secret gets a challenge, and no more."""
    for lane in (0, 1, 0xFFFF, 0xFFFE):
        with knock(group.address) as stranger:
            first = hello(lane, generation=1, sockets=2, rank=1)
            assert HELLO.unpack(first)[0] == MAGIC
            stranger.sendall(first)
            assert len(stranger.recv(100)) == 40
            stranger.sendall(bytes(32))
            assert stranger.recv(100)[0] == 3, "wrong secret"
            assert stranger.recv(100) == b""
    group.wait_for(5)


def test_listeners_are_on_the_chosen_interface_alone(group):
    listening = [place for inode, place in listeners().items() if inode not in group.others]
    assert listening == ["0100007F"] * RANKS  # 127.0.0.1


def test_the_secret_is_not_told():
    store = _C.Store.local()

    def rank_main(rank):
        options = dict(timeout=1.0, secret=SECRET + "?" * rank)
        _test.Transport("tcp", store, "g", rank, 2, **options).close()

    for error in map(str, on_threads(range(2), rank_main, 30)):
        assert "secret" in error
        assert SECRET not in error
    assert SECRET not in store.get("g/tcp-host/0", 1).decode()
    environment = Path("/proc/self/environ").read_bytes()
    assert SECRET.encode() not in environment


def test_what_is_shared_has_no_name_and_is_private(tmp_path):
    """Memory is a memfd; files of a rendezvous are the user's alone."""
    store = Store.file(str(tmp_path / "store"))
    store.set("a/key", "secret")
    found = [path for path in (tmp_path / "store").rglob("*")]
    assert any(path.is_file() for path in found)
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in found)
    assert not [name for name in os.listdir("/dev/shm") if "pycomm" in name]


def test_nothing_is_unpickled():
    """No module of the package reads pickles, which may hold any program, but with an Unpickler
    that chooses the classes itself."""
    readers = {"load", "loads", "Unpickler"}
    for path in Path(pycomm.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        choosing = {
            base
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            and "find_class" in {getattr(part, "name", None) for part in node.body}
            for base in node.bases
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                reads = node.value.id == "pickle" and node.attr in readers
                assert not reads or node in choosing, path
            if isinstance(node, ast.keyword) and node.arg == "weights_only":
                assert getattr(node.value, "value", None) is not False, path
