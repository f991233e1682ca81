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
_LOOK = 5.0  # seconds from one look at what rank 0 has said to the next


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
    host, port = told["MASTER_ADDR"], int(told["MASTER_PORT"])
    number = _numbers[host, port]
    _numbers[host, port] += 1
    if told.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        attempt = told.get("TORCHELASTIC_RESTART_COUNT", "0")
        return _of_torchrun((host, port), f"pycomm/{attempt}/{number}", number, rank, options)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Error(f"rank {rank}: MASTER_ADDR={host} has no address: {error}") from None
    addresses = list(dict.fromkeys(_text(str(address[0]), port) for *_, address in found))
    if rank != 0:
        return _C.Store.find(",".join(addresses), number, rank, options, options.timeout)
    if (host, port) not in _endpoints:
        everywhere = _text("::" if found[0][0] == socket.AF_INET6 else "0.0.0.0", port)
        try:
            own = _text(
                "127.0.0.1" if host == "localhost" else str(ipaddress.ip_address(host)), port
            )
        except ValueError:  # a name, which this host may know by another address than the others do
            own = everywhere
        _endpoints[host, port] = _listen(own, everywhere, options)
    return _endpoints[host, port].lend(number)


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
    ends = time.monotonic() + options.timeout
    while rank != 0:
        try:
            handle = told.get(key).decode()
        except RuntimeError as error:
            raise Timeout(
                f"rank {rank}: rank 0 has not said in the store of torchrun within "
                f"{options.timeout:g} s where it listens: {error}"
            ) from None
        left = ends - time.monotonic()
        try:  # not for long: a rank 0 of before a change of members may have said it
            return _C.Store.find(handle, number, rank, options, max(min(left, _LOOK), 0.1))
        except Timeout:
            if left <= _LOOK:
                raise
    if agent not in _endpoints:
        _endpoints[agent] = _C.StoreEndpoint("", options)
    told.set(key, _endpoints[agent].handle)
    return _endpoints[agent].lend(number)
