"""A process may have closed its standard streams: what is printed must not reach a socket.

The kernel gives the numbers 0, 1 and 2 to the next files that are opened. A library that prints a
warning would write it to one of ours, and one that asks a question would read from it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

RANK = """
import array, os, sys
rank, folder, transport = int(sys.argv[1]), sys.argv[2], sys.argv[3]
from pycomm.communicator import Communicator, Store
os.closerange(0, 3)
with Communicator(Store.file(folder), rank, 2, transport=transport, timeout=20) as c:
    for turn in range(3):
        x = array.array("i", (rank + i for i in range(100_003)))
        c.all_reduce(x)
        good = x.tolist() == [2 * i + 1 for i in range(100_003)]
        taken = [number for number in range(3) if os.path.lexists(f"/proc/self/fd/{number}")]
        for number in taken:
            os.write(number, b"W1126 a warning that some library prints\\n")
with open(folder + str(rank), "w") as file:
    print(good, taken, file=file)
"""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_no_file_of_ours_has_the_number_of_a_stream(transport, tmp_path):
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), store, transport])
        for rank in range(2)
    ]
    assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    for rank in range(2):
        with open(store + str(rank)) as file:
            assert file.read() == "True []\n"
