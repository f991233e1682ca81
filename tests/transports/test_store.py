"""Stores: values arrive whole, waits end, and the text of a timeout names the key."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time

import pytest

import pycomm.errors
from pycomm import _C, _test
from tests.compiling import run_preloaded
from tests.extent import each_value
from tests.ranks import good, in_processes, on_threads
from tests.transports.proxy import TICK, Proxy


@pytest.fixture(params=["local", "file"])
def store(request, tmp_path):
    return _C.Store.local() if request.param == "local" else _C.Store.file(str(tmp_path / "a/b"))


@each_value
@pytest.mark.parametrize(
    "key", ["", ".", "..", "a/b", "/", "a+b%2f", "ä \n\0", "x" * 1000, "/" * 1000, "a/b.value"]
)
@pytest.mark.parametrize("value", [b"", b"\0\xff\n", b"v" * 100_000], ids=["empty", "odd", "long"])
def test_value_comes_back(store, key, value):
    store.set(key, value)
    assert store.get(key, 0) == value


def test_keys_do_not_collide(store):
    keys = ["a", "a/", "a/b", "a%2fb", "a+", "a.value", "A", "%61", ""]
    keys += ["a" * length for length in (180, 181, 360)]
    for values in (["first"] * len(keys), keys):  # of two values of a key the last one counts
        for key, value in zip(keys, values, strict=True):
            store.set(key, value.encode())
    assert [store.get(key, 0).decode() for key in keys] == keys


def test_get_waits_for_the_key(store):
    setter = threading.Timer(0.1, store.set, ("late", "value"))
    setter.start()
    assert store.get("late", 10) == b"value"
    setter.join()


@pytest.mark.parametrize(("seconds", "text"), [(0.05, "50 ms"), (0.0004, "1 ms")])
def test_timeout_names_the_key(store, seconds, text):
    start = time.monotonic()
    with pytest.raises(pycomm.errors.Timeout, match=f'"group/7/never".* {text}'):
        store.get("group/7/never", seconds)
    assert seconds <= time.monotonic() - start < 5


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


ODD = "".join(map(chr, range(128)))
WORDS = {
    "lines": lambda rank: f"{rank} 7:\n word" * (rank % 3),
    # Handles of memory are such words; some bytes separate what travels with a word.
    "every byte": lambda rank: ODD[rank % 128 :] + ODD[: rank % 128] + "\x1d",
}


@each_value
@pytest.mark.parametrize("size", [2, 64, 65, 130])
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_each_rank_hears_the_words_of_all(size, appends, word):
    store = _C.Store.local(appends)
    words = [word(rank) for rank in range(size)]

    def meet(rank):
        return _test.exchange(store, "g", "topic", rank, size, words[rank], 20)

    assert on_threads(range(size), meet, 60) == [words] * size


@pytest.mark.parametrize("size", [3, 70])
@pytest.mark.parametrize("appends", [False, True])
def test_an_exchange_names_all_that_did_not_come(size, appends):
    store = _C.Store.local(appends)
    absent = {1, size - 1}

    def meet(rank):
        with pytest.raises(pycomm.errors.Timeout) as caught:
            _test.exchange(store, "g", "topic", rank, size, "word", 0.3)
        return str(caught.value)

    for text in good(on_threads(set(range(size)) - absent, meet, 60)):
        # A rank that looks for the keys first does not see those that are written last.
        assert re.search(r"did not come \(topic\): .*\b1\b.*\b" + f"{size - 1}$", text)


def other_address(kind: str, ends: contextlib.ExitStack) -> str:
    """Return an address where rank 0 is not."""
    if kind == "no route":
        return "255.255.255.255:9"
    backlog = 0 if kind == "full queue" else 99
    listener = ends.enter_context(socket.create_server(("127.0.0.2", 0), backlog=backlog))
    for _ in range(3 if kind == "full queue" else 0):
        caller = ends.enter_context(socket.socket())
        caller.setblocking(False)
        caller.connect_ex(listener.getsockname())

    def hang_up():
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                listener.accept()[0].close()

    if kind == "stranger":
        threading.Thread(target=hang_up, daemon=True).start()
        ends.callback(listener.shutdown, socket.SHUT_RDWR)
    return f"127.0.0.2:{listener.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["full queue", "silent", "stranger", "no route"])
@pytest.mark.parametrize("first", [True, False])
def test_a_lent_store_is_found_beside_an_address_that_leads_elsewhere(kind, first):
    """As one of IPv6 where a name has two, and only IPv4 is routed. Rank 0 starts last."""
    options, made = _C.CommunicatorOptions(), []
    with contextlib.ExitStack() as ends:
        other = other_address(kind, ends)
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"

        def lend():
            made.append(_C.StoreEndpoint(address, options))
            made[0].lend(0).set("key", "value")

        late = threading.Timer(1.0, lend)
        late.start()
        where = ",".join([other, address] if first else [address, other])
        found = _C.Store.find(where, 0, 1, options, 20.0)
        assert found.get("key", 6.0) == b"value"
        late.join()


# What socket() answers on a host without IPv6.
WITHOUT_IPV6 = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
int socket(int family, int type, int protocol) {
  int (*real)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
  if (family == AF_INET6) errno = EAFNOSUPPORT;
  return family == AF_INET6 ? -1 : real(family, type, protocol);
}
"""
FIND = """
import sys
from pycomm import _C
found = _C.Store.find(sys.argv[1], 0, 1, _C.CommunicatorOptions(), 20.0)
print(found.get("key", 10.0).decode())
"""


def test_a_lent_store_is_found_beside_an_address_of_ipv6_on_a_host_without_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    endpoint = _C.StoreEndpoint(address, _C.CommunicatorOptions())
    endpoint.lend(0).set("key", "value")
    assert run_preloaded(FIND, WITHOUT_IPV6, tmp_path, f"[::1]:9,{address}") == "value\n"


def interrupted(rank: int) -> bytes:
    """Return the answer to a question after one whose wait a signal has ended."""
    options = _C.CommunicatorOptions()
    options.interface = "lo"
    endpoint = _C.StoreEndpoint("", options)
    lent = endpoint.lend(0)
    for key in ("first", "second"):
        lent.set(key, key)
    head, _, port = endpoint.handle.rpartition(":")
    between = Proxy(("127.0.0.1", int(port)))
    found = _C.Store.find(f"{head}:{between.address[1]}", 0, 1, options, 20.0)
    between.held = True
    time.sleep(3 * TICK)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        found.get("first", 10)
    between.held = False
    return found.get("second", 5)


def test_the_answer_to_a_question_that_a_signal_has_ended_is_not_that_of_the_next():
    assert in_processes(1, interrupted, 60.0) == [b"second"]


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(pycomm.errors.Error, match="file"):
        _C.Store.file(str(tmp_path / "file"))


# ------------------------------------------------------------------ other writers


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(pycomm.errors.Error, match=r"other users may write to .*store.*chmod"):
        _C.Store.file(str(folder))
    folder.chmod(0o755)
    _C.Store.file(str(folder)).set("key", "value")


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can play two users")
STRANGER = 65534


@root_only
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("above", "belongs to user {}.*of your own"),
        ("above/store", "above/, in which .*to user {}"),
    ],
)
def test_a_folder_of_another_user_is_refused(tmp_path, name, says):
    above = tmp_path / "above"
    above.mkdir(mode=0o755)
    os.chown(above, STRANGER, STRANGER)
    with pytest.raises(pycomm.errors.Error, match=says.format(STRANGER)):
        _C.Store.file(str(tmp_path / name))


@pytest.mark.parametrize("end", ["", "/", "//"])
def test_a_link_to_a_folder_is_refused(tmp_path, end):
    """Who made it can turn it to another folder of ours, with what ranks have published there."""
    (tmp_path / "old").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "old")
    with pytest.raises(pycomm.errors.Error, match=r"link is a link, .*name the folder itself"):
        _C.Store.file(str(tmp_path / "link") + end)


@pytest.mark.parametrize(("mode", "good"), [(0o777, False), (0o775, False), (0o1777, True)])
@pytest.mark.parametrize("there", [False, True])
def test_a_folder_in_one_that_others_may_write_to_is_refused(tmp_path, mode, good, there):
    """They could put another folder in its place; not in one that is sticky, as /tmp."""
    above = tmp_path / "above"
    above.mkdir()
    if there:
        (above / "store").mkdir(mode=0o700)
    above.chmod(mode)
    if good:
        _C.Store.file(str(above / "store")).set("key", "value")
        return
    with pytest.raises(pycomm.errors.Error, match=r"above/, in which .*written by other users"):
        _C.Store.file(str(above / "store"))


def test_a_folder_may_be_named_in_any_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("store", "store/", "./store", "a/b", str(tmp_path / "store//"), "."):
        _C.Store.file(name).set("key", name)
        assert _C.Store.file(name).get("key", 0) == name.encode()


@root_only
def test_a_value_of_another_user_is_refused(tmp_path):
    """Such a value is from a time when the folder was open to all users."""
    store = _C.Store.file(str(tmp_path / "store"))
    planted = tmp_path / "store" / "secret.value"
    planted.write_text("from a stranger")
    os.chown(planted, STRANGER, STRANGER)
    with pytest.raises(pycomm.errors.Error, match=rf"secret.*belongs to user {STRANGER}"):
        store.get("secret", 0)


def test_a_link_or_a_pipe_is_no_value(tmp_path):
    store = _C.Store.file(str(tmp_path / "store"))
    (tmp_path / "other").write_text("not a value")
    (tmp_path / "store" / "link.value").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "store" / "pipe.value")
    for key in ("link", "pipe"):
        with pytest.raises(pycomm.errors.Error, match=key):
            store.get(key, 0)


def test_a_folder_exchanged_later_is_not_read(tmp_path):
    folder = tmp_path / "store"
    store = _C.Store.file(str(folder))
    store.set("key", "ours")
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    (folder / "key.value").write_text("planted")
    assert store.get("key", 0) == b"ours"
    store.set("key", "new")
    assert (folder / "key.value").read_text() == "planted"
