"""Check of the network: the interfaces that ranks on several machines would use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pycomm.doctor.finding import Finding, Topic

TOPIC = Topic("network")
# In the order of csrc/core/env.cpp: the first that is set counts.
VARIABLES = ("PYCOMM_INTERFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def judge(given: Mapping[str, str], hosts: int) -> tuple[Finding, str]:
    """Return the finding on the core's choice of interfaces, and the MTUs of those to other hosts.

    Args:
        given: the variables.
        hosts: number of hosts of the ranks; 0: not known.
    """
    from pycomm import _C

    name, up = "interface", _C.interfaces()
    wish = next((given[variable] for variable in VARIABLES if given.get(variable)), "")
    try:
        _C.choose_interfaces(wish, True, up)
    except RuntimeError as failure:
        there = ", ".join(f"{interface} ({address})" for interface, address in up) or "none"
        advice = f"name one that is up: {there}; or unset the variable"
        return TOPIC.problem(name, _short(failure), advice), ""
    try:
        far = _C.choose_interfaces(wish, False, up, given.get("MASTER_ADDR", ""))
    except RuntimeError as failure:
        level = "problem" if hosts > 1 else "note"
        advice = "bring up an interface that other machines reach, or name it in PYCOMM_INTERFACE"
        return TOPIC.finding(level, name, _short(failure), advice), ""
    mtus = [mtu(interface) for interface, _ in far]
    pairs = zip(far, mtus, strict=True)
    ways = (f"{interface} ({address}, MTU {size})" for (interface, address), size in pairs)
    return TOPIC.ok(name, f"{', '.join(ways)} to other machines"), ", ".join(mtus)


def _short(failure: RuntimeError) -> str:
    """Return the error without the list of interfaces, which the advice has."""
    return str(failure).removeprefix("tcp: ").partition("; interfaces")[0]


def mtu(name: str) -> str:
    """Return the MTU of an interface, as sysfs has it; "unknown": it has none."""
    try:
        return Path("/sys/class/net", name, "mtu").read_text().strip()
    except OSError:
        return "unknown"
