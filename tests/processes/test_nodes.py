"""Collectives on real nodes: network namespaces, joined by links that count their bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pycomm.bench import netlab
from tests.extent import each_value
from tests.processes.labs import near_hosts

NUMEL = 2_000_000

# Every rank reduces and gathers; rank 0 prints how it is connected.
JOB = f"""
import os, sys
import numpy as np
from pycomm.communicator import Communicator, Store
rank, size, folder, op = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *sys.argv[1:]
with Communicator(Store.file(folder), rank, size, interface="eth0", timeout=30) as c:
    if op == "all_reduce":
        x = np.full({NUMEL}, rank + 1, np.float32)
        c.all_reduce(x)
        assert (x == size * (size + 1) / 2).all()
    elif op == "reduce_scatter":
        out = np.empty({NUMEL} // size, np.float32)
        c.reduce_scatter(np.full({NUMEL}, rank + 1, np.float32), out)
        assert (out == size * (size + 1) / 2).all()
    else:
        out = np.empty({NUMEL}, np.float32)
        c.all_gather(np.full({NUMEL} // size, rank, np.float32), out)
        assert (out.reshape(size, -1) == np.arange(size)[:, None]).all()
    if rank == 0:
        print(c.describe())
"""


def start(lab: netlab.Lab, local: list[int], folder: str, op: str) -> list[subprocess.Popen[bytes]]:
    """One process per rank, `local[k]` of them on node k."""
    ranks = []
    nodes = [node for node, count in enumerate(local) for _ in range(count)]
    for rank, node in enumerate(nodes):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(len(nodes))}
        command = [*lab.wrap(node), sys.executable, "-c", JOB, folder, op]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    return ranks


@each_value
@pytest.mark.parametrize("local", [[2, 2], [1, 3]], ids=["2+2", "1+3"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_each_byte_crosses_a_link_once(tmp_path, local, op):
    lab = near_hosts(2, "1gbit")
    with lab:
        before = [lab.sent_bytes(node) or 0 for node in range(2)]
        ranks = start(lab, local, str(tmp_path), op)
        try:
            said = [rank.communicate(timeout=60)[0].decode() for rank in ranks]
            assert [rank.returncode for rank in ranks] == [0] * len(ranks)
        finally:
            for rank in ranks:
                rank.kill()
        sent = [(lab.sent_bytes(node) or 0) - before[node] for node in range(2)]
    assert ("shm" in said[0]) == (local[0] > 1)
    assert "tcp" in said[0]
    size, n = 4 * NUMEL, sum(local)
    want = {
        "all_reduce": [size, size],
        "reduce_scatter": [size * (n - count) // n for count in local],
        "all_gather": [size * count // n for count in local],
    }[op]
    for bytes_sent, expected in zip(sent, want, strict=True):
        # Headers and acknowledgements take 5 %; the rest is what TCP sends again.
        assert expected <= bytes_sent < 1.2 * expected
