"""Replicas of a quorum that names one that is gone: nobody waits for it until the timeout.

Replicas are threads of this process, as in torchft's own tests. The timeout is a minute, after
which they would raise another error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchft")

from pycomm import Error
from pycomm.torchft import ProcessGroupPycomm
from pycomm.torchft import group as torchft_group

LIMIT = timedelta(seconds=60)


class Replicas:
    """Three replicas, and the store of their quorums."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.groups = [ProcessGroupPycomm(LIMIT) for _ in range(3)]
        self._threads = ThreadPoolExecutor(3)

    def configure(self, quorum: int, ranks: list[int], size: int, delay: float = 0.0) -> list[str]:
        """Let these replicas take part in a quorum, the last one later; return how they fared."""
        address = f"localhost:{self.store.port}/torchft/{quorum}/0"

        def take_part(rank: int) -> str:
            time.sleep(delay * (rank == ranks[-1]))
            try:
                self.groups[rank].configure(address, f"replica_{rank}", rank, size, quorum)
            except Error as error:
                return f"{type(error).__name__}: {error}"
            ones = torch.ones(3)
            self.groups[rank].allreduce([ones], dist.AllreduceOptions()).wait()
            assert ones.tolist() == [size] * 3
            return "formed"

        return list(self._threads.map(take_part, ranks))

    def end(self) -> None:
        for group in self.groups:
            group.shutdown()


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    made = Replicas()
    yield made
    made.end()


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_dead_former_member_is_told_early(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 60.0)
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    replicas.groups[gone].shutdown()  # its port refuses from now on
    rest = [rank for rank in range(3) if rank != gone]
    outcomes = replicas.configure(2, rest, 3)
    assert any(o.startswith("PeerLost") and f"replica {gone} of 3" in o for o in outcomes)
    assert "formed" not in outcomes
    replicas.groups = [replicas.groups[rank] for rank in rest]
    assert replicas.configure(3, [0, 1], 2) == ["formed"] * 2


def test_a_replacement_is_awaited(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 60.0)
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    replicas.groups[2].shutdown()
    replicas.groups[2] = ProcessGroupPycomm(LIMIT)
    assert "formed" not in replicas.configure(2, [0, 1, 2], 3, delay=1.5)  # later than allowed
    assert replicas.configure(3, [0, 1, 2], 3, delay=1.5) == ["formed"] * 3


def test_a_late_former_member_is_awaited(
    replicas: Replicas,
) -> None:
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    replicas.groups[2].shutdown()
    replicas.groups[2] = ProcessGroupPycomm(LIMIT)
    assert replicas.configure(2, [0, 2, 1], 3, delay=1.5) == ["formed"] * 3


def test_an_unknown_member_is_awaited_longer(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 0.5)
    assert replicas.configure(1, [0, 1], 2) == ["formed"] * 2
    outcomes = replicas.configure(2, [0, 1], 3)
    assert any(o.startswith("Timeout") and "replica 2 of 3" in o for o in outcomes)
    assert "formed" not in outcomes
    late = replicas.configure(3, [0, 1, 2], 3, delay=3.0)  # too late for 1 s
    assert "formed" not in late
    assert "another replica has given up" in late[2]
    assert replicas.configure(4, [0, 1, 2], 3, delay=1.2) == ["formed"] * 3  # in time for 2 s


def test_a_store_whose_process_is_gone_is_told(replicas: Replicas) -> None:
    assert replicas.configure(1, [0, 1, 2], 3) == ["formed"] * 3
    port = replicas.store.port
    replicas.store = None
    other = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert other.port != port
    replicas.store = type("Gone", (), {"port": port})
    assert all("nobody listens" in outcome for outcome in replicas.configure(2, [1, 2], 3))
    replicas.store = other
    assert replicas.configure(3, [0, 1, 2], 3) == ["formed"] * 3


def test_all_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one publishes at the moment at which the others lose patience, again and again."""
    monkeypatch.setattr(torchft_group, "UNKNOWN_MEMBER_TIMEOUT", 0.05)
    monkeypatch.setattr(torchft_group, "_LOOK", 0.0)
    monkeypatch.setattr(torchft_group, "_SUCCESSOR", 0.0)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    outcomes: list[set[str]] = []
    for turn in range(30):
        address, begin = f"localhost:{store.port}/{turn}", threading.Barrier(3)

        def meet(rank: int, address: str = address, begin: threading.Barrier = begin) -> str:
            one = torchft_group.QuorumRendezvous(f"handle {rank}", lambda _: False)
            one.formed([f"handle {rank}"])
            begin.wait()
            time.sleep(0.05 * (rank == 2))
            try:
                handles = one.handles(address, rank, 3, LIMIT)
            except Error:
                return "gave up"
            assert handles == ["handle 0", "handle 1", "handle 2"]
            return "goes"

        with ThreadPoolExecutor(3) as threads:
            outcomes.append(set(threads.map(meet, range(3))))
    assert all(len(outcome) == 1 for outcome in outcomes)
