"""A store of torch as one of the core's, for ranks that have torch but use `Communicator`."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any


class TorchStore:
    """What `Store.of` takes, of one of torch's TCPStores.

    Args:
        store: the store; its time to an answer says how far away it is.
    """

    appends = True

    def __init__(self, store: Any) -> None:
        self.store = store
        start = time.perf_counter()
        store.add("pycomm: begun", 1)
        self.round_trip = time.perf_counter() - start

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self.store.set(key, value)

    def append(self, key: str, value: bytes) -> None:
        """Append to the value of a key."""
        self.store.append(key, value)

    def find(self, key: str) -> bytes | None:
        """Return the value of a key if it is there now."""
        return self.store.get(key) if self.store.check([key]) else None

    def find_all(self, keys: list[str]) -> list[bytes] | None:
        """Return the values of the keys if all of them are there now."""
        found: list[bytes] | None = self.store.multi_get(keys) if self.store.check(keys) else None
        return found

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key and return its value; None: it was not set in time."""
        try:
            self.store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError:
            return self.find(key)
        value: bytes = self.store.get(key)
        return value
