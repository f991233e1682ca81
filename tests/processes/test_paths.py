"""Several paths between two hosts (PYCOMM_INTERFACE=eth0,eth1): real links between namespaces."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

import pytest

from pycomm.bench import netlab
from tests.processes.labs import near_hosts

# Sums integers again and again until the file `end` is there; every sum is checked, and after each
# one the number of those so far is published.
SUMS = """
import sys
from pathlib import Path
import numpy as np
from pycomm.communicator import Communicator

folder = Path(sys.argv[1])
group = Communicator.from_env(str(folder / "store"), transport="tcp", timeout=60)
numbers = np.arange(int(sys.argv[2]), dtype=np.int64)
for turn in range(100000):
    last = np.array([(folder / "end").exists()], np.int64)
    group.all_reduce(last)
    x = numbers + turn * (group.rank + 1)
    group.all_reduce(x)
    assert (x == 2 * numbers + 3 * turn).all(), "a wrong sum"
    (folder / f"turn.{group.rank}").write_text(str(turn + 1))
    if last[0]:
        break
group.close()
print("sums are right")
"""
VALUES = 200_001
"""of a sum, 1.6 MB: a small part of a second on these links"""


class Sums:
    """Two ranks that sum over two links, in the lab."""

    def __init__(self, lab: netlab.Netlab, folder: Any) -> None:
        self.lab, self.folder = lab, folder
        self.printed = (folder / "printed").open("w+")
        env = {**os.environ, "PYCOMM_INTERFACE": "eth0,eth1"}
        command = [sys.executable, "-c", SUMS, str(folder), str(VALUES)]
        self.ranks = lab.start(command, env=env, stdout=self.printed, stderr=self.printed)

    def turn(self) -> int:
        counts = [self.folder / f"turn.{rank}" for rank in (0, 1)]
        return min(int(file.read_text() or 0) if file.exists() else 0 for file in counts)

    def wait_until(self, what: str, reached: Any) -> None:
        end = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < end, f"{what}\n{self.text()}"
            assert all(rank.poll() is None for rank in self.ranks), self.text()
            time.sleep(0.02)

    def wait_for_turns(self, count: int) -> None:
        aim = self.turn() + count
        self.wait_until(f"turn {aim} did not come", lambda: self.turn() >= aim)

    def sent(self, link: int) -> int:
        return sum(t.sent for t in self.lab.traffic() if t.interface == f"eth{link}")

    def wait_for_bytes(self, link: int) -> None:
        """Wait until the link carries data, not only packets of connections."""
        aim = self.sent(link) + 4 * VALUES
        self.wait_until(f"eth{link} carries nothing", lambda: self.sent(link) >= aim)

    def end(self) -> str:
        (self.folder / "end").touch()
        status = netlab.wait(self.ranks)
        text = self.text()
        assert status == 0, text
        return text

    def text(self) -> str:
        self.printed.seek(0)
        return self.printed.read()


@pytest.mark.parametrize("rates", ["200mbit,200mbit", "200mbit,20mbit"])
def test_all_paths_carry_bytes_and_the_faster_one_more(rates, tmp_path):
    with near_hosts(2, rates) as lab:
        sums = Sums(lab, tmp_path)
        sums.wait_for_bytes(0)
        sums.wait_for_bytes(1)
        sums.wait_for_turns(10)
        assert sums.end().count("sums are right") == 2
        if "20mbit" in rates:
            assert sums.sent(0) > 2 * sums.sent(1) > 0


@pytest.mark.parametrize("link", [0, 1])
def test_a_path_that_is_cut_is_left_and_used_again(link, tmp_path):
    """Path 0 also has the control connection."""
    with near_hosts(2, "100mbit,100mbit") as lab:
        sums = Sums(lab, tmp_path)
        sums.wait_for_bytes(link)
        lab.cut(1, link=link)
        sums.wait_for_turns(5)  # the first may have been over the cut path before
        carried = sums.sent(link)
        sums.wait_for_turns(5)
        assert sums.sent(link) - carried < VALUES  # only attempts to use it
        lab.mend(1, link=link)
        sums.wait_for_bytes(link)
        assert sums.end().count("sums are right") == 2


def test_a_path_that_is_cut_before_the_start_is_used_later(tmp_path):
    with near_hosts(2, "100mbit,100mbit") as lab:
        lab.cut(1, link=1)
        sums = Sums(lab, tmp_path)
        sums.wait_for_turns(3)
        lab.mend(1, link=1)
        sums.wait_for_bytes(1)
        assert sums.end().count("sums are right") == 2


JOIN = """
import os, sys
os.environ["PYCOMM_INTERFACE"] = ["eth0,eth1", "eth0"][int(os.environ["RANK"])]
from pycomm import errors
from pycomm.communicator import Communicator
try:
    Communicator.from_env(sys.argv[1], transport="tcp", timeout=30)
except errors.Error as error:
    print(error)
"""


def test_ranks_with_different_sets_of_paths_get_one_line(tmp_path):
    with (
        near_hosts(2, "unlimited,unlimited") as lab,
        (tmp_path / "printed").open("w+") as printed,
    ):
        command = [sys.executable, "-c", JOIN, str(tmp_path / "store")]
        ranks = lab.start(command, env=dict(os.environ), stdout=printed, stderr=printed)
        assert netlab.wait(ranks) == 0
        printed.seek(0)
        lines = printed.read().splitlines()
    # A rank that has seen the other one leave reports its reason.
    assert len(lines) == 2
    sets = (
        r"rank 0 has 2 \(eth0, eth1\), rank 1 has 1 \(10\.77\.0\.2\)",
        r"rank 1 has 1 \(eth0\), rank 0 has 2 \(10\.77\.0\.1, 10\.77\.1\.1\)",
    )
    remedy = "let PYCOMM_INTERFACE name as many interfaces on each host, in the same order"
    for line in lines:
        assert re.search(f"have different sets of paths: ({'|'.join(sets)}); {remedy}$", line), line
