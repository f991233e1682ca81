"""A network that cuts connections: a proxy through which all connections between ranks pass."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycomm import _C
from pycomm.communicator import Communicator
from tests.ranks import on_threads
from tests.transports.ranks import OUTSIDE

TIMEOUT = 30.0
TICK = 0.05  # seconds after which a waiting thread polls for a closed socket
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to an address, unless told otherwise."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.target = address
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        # Pairs of sockets, and the threads that forward between them.
        self.pairs: list[tuple[socket.socket, socket.socket, list[threading.Thread]]] = []
        self.lock = threading.Lock()
        self.accepted = 0
        self.silent = False  # accept connections, and forward nothing
        self.held = False  # stop reading, from a tick later until a cut
        self.stranger = b""  # the answer of another service that has taken the port
        self.limit = -1  # cut every connection after this number of bytes
        self.tap: Callable[[bytes], bytes] = lambda data: data  # reads and may change the data
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self.listener.accept()[0]
                self.accepted += 1
                if self.stranger:
                    with contextlib.suppress(OSError):
                        client.sendall(self.stranger)
                    client.close()
                    continue
                if self.silent:
                    with self.lock:
                        self.pairs.append((client, client, []))
                    continue
                try:
                    server = socket.create_connection(self.target)
                except OSError:  # the process has ended, and the proxy with it
                    self.listener.close()
                    self._reset(client)
                    return
                for each in (client, server):
                    each.settimeout(TICK)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ways = ((client, server), (server, client))
                pumps = [threading.Thread(target=self._pump, args=w, daemon=True) for w in ways]
                for pump in pumps:
                    pump.start()
                with self.lock:
                    self.pairs.append((client, server, pumps))

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        left = max(0, self.limit)
        try:
            while data := self._patiently(source.recv, 1 << 16):
                if self.silent:
                    continue
                data = self.tap(data)
                rest = memoryview(data)[: left if self.limit >= 0 else None]
                while rest:
                    rest = rest[self._patiently(sink.send, rest) :]
                left -= len(data)
                if self.limit >= 0 and left <= 0:
                    self._reset(source)
                    self._reset(sink)
                    return
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # the peer's close has been signalled; the owner closes the descriptor
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _patiently(self, call: Callable[[Any], Any], argument: Any) -> Any:
        """Retry a socket call until it succeeds or the socket is closed (OSError)."""
        while True:
            while self.held:
                time.sleep(TICK)
            with contextlib.suppress(TimeoutError):
                return call(argument)

    @staticmethod
    def _reset(end: socket.socket) -> None:
        """Reset both ends, losing the data in flight."""
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            end.shutdown(socket.SHUT_RD)  # wakes the reading thread
        end.close()

    def cut(self, chance: random.Random | None = None) -> int:
        """Reset one of the connections, or all. Return how many."""
        with self.lock:
            chosen = self.pairs[:]
            if chance and chosen:
                chosen = [chosen[chance.randrange(len(chosen))]]
            for pair in chosen:
                self.pairs.remove(pair)
        for *ends, _ in chosen:
            for end in ends:
                self._reset(end)
        self.held = False
        for *_, pumps in chosen:
            for pump in pumps:  # a socket in use is reset when that call has returned
                pump.join(TIMEOUT)
        return len(chosen)

    def _stop_listening(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def restart(self, pause: float) -> None:
        """Cut all connections, and refuse new ones for `pause` seconds."""
        self._stop_listening()
        self.cut()
        time.sleep(pause)
        self.listener = socket.create_server(self.address)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._stop_listening()
        self.cut()


class Network:
    """Stores of some ranks that publish the addresses of proxies."""

    def __init__(self, size: int, group: str, topics: Sequence[str] = ("here", "tcp-card")) -> None:
        self.size = size
        self.topics = topics
        self.stores = [_C.Store.local() for _ in range(size)]
        self.proxies: dict[int, Proxy] = {}
        self.calm = False  # no more disturbances
        self.weather = threading.Lock()  # held during a disturbance
        for rank in range(size):
            threading.Thread(target=self._copy, args=(group, rank), daemon=True).start()

    def _copy(self, group: str, rank: int) -> None:
        with contextlib.suppress(Exception):
            for topic in self.topics:
                key = f"{group}/{topic}/{rank}"
                word = self.stores[rank].get(key, TIMEOUT).decode()
                if topic == "tcp-card":
                    address, _, secret = word.partition(" ")
                    ip, port = address.rsplit(":", 1)
                    self.proxies[rank] = Proxy((ip, int(port)))
                    word = "{}:{} ".format(*self.proxies[rank].address) + secret
                for other in range(self.size):
                    if other != rank:
                        self.stores[other].set(key, word)

    def cut(self, chance: random.Random | None = None) -> int:
        proxies = list(self.proxies.values())
        if chance:
            return chance.choice(proxies).cut(chance)
        return sum(proxy.cut() for proxy in proxies)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()


def run(
    size: int,
    job: Callable[[Communicator, Network], Any],
    *,
    weather: Callable[[Network], Any] = lambda network: time.sleep(0.01),
    **options: Any,
) -> list[Any]:
    """Run ``job(communicator, network)`` on threads, while ``weather(network)`` is called
    repeatedly; return what each rank returned or raised."""
    network = Network(size, "default")
    # Bind as between hosts, although there is only one.
    options = {"transport": "tcp", "timeout": TIMEOUT, **OUTSIDE, **options}
    met, over = threading.Event(), threading.Event()  # before, some weather ends a rendezvous
    together = threading.Barrier(size, met.set)

    def rank_main(rank: int) -> Any:
        with Communicator(network.stores[rank], rank, size, **options) as communicator:
            together.wait()
            return job(communicator, network)

    def disturb() -> None:
        while not over.wait(0.001):
            if not met.is_set() or len(network.proxies) < size:
                continue
            with network.weather:
                if not network.calm:
                    weather(network)

    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    try:
        return on_threads(range(size), rank_main, 2 * TIMEOUT)
    finally:
        over.set()
        disturber.join(TIMEOUT)
        network.close()
