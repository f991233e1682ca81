"""Encrypted connections: data cannot be read or changed on the way, and all else is unchanged."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import pycomm
from pycomm import _C
from pycomm.errors import Error, Timeout
from tests.compiling import run_preloaded
from tests.ranks import good
from tests.transports import proxy
from tests.transports.ranks import threads
from tests.transports.wire_peer import WELCOME, RankZero, frame, hello

WORDS = b"nobody on the way may read this "


def collectives(c, network):
    """Return the results of exact and coded collectives."""
    values = np.random.default_rng(c.rank)
    results = []
    for size in (1, 1000, 100_001, 700_000):
        x = values.standard_normal(size).astype(np.float32)
        y, z = x.copy(), np.empty(c.size * size, np.float32)
        c.all_reduce(x)
        c.all_reduce_coded(y, pycomm.codec("int4"))
        c.all_gather(x, z)
        results += [x, y, z]
    c.barrier()
    return results


@pytest.mark.parametrize(("ranks", "sockets"), [(2, 1), (3, 3)])
def test_the_same_bits(ranks, sockets):
    plain, encrypted = (
        good(proxy.run(ranks, collectives, sockets=sockets, tls=tls, weather=calm))
        for tls in ("off", "on")
    )
    for before, after in zip(plain, encrypted, strict=True):
        assert all(np.array_equal(b, a) for b, a in zip(before, after, strict=True))


def calm(network):
    """Leave the network undisturbed."""
    network.calm = True


@pytest.mark.parametrize("tls", ["off", "on"])
def test_nobody_on_the_way_reads_what_travels(tls):
    heard = []

    def listen(network):
        for each in network.proxies.values():
            each.tap = lambda data: heard.append(data) or data
        network.calm = True

    def job(c, network):
        while not network.calm:
            pass
        x = np.frombuffer(WORDS * 5000, np.uint8).copy()
        c.broadcast(x, 0)
        c.barrier()
        return x.tobytes()

    outcomes = good(proxy.run(2, job, tls=tls, weather=listen))
    assert outcomes == [WORDS * 5000] * 2
    heard = b"".join(heard)
    assert len(heard) > len(WORDS) * 5000
    # Frames and notices begin with these bytes.
    assert any(word in heard for word in (WORDS, b"PYCM", b"PYCN")) is (tls == "off")


def test_a_changed_record_is_sent_again():
    changed = []

    def flip(data):
        if len(data) < 20_000 or len(changed) == 3:
            return data
        changed.append(1)
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]

    def weather(network):
        for each in network.proxies.values():
            each.tap = flip
        network.calm = True

    def job(c, network):
        while not network.calm:
            pass
        for _ in range(3):
            x = np.arange(500_000, dtype=np.float32)
            c.all_reduce(x)
            assert np.array_equal(x, 2 * np.arange(500_000, dtype=np.float32))
        c.barrier()
        return True

    good(proxy.run(2, job, weather=weather, tls="on"))
    assert len(changed) == 3


def test_ranks_that_do_not_agree_are_told():
    outcomes = threads(
        2, lambda me: None, options=lambda rank: {"tls": ("off", "on")[rank]}, errors=True
    )
    for rank, error in enumerate(outcomes):
        assert type(error) is Error
        assert f"rank {rank} and rank {1 - rank}: only rank 1 encrypts" in str(error)
        assert "PYCOMM_TLS" in str(error)


@pytest.mark.parametrize("first", [frame(b"1234"), b"\x16\x03\x01" + bytes(500)])
def test_who_knows_the_secret_and_speaks_plain_is_refused(first):
    rank_0 = RankZero(tls="on", timeout=3.0)
    rank_0.publish_card("127.0.0.1:1 tls")
    connection, verdict, _ = rank_0.join(hello(0xFFFF, tls=1))
    assert verdict == WELCOME
    connection.sendall(first)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1000):
            pass
    rank_0.thread.join()
    assert isinstance(rank_0.error, Timeout)
    assert "refused 1 connections" in str(rank_0.error)


def test_it_says_that_it_encrypts():
    described = threads(2, lambda me: me.transport.describe(), options={"tls": "on"})
    assert all("TLS 1.3" in text for text in described)


def test_a_missing_openssl_is_an_error():
    assert _C.tls_version().startswith("OpenSSL 3")
    with pytest.raises(Error, match=r"needs OpenSSL 3.*/nowhere/.*apt install libssl3"):
        _C.tls_version("/nowhere/libssl.so.3")


# What dlopen() answers on a host without OpenSSL.
WITHOUT_OPENSSL = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
void* dlopen(const char* name, int flags) {
  void* (*real)(const char*, int) = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
  return real(name != 0 && strstr(name, "libssl.so") != 0 ? "/nowhere/libssl.so.3" : name, flags);
}
"""
TWO_GROUPS = """
import logging, sys, threading
logging.basicConfig(format="WARNED %(message)s", stream=sys.stdout)
from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.errors import Error

def run(store, rank, tls):
    try:
        options = dict(transport="tcp", timeout=20.0, secret="sixteen bytes, at least", tls=tls)
        with Communicator(store, rank, 2, **options) as c:
            c.barrier()
            print(f"STANDS {tls} {'TLS' in c.describe()}", flush=True)
    except Error as error:
        print(f"REFUSED {tls} {error}", flush=True)

for tls in ("auto", "auto", "on"):
    store = _C.Store.local()
    ranks = [threading.Thread(target=run, args=(store, r, tls)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


def test_without_openssl_auto_warns_once_and_on_refuses(tmp_path):
    """With a secret, what travels is authenticated while groups begin, and no longer secret."""
    lines = run_preloaded(TWO_GROUPS, WITHOUT_OPENSSL, tmp_path).splitlines()
    assert lines.count("STANDS auto False") == 4, lines
    warned = [line for line in lines if line.startswith("WARNED")]
    assert len(warned) == 1, lines
    assert "without OpenSSL 3 nothing is encrypted" in warned[0]
    refused = [line for line in lines if line.startswith("REFUSED")]
    assert len(refused) == 2, lines
    assert all("encryption needs OpenSSL 3" in line for line in refused)
