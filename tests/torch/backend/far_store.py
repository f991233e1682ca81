"""A torch TCPStore with a long round trip: every byte to and from it is delayed."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist


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
