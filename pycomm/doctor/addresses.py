"""Checks of the ports on which ranks listen, and of the addresses that they advertise."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence

from pycomm.doctor.finding import Finding, Topic

TOPIC = Topic("network")
LOOKED_AT = 100
"""Ports of a range that are tried at most."""


def check(given: Mapping[str, str], addresses: Sequence[str]) -> Iterator[Finding]:
    """Yield findings on PYCOMM_PORTS and PYCOMM_ADVERTISE.

    Args:
        given: the variables of the environment.
        addresses: those of the interfaces that lead to other machines.
    """
    ports = given.get("PYCOMM_PORTS", "")
    if ports:
        yield _ports(ports, addresses)
    advertised = given.get("PYCOMM_ADVERTISE", "")
    if advertised:
        yield _advertised(advertised, ports, len(addresses))


def _range(text: str) -> tuple[int, int] | None:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not found:
        return None
    first, last = int(found[1]), int(found[2] or found[1])
    return (first, last) if 1 <= first <= last <= 65535 else None


def _ports(text: str, addresses: Sequence[str]) -> Finding:
    bounds = _range(text)
    if bounds is None:
        return TOPIC.problem(
            "PYCOMM_PORTS", f"PYCOMM_PORTS={text} is no range", "want 29600-29700 or 29600"
        )
    tried = range(bounds[0], min(bounds[1], bounds[0] + LOOKED_AT - 1) + 1)
    for address in addresses:
        free = sum(_is_free(address, port) for port in tried)
        if not free:
            return TOPIC.problem(
                "PYCOMM_PORTS",
                f"no port of PYCOMM_PORTS={text} is free on {address}",
                "end what listens there (ss -ltnp), or open other ports in the firewall",
            )
    here = ", ".join(addresses) or "no address"
    return TOPIC.ok("PYCOMM_PORTS", f"ports of {text} are free on {here}")


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _advertised(text: str, ports: str, interfaces: int) -> Finding:
    name = "PYCOMM_ADVERTISE"
    words = text.split(",")
    for word in words:
        address, port = _split(word)
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            advice = "want 203.0.113.7, fd00::2, 203.0.113.7:40000 or [fd00::2]:40000"
            return TOPIC.problem(name, f"{name}={text}: {word!r} is no address", advice)
        if parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified:
            advice = "give the address that other machines see"
            return TOPIC.problem(name, f"{name}={text}: no other machine reaches {address}", advice)
        bounds = _range(ports)
        if port and (bounds is None or bounds[0] != bounds[1]):
            advice = "set PYCOMM_PORTS to the one port that it is mapped to"
            return TOPIC.problem(name, f"{name}={text}: port {port} is mapped to one port", advice)
    if interfaces and len(words) != interfaces:
        return TOPIC.problem(
            name,
            f"{name}={text} has {len(words)} addresses for {interfaces} interfaces",
            "give one for each, or name the interfaces in PYCOMM_INTERFACE",
        )
    return TOPIC.ok(name, f"other machines are told {text}")


def _split(word: str) -> tuple[str, str]:
    found = re.fullmatch(r"\[(.+)\](?::(\d+))?", word) or re.fullmatch(r"([^:]+):(\d+)", word)
    return (found[1], found[2] or "") if found else (word, "")
