"""Stores: values come back whole, waits end, and the text of a timeout names the key."""

from __future__ import annotations

import threading
import time

import pytest

import pycomm.errors
from pycomm import _C


@pytest.fixture(params=["local", "file"])
def store(request, tmp_path):
    return _C.Store.local() if request.param == "local" else _C.Store.file(str(tmp_path / "a/b"))


@pytest.mark.parametrize(
    "key", ["", ".", "..", "a/b", "/", "a+b%2f", "ä \n\0", "x" * 1000, "/" * 1000, "a/b.value"]
)
@pytest.mark.parametrize("value", [b"", b"\0\xff\n", b"v" * 100_000], ids=["empty", "odd", "long"])
def test_value_comes_back(store, key, value):
    store.set(key, value)
    assert store.get(key, 0) == value


def test_keys_do_not_collide(store):
    keys = ["a", "a/", "a/b", "a+", "a.value", "A", "a" * 180, "a" * 181, "a" * 360, "%61", ""]
    for key in keys:
        store.set(key, key.encode())
    assert [store.get(key, 0).decode() for key in keys] == keys


def test_last_value_counts(store):
    store.set("key", "first")
    store.set("key", "second")
    assert store.get("key", 0) == b"second"


def test_get_waits_for_the_key(store):
    setter = threading.Timer(0.1, store.set, ("late", "value"))
    setter.start()
    assert store.get("late", 10) == b"value"
    setter.join()


def test_timeout_names_the_key(store):
    start = time.monotonic()
    with pytest.raises(pycomm.errors.Timeout, match=r'"group/7/never".* 50 ms'):
        store.get("group/7/never", 0.05)
    assert 0.05 <= time.monotonic() - start < 5


def test_readers_never_see_half_a_value(store):
    values = {bytes([i]) * 50_000 for i in range(4)}
    store.set("key", next(iter(values)))
    done = threading.Event()

    def write():
        while not done.is_set():
            for value in values:
                store.set("key", value)

    writer = threading.Thread(target=write)
    writer.start()
    seen = [store.get("key", 0) for _ in range(200)]
    done.set()
    writer.join()
    assert set(seen) <= values


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pycomm.errors.Error, match="file"):
        _C.Store.file(str(tmp_path / "file"))
