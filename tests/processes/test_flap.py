"""A network between two hosts that fails for a while: collectives wait, and go on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.processes.labs import near_hosts

JOB = """
import os, sys, time
import numpy as np
from pycomm.communicator import Communicator, Store

rank = int(os.environ["RANK"])
with Communicator(Store.file(sys.argv[1]), rank, 2, transport="tcp", timeout=20) as c:
    c.barrier()
    print("begin", flush=True)
    end, longest, going = time.monotonic() + 3.5, 0.0, 2.0
    while going == 2:
        x = np.full(100_000, rank + 1, np.float32)
        start = time.monotonic()
        c.all_reduce(x)
        assert (x == 3).all()
        vote = np.array([float(time.monotonic() < end)])
        c.all_reduce(vote)
        longest = max(longest, time.monotonic() - start)  # either may be what the flap meets
        going = vote[0]
    print(longest, flush=True)
"""
DOWN = 1.0


def test_an_interface_that_flaps_and_connections_that_are_killed(tmp_path):
    with near_hosts(2, "1gbit") as lab:
        command = [sys.executable, "-c", JOB, str(tmp_path / "store")]
        ranks = lab.start(command, stdout=subprocess.PIPE)
        assert ranks[1].stdout.readline() == b"begin\n"

        def on_node_1(*words: str) -> int:
            return subprocess.run([*lab.wrap(1), *words], capture_output=True).returncode

        if on_node_1("ip", "link", "set", "eth0", "down") != 0:
            pytest.skip("this user may not take the interface of a namespace down")
        time.sleep(DOWN)
        assert on_node_1("ip", "link", "set", "eth0", "up") == 0
        time.sleep(0.5)
        on_node_1("ss", "-K", "state", "established")  # a reset, where the kernel can
        assert [rank.wait(30) for rank in ranks] == [0, 0]
        assert float(ranks[1].stdout.read()) >= DOWN / 2, "the flap was not felt"
