"""Checks of the network: the interface that ranks on several machines would use, and why."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pycomm.doctor.finding import Finding, Topic

TOPIC = Topic("network")
# In the order of csrc/core/env.cpp: the first that is set counts.
VARIABLES = ("PYCOMM_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

Interface = tuple[str, str]
"""Name and address."""


@dataclass(frozen=True)
class HostNetwork:
    """Facts on the network of this machine."""

    up: list[Interface]
    far: list[Interface] = field(default_factory=list)
    """Interfaces chosen if the ranks are on several machines."""
    why: str = ""
    """The reason for the choice of `far`."""
    error: str = ""
    """Why no interface fits."""
    error_far: str = ""
    """Why no interface leads to other machines."""


def look(given: Mapping[str, str]) -> HostNetwork:
    """Return the core's choice of interfaces with these variables."""
    from pycomm import _C

    up = _C.interfaces()
    source = next((name for name in VARIABLES if given.get(name)), "")
    wish, store = given.get(source, ""), given.get("MASTER_ADDR", "")
    far: list[Interface] = []
    error = error_far = ""
    try:
        _C.choose_interfaces(wish, True, up)
    except RuntimeError as failure:
        error = _short(failure)
    try:
        far = _C.choose_interfaces(wish, False, up, store)
    except RuntimeError as failure:
        error_far = _short(failure)
    if wish and not wish.startswith("^"):
        why = f"{source}={wish} names it"
    elif store and far and far[0][1] == _address_towards(store):
        why = f"the route to MASTER_ADDR={store} goes there"
    else:
        why = "the first that is up and not of a container"
    return HostNetwork(up, far, why, error, error_far)


def judge(network: HostNetwork, hosts: int) -> Iterator[Finding]:
    """Yield findings for ranks on a number of hosts; 0: not known."""
    if network.error:
        yield TOPIC.problem(
            "interface",
            network.error,
            f"name one that is up: {_names(network.up)}; or unset the variable",
        )
        return
    if not network.far:
        level = "problem" if hosts > 1 else "note"
        advice = "bring up an interface that other machines reach, or name it in PYCOMM_INTERFACE"
        yield TOPIC.finding(level, "interface", network.error_far, advice)
        return
    yield TOPIC.ok("interface", f"{_names(network.far)} to other machines: {network.why}")
    for name, _ in network.far:
        yield TOPIC.ok(name, f"MTU {mtu(name) or 'unknown'}")


def _names(interfaces: Sequence[Interface]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces) or "none"


def _address_towards(host: str) -> str:
    """Return the local address of the route to a host, or "". No packet is sent."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def _short(failure: RuntimeError) -> str:
    """Return the error without the list of interfaces, which the advice has."""
    return str(failure).removeprefix("tcp: ").partition("; interfaces")[0]


def mtu(name: str) -> int | None:
    """Return the MTU of an interface, as sysfs has it; None: it has none."""
    try:
        return int(Path("/sys/class/net", name, "mtu").read_text())
    except (OSError, ValueError):
        return None
