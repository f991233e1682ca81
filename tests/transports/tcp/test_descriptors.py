"""A rank without a free descriptor waits for one when a connection was cut, but not for ever."""

from __future__ import annotations

import os
import resource
import socket
import threading
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from pycomm.errors import Error
from tests.ranks import run_processes


def cut_connections(names):
    """Cut those of these descriptors that are connections of TCP, as a router might."""
    for name in names:
        with suppress(OSError):
            connection = socket.socket(fileno=int(name))
            with suppress(OSError):  # of a listener
                connection.getpeername()
                if connection.family == socket.AF_INET:
                    connection.shutdown(socket.SHUT_RDWR)
            connection.detach()


FEW = 16


def take_few(rank):
    """None of these is a socket, and so none is free when connections are closed."""
    for _ in range(FEW):
        os.dup(0)


def allow(descriptors):
    """What is open stays open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))


def starving(c, starved, back):
    """Sums over connections that are cut while one rank has no descriptor, for `back` seconds."""
    x = np.ones(100_000, np.float32)
    c.all_reduce(x)
    if c.rank == starved:
        threading.Timer(back, allow, (1024,)).start()
        names = os.listdir("/proc/self/fd")
        allow(FEW)
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        cut_connections(names)
    c.all_reduce(x)
    assert (x == 4).all()
    return True


# The higher of two ranks connects, the lower accepts.
ROLES = pytest.mark.parametrize("starved", [1, 0], ids=["connects", "accepts"])


@ROLES
def test_a_cut_heals_when_a_descriptor_is_free_again(starved):
    job = partial(starving, starved=starved, back=1.0)
    assert run_processes(2, job, prepare=take_few, transport="tcp") == [True, True]


def errors_of(c, starved):
    try:
        return starving(c, starved, 30.0)
    except Error as error:
        return str(error)


@ROLES
def test_a_rank_that_never_has_one_says_so_and_is_lost_to_others(starved):
    job = partial(errors_of, starved=starved)
    texts = run_processes(2, job, prepare=take_few, transport="tcp", timeout=40.0)
    own, other = texts[starved], texts[1 - starved]
    assert f"rank {starved} can make no connection: Too many open files" in own
    assert "no descriptor left of the 16 that RLIMIT_NOFILE allows it" in own
    assert f"rank {starved} " in other  # whom no connection can tell the reason
