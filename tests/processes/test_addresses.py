"""Addresses between hosts: IPv6, NAT, firewalls and patterns, in network namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pycomm.bench import netlab
from tests.processes.labs import far_hosts, near_hosts, printed_by

# A rank sums integers over a group, with variables of its own ({"0": {...}, "1": {...}}).
SUM = r"""
import json, os, sys
os.environ |= json.loads(sys.argv[2]).get(os.environ["RANK"], {})
os.environ["WORLD_SIZE"] = sys.argv[4]
if int(os.environ["RANK"]) >= int(sys.argv[4]):
    sys.exit()
import numpy as np
from pycomm import errors
from pycomm.communicator import Communicator
try:
    group = Communicator.from_env(sys.argv[1], transport="tcp", timeout=float(sys.argv[3]))
except errors.Error as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\n")  # one write: ranks share the file
    sys.exit()
x = np.arange(70_001, dtype=np.int64)
group.all_reduce(x)
assert (x == group.size * np.arange(70_001)).all()
sys.stdout.write(group.describe() + "\n")
sys.stdout.flush()
group.close()
"""


def described_by(
    lab: netlab.Netlab,
    folder: Path,
    ranks: Mapping[str, Mapping[str, str]],
    *,
    nodes: int | None = None,
    timeout: float = 30,
) -> list[str]:
    """Run a rank on each node, or on the first so many; return the lines that they print."""
    words = [str(folder / "store"), json.dumps(ranks), str(timeout), str(nodes or lab.nodes)]
    lines = printed_by(lab, SUM, folder, *words).splitlines()
    # Rank 0 has told the same on standard error, as it does when a group begins.
    return [line for line in lines if not line.startswith("pycomm: ")]


def both(variables: dict[str, str]) -> dict[str, dict[str, str]]:
    return {"0": variables, "1": variables}


def add_v6(lab: netlab.Netlab, node: int) -> str:
    address = f"fd77::{node + 1}"
    lab._shell(node + 1, [f"ip -6 addr add {address}/64 dev eth0 nodad"])
    return address


def test_ranks_connect_by_ipv6(tmp_path):
    with near_hosts(2, "unlimited") as lab:
        addresses = [add_v6(lab, node) for node in range(2)]
        ranks = {str(n): {"PYCOMM_INTERFACE": a} for n, a in enumerate(addresses)}
        lines = described_by(lab, tmp_path, ranks)
    assert len(lines) == 2
    for address in addresses:
        assert any(f"eth0 ({address})" in line for line in lines)


@pytest.mark.parametrize(
    ("ipv4", "interface", "chosen"), [(False, "eth0", "fd77::"), (True, "eth*", "10.77.0.")]
)
def test_ipv4_is_used_where_there_is_one(tmp_path, ipv4, interface, chosen):
    """Hosts that have none connect by IPv6, unasked."""
    with near_hosts(2, "unlimited") as lab:
        for node in range(2):
            add_v6(lab, node)
            if not ipv4:
                lab._shell(node + 1, [f"ip addr del 10.77.0.{node + 1}/24 dev eth0"])
        lines = described_by(lab, tmp_path, both({"PYCOMM_INTERFACE": interface}))
    assert len(lines) == 2
    assert all(f"eth0 ({chosen}" in line for line in lines)


def test_different_address_families_are_an_error(tmp_path):
    """Rank 1 connects to rank 0, and has no address of its family."""
    with near_hosts(2, "unlimited") as lab:
        ranks = {"0": {"PYCOMM_INTERFACE": add_v6(lab, 0)}, "1": {"PYCOMM_INTERFACE": "eth0"}}
        lab._shell(2, ["sysctl -qw net.ipv6.conf.eth0.disable_ipv6=1"])
        lab._shell(2, ["sysctl -qw net.ipv6.conf.lo.disable_ipv6=1"])
        lines = described_by(lab, tmp_path, ranks)
    assert len(lines) == 2
    for line in lines:
        assert "rank 1 has no IPv6 address, and rank 0 listens on [fd77::1]:" in line


# Forwards TCP connections: what a NAT with a mapped port does.
FORWARD = """
import socket, sys, threading
here, there = [(a, int(p)) for a, p in (word.rsplit(":", 1) for word in sys.argv[1:3])]
def pump(a, b):
    try:
        while part := a.recv(1 << 16):
            b.sendall(part)
        b.shutdown(socket.SHUT_WR)
    except OSError:
        a.close(), b.close()
with socket.create_server(here) as server:
    print("ready", flush=True)
    while True:
        near, _ = server.accept()
        far = socket.create_connection(there)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()
"""


def test_a_mapped_port_is_reached_as_advertised(tmp_path):
    """Node 2 is the NAT of node 0, to which node 1 has no route."""
    with near_hosts(3, "unlimited") as lab:
        lab._shell(2, ["ip route add prohibit 10.77.0.1/32"])
        command = [sys.executable, "-c", FORWARD, "10.77.0.3:40000", "10.77.0.1:29600"]
        nat = subprocess.Popen([*lab.wrap(2), *command], stdout=subprocess.PIPE)
        try:
            assert nat.stdout is not None
            assert nat.stdout.readline() == b"ready\n"
            behind = {"PYCOMM_PORTS": "29600"}
            seen = described_by(lab, tmp_path / "a", {"0": behind}, nodes=2, timeout=3)
            advertised = behind | {"PYCOMM_ADVERTISE": "10.77.0.3:40000"}
            lines = described_by(lab, tmp_path / "b", {"0": advertised}, nodes=2)
        finally:
            nat.kill()
            nat.communicate()
    assert all(line.startswith("Timeout: ") for line in seen), seen
    assert len(lines) == 2
    assert all(line.startswith("rank ") or "tcp to " in line for line in lines), lines


def test_ranks_behind_firewalls_use_open_ports(tmp_path):
    with far_hosts(2) as lab:
        for node in range(2):
            lab.firewall(node, 29600, 29610)
        closed = both({"PYCOMM_PORTS": "29700-29710"})
        seen = described_by(lab, tmp_path / "a", closed, timeout=3)
        opened = both({"PYCOMM_PORTS": "29600-29610"})
        lines = described_by(lab, tmp_path / "b", opened)
    assert any("Connection timed out" in line or "did not come" in line for line in seen), seen
    assert len(lines) == 2
    assert all("tcp to " in line for line in lines), lines
