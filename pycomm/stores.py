"""Stores for ranks that share no folder: rank 0 lends one at MASTER_ADDR and MASTER_PORT.

The agent of torchrun listens there itself: under it, rank 0 says in its store where it listens.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections import Counter
from datetime import timedelta

from pycomm import _C, env, launch
from pycomm.errors import Error, Timeout

# This process's stores at an address, counted: the ranks' stores of one number are one. Rank 0
# listens until its process ends, since others may still read what it has written.
_numbers: Counter[tuple[str, int]] = Counter()
_endpoints: dict[tuple[str, int], _C.StoreEndpoint] = {}
# Seconds from one look at what rank 0 has said to the next: at first, and at most.
_LOOK, _LONGEST = 1.0, 8.0
# Seconds after which what refuses this rank at that address is taken for rank 0, which may start
# later; or half of the timeout.
_PATIENCE = 30.0


def at_master(rank: int, options: _C.CommunicatorOptions) -> _C.Store:
    """Return a new store of these ranks, each of which calls this equally often.

    Args:
        rank: this rank; rank 0 listens, the others wait for it.
        options: options of the group, of which the secret, tls and the timeout count.

    Raises:
        Error: MASTER_ADDR and MASTER_PORT are not set and no launcher has told them, the name has
            no address, rank 0 cannot listen there, or something else answers.
        Timeout: rank 0 did not listen in time.
    """
    given = env.everything()
    told = {**launch.variables(given), **given}
    if not (told.get("MASTER_ADDR") and told.get("MASTER_PORT", "").isdecimal()):
        raise Error(
            f"rank {rank}: MASTER_ADDR and MASTER_PORT do not say where rank 0 listens: set them "
            "to a host and a port, or pass a folder that all ranks share"
        )
    place = told["MASTER_ADDR"], int(told["MASTER_PORT"])
    number = _numbers[place]
    if told.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # Not by the count of restarts, which each agent has of its own.
        key = f"pycomm/{told.get('WORLD_SIZE')}/{number}"
        store = _of_torchrun(place, key, number, rank, options)
    else:
        store = _of_rank_0(place, number, rank, options)
    _numbers[place] += 1  # not by an attempt that has failed: the others do not know of it
    return store


def _of_rank_0(
    place: tuple[str, int], number: int, rank: int, options: _C.CommunicatorOptions
) -> _C.Store:
    host, port = place
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Error(f"rank {rank}: MASTER_ADDR={host} has no address: {error}") from None
    addresses = list(dict.fromkeys(_text(str(address[0]), port) for *_, address in found))
    if rank != 0:
        return _C.Store.find(",".join(addresses), number, rank, options, options.timeout)
    if place not in _endpoints:
        everywhere = _text("::" if found[0][0] == socket.AF_INET6 else "0.0.0.0", port)
        try:
            own = _text(
                "127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host)), port
            )
        except ValueError:  # a name, which this host may know by another address than the others do
            own = everywhere
        _endpoints[place] = _listen(own, everywhere, options)
    return _endpoints[place].lend(number)


def _listen(own: str, everywhere: str, options: _C.CommunicatorOptions) -> _C.StoreEndpoint:
    try:
        return _C.StoreEndpoint(own, options)
    except Error as error:
        if own != everywhere and "assign requested address" in str(error):
            return _listen(everywhere, everywhere, options)  # the address is one of a router
        raise Error(
            f"rank 0 cannot listen at {own}, of MASTER_ADDR and MASTER_PORT: end what listens "
            f"there, or set another port ({error})"
        ) from None


def _text(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def _of_torchrun(
    agent: tuple[str, int], key: str, number: int, rank: int, options: _C.CommunicatorOptions
) -> _C.Store:
    from torch._C._distributed_c10d import TCPStore

    told = TCPStore(*agent, is_master=False, timeout=timedelta(seconds=options.timeout))
    begun, look = time.monotonic(), _LOOK
    while rank != 0:
        try:
            handle = told.get(key).decode()
        except RuntimeError as error:
            raise Timeout(
                f"rank {rank}: rank 0 has not said in the store of torchrun within "
                f"{options.timeout:g} s where it listens: {error}"
            ) from None
        # A rank 0 of before the ranks were started again may have said it: it is gone, and others
        # may listen at its address.
        waited = time.monotonic() - begun
        left = options.timeout - waited
        try:
            return _C.Store.find(handle, number, rank, options, max(min(left, look), 0.1))
        except Timeout:
            if left <= look:
                raise
            look = min(2 * look, _LONGEST)
        except Error:
            if left <= look or waited >= max(_PATIENCE, options.timeout / 2):
                raise
            time.sleep(0.1)
    if agent not in _endpoints:
        _endpoints[agent] = _C.StoreEndpoint("", options)
    told.set(key, _endpoints[agent].handle)
    return _endpoints[agent].lend(number)
