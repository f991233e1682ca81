"""Ranks on several hosts, which are network namespaces here: what connects them, and its use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from tests.processes.labs import near_hosts

JOB = [sys.executable, "-m", "tests.processes.hosts_job"]


def run(
    rate: str, ranks_per_node: int, command: list[str], env: Mapping[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank on two hosts; the command gets a shared folder."""
    lab = near_hosts(2, rate)
    with lab, tempfile.TemporaryDirectory() as folder:
        # The lab names its interface to Gloo, and so to us; here we choose.
        command = ["env", "-u", "GLOO_SOCKET_IFNAME", *command, folder]
        ranks = lab.start(
            command,
            ranks_per_node=ranks_per_node,
            env=dict(os.environ) | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        texts = [rank.communicate(timeout=60) for rank in ranks]
        return [
            (rank.returncode, out.decode(), err.decode())
            for rank, (out, err) in zip(ranks, texts, strict=True)
        ]


def good(outcomes: list[tuple[int, str, str]]) -> list[str]:
    for status, _, errors in outcomes:
        assert status == 0, errors
    return [out for _, out, _ in outcomes]


def test_shared_memory_inside_a_host_and_tcp_between():
    said = good(run("unlimited", 2, JOB))
    for rank, text in enumerate(said):
        neighbour, others = rank ^ 1, "2,3" if rank < 2 else "0,1"
        assert f"shm with {neighbour}; tcp to {others} by eth0 (10.77.0." in text


def test_loopback_between_hosts_is_refused():
    for variable in ("PYCOMM_INTERFACE", "NCCL_SOCKET_IFNAME"):
        for status, _, errors in run("unlimited", 1, JOB, {variable: "lo"}):
            assert status != 0
            assert '"lo" is loopback, which no other host can reach; PYCOMM_INTERFACE' in errors


def test_interface_that_is_not_there_lists_those_that_are():
    for status, _, errors in run("unlimited", 1, JOB, {"PYCOMM_INTERFACE": "eth7"}):
        assert status != 0
        assert '"eth7"' in errors
        assert "eth0 (10.77.0." in errors


def test_name_of_the_master_that_means_loopback_does_no_harm():
    # As where /etc/hosts maps the host's own name to 127.0.1.1.
    command = ["env", "MASTER_ADDR=127.0.1.1", *JOB]
    assert all("by eth0 (10.77.0." in text for text in good(run("unlimited", 1, command)))


RATE = """
import sys, time
import numpy as np
from pycomm.communicator import Communicator
with Communicator.from_env(sys.argv[1], timeout=30.0) as c:
    x = np.zeros(5 << 20, np.uint8)
    for _ in range(2):
        c.barrier()
        start = time.monotonic()
        c.broadcast(x)
        c.barrier()
        seconds = time.monotonic() - start
    print(c.describe())
    print(x.nbytes * 8 / seconds / 1e6)
"""


def test_two_interfaces_of_different_rates_add_up():
    env = {"PYCOMM_INTERFACE": "eth0,eth1", "PYCOMM_SOCKETS": "2"}
    said = good(run("120mbit,60mbit", 1, [sys.executable, "-c", RATE], env))
    for text in said:
        how, rate = text.splitlines()
        assert "eth0 (10.77.0." in how
        assert "eth1 (10.77.1." in how
        # One link has 120. Of the sum, headers take 4 %, the last frames of the slow link some
        # more, and bursts give a little; the rest is for a machine that is busy with other tests.
        assert 130 < float(rate) < 200
