"""Torch's stores as the core's: what csrc/binding/torch/store.h does, in Python.

An adapter has the methods that csrc/binding/core/python_store.h calls, from any thread. Both
adapters ask for the same keys with the same requests, so ranks with either may meet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch._C import _distributed_c10d

from pycomm import _C
from pycomm.errors import Error

ABSENT = "pycomm: no such key"
"""A value that is never set: `compare_set` returns it for a missing key, and sets nothing."""

T = TypeVar("T")


class TorchStore:
    """A store of torch.

    Args:
        store: any of torch's.
        round_trip: seconds, as known from earlier requests; 0: not known.
    """

    def __init__(self, store: Any, round_trip: float = 0.0) -> None:
        self.store = store
        extended = getattr(store, "has_extended_api", None)
        self.appends: bool = bool(extended()) if extended is not None else False
        self.round_trip = round_trip
        while isinstance(store, _distributed_c10d.PrefixStore):
            store = store.underlying_store
        self._is_tcp = isinstance(store, _distributed_c10d.TCPStore)

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self.store.set(key, value)

    def find(self, key: str) -> bytes | None:
        """Return the value of a key if it is there now."""
        if self._is_tcp:  # one round trip where check() and get() take three
            value: bytes = self._timed(lambda: self.store.compare_set(key, ABSENT, ABSENT))
            return None if value == ABSENT.encode() else value
        return self.store.get(key) if self.store.check([key]) else None

    def find_all(self, keys: list[str]) -> list[bytes] | None:
        """Return the values of the keys if all of them are there now."""
        # check() never waits. A wait that ends before the keys are there makes torch log warnings.
        found: list[bytes] | None = self.store.multi_get(keys) if self.store.check(keys) else None
        return found

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key and return its value; None: it was not set in time."""
        return self.store.get(key) if self._comes(key, seconds) else None

    def append(self, key: str, value: bytes) -> None:
        """Append to the value of a key."""
        self.store.append(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value, in one round trip.

        Raises:
            Error: the store has failed.
        """
        try:
            return int(self._timed(lambda: self.store.add(key, amount)))
        except RuntimeError as error:
            raise Error(f"the store failed at the key {key}: {error}") from error

    def erase(self, key: str) -> None:
        """Take the value of a key out of the store."""
        if self._is_tcp:  # its server does not answer this, so it costs no round trip
            self.store.set(key, b"")
        else:
            self.store.delete_key(key)

    def _timed(self, ask: Callable[[], T]) -> T:
        """Ask, and keep the time of the fastest answer."""
        start = time.perf_counter()
        answer = ask()
        took = time.perf_counter() - start
        if self._is_tcp and (self.round_trip == 0 or took < self.round_trip):
            self.round_trip = took
        return answer

    def _comes(self, key: str, seconds: float) -> bool:
        if self.store.check([key]):
            return True
        end = time.monotonic() + seconds
        if not self.appends:  # c10d's FileStore ends a wait at the next whole second
            pause = 0.001
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(pause, left + 0.001))
                if self.store.check([key]):
                    return True
                pause = min(2 * pause, 0.01)
            return False
        if seconds > 0:
            try:
                # torch takes 0 for no limit, and cannot count a hundred years.
                self.store.wait([key], timedelta(seconds=min(seconds + 0.001, 1e8)))
                return True
            except RuntimeError:
                if time.monotonic() < end:
                    raise
        return bool(self.store.check([key]))  # the answer may have come after the wait ended


class SealedStore:
    """A store in which each value carries a proof of the secret, as csrc/transports/seal.h says.

    Args:
        store: holds the values.
        secret: that was given to all ranks; "": values travel as they are.
        group: the group's name in the store.
    """

    def __init__(self, store: TorchStore, secret: str, group: str) -> None:
        self._store, self._secret, self._group = store, secret, group

    def set(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._store.set(key, _C.seal(self._secret, self._group, key, value))

    def find(self, key: str) -> bytes | None:
        """Return the value of a key if it is there now.

        Raises:
            Error: it has no right proof of the secret.
        """
        return self._opened(key, self._store.find(key))

    def get(self, key: str, seconds: float) -> bytes | None:
        """Wait for a key and return its value; None: it was not set in time.

        Raises:
            Error: it has no right proof of the secret.
        """
        return self._opened(key, self._store.get(key, seconds))

    def _opened(self, key: str, text: bytes | None) -> bytes | None:
        return None if text is None else _C.open_sealed(self._secret, self._group, key, text)
