"""Links of netlab: as slow as asked, counted, private, and gone whatever ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pycomm.bench import netlab
from tests.extent import each_value
from tests.processes.labs import near_hosts

RATE = 80e6 / 8  # bytes per second

# Rank 1 sends so many bytes to rank 0, which prints the seconds from the first to the last.
TRANSFER = """
import os, socket, sys, time
address, size = (os.environ["MASTER_ADDR"], 5000), int(sys.argv[1])
if os.environ["RANK"] == "0":
    with socket.create_server(address) as server:
        stream, _ = server.accept()
        start, left = time.monotonic(), size
        while left:
            left -= len(stream.recv(1 << 20))
        print(time.monotonic() - start)
else:
    while True:
        try:
            socket.create_connection(address).sendall(bytes(size))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
"""


NETLAB = [sys.executable, "-m", "pycomm.bench.netlab"]

# Says that it is up, and leaves a process in a session of its own, where no signal of ours comes.
RUNAWAY = """
import os, subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(60)  # {mark}"]
subprocess.Popen(child, start_new_session=True)
os.write(1, b"up\\n")
{then}
"""


def test_link_has_its_rate_and_counts_its_bytes():
    size = 8 << 20
    with near_hosts(2) as lab:
        command = [sys.executable, "-c", TRANSFER, str(size)]
        ranks = lab.start(command, stdout=subprocess.PIPE)
        assert netlab.wait(ranks) == 0
        rate = size / float(ranks[0].stdout.read())
        # Above: a full bucket and the last queue pass without waiting, 0.12 and 0.5 MB of 8.
        # Below: headers take 4 %; the rest is for a machine that is busy with other tests.
        assert 0.4 * RATE < rate < 1.1 * RATE
        sent = lab.traffic()[1].sent
        # Headers, and what TCP sends again when the bucket overflows.
        assert size < sent < 1.25 * size
        acknowledgements = lab.traffic()[0].sent
        assert 0 < acknowledgements < 0.1 * size


def buckets(lab: netlab.Netlab, node: int) -> list[tuple[str, int]]:
    """Bytes per second of each token bucket on a node; the switch is node -1."""
    command = [*lab.wrap(node), "tc", "-j", "qdisc", "show"]
    found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return [(q["dev"], q["options"]["rate"]) for q in found if q["kind"] == "tbf"]


def test_nodes_have_rates_of_their_own_each_way():
    rates = {1: "8mbit/16mbit", 2: "unlimited/24mbit"}
    with near_hosts(3, "80mbit", node_rates=rates) as lab:
        assert [buckets(lab, node) for node in range(3)] == [
            [("eth0", 10_000_000)],
            [("eth0", 1_000_000)],
            [],
        ]
        received = [("port0.0", 10_000_000), ("port0.1", 2_000_000), ("port0.2", 3_000_000)]
        assert buckets(lab, -1) == received
        assert "80mbit each way by tbf, node 1 8mbit/16mbit, node 2 unlimited/24mbit" in (
            lab.describe()
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rate": "fast"}, "cannot read the rate 'fast'"),
        ({"rate": "1gbit", "node_rates": {2: "1mbit"}}, "no node 2: the nodes are 0 to 1"),
        ({"rate": "1gbit", "node_rates": {1: "1gbit,1gbit"}}, "the same number of links"),
    ],
)
def test_rates_that_cannot_be_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        netlab.Netlab(2, **options)


def test_root_is_not_needed():
    with near_hosts(2, user_namespace=True) as lab:
        assert "user namespace" in lab.describe()
        code = "import os; print(os.getuid(), os.readlink('/proc/self/ns/user'))"
        ranks = lab.start([sys.executable, "-c", code], stdout=subprocess.PIPE)
        said = [rank.communicate()[0].decode().split() for rank in ranks]
        assert [uid for uid, _ in said] == ["0", "0"]
        assert os.readlink("/proc/self/ns/user") not in {space for _, space in said}


def test_crashed_rank_ends_all_and_gives_the_status():
    near_hosts(2).close()
    mark = f"{os.getpid()}.crash"
    then = "os.abort() if os.environ['RANK'] == '1' else time.sleep(60)"
    code = RUNAWAY.format(mark=mark, then=then)
    done = subprocess.run(
        [*NETLAB, "--", sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 128 + signal.SIGABRT
    assert not processes_with(mark)
    rows = [line.split()[:2] for line in done.stderr.splitlines()[-2:]]
    assert rows == [["0", "eth0"], ["1", "eth0"]]  # what was sent is told all the same


def test_bytes_are_told_and_a_missing_command_too():
    near_hosts(2).close()
    done = subprocess.run([*NETLAB, "--", "no-such-command"], capture_output=True, text=True)
    assert done.returncode == 127
    assert "no-such-command: No such file or directory" in done.stderr
    assert "sent bytes   received bytes" in done.stderr


@each_value
@pytest.mark.parametrize(
    ("sent", "who", "status"),
    [
        (signal.SIGINT, "netlab", 130),
        (signal.SIGTERM, "netlab", 143),
        (signal.SIGKILL, "netlab", -signal.SIGKILL),
        (signal.SIGKILL, "netlab of a user", -signal.SIGKILL),
        (signal.SIGKILL, "its parent", -signal.SIGKILL),
    ],
)
def test_nothing_is_left_behind(sent, who, status):
    user = ["--user-namespace"] if "user" in who else []
    near_hosts(2, user_namespace=bool(user)).close()
    mark = f"{os.getpid()}.{sent.value}.{len(who)}"  # found in the command lines of the ranks
    code = RUNAWAY.format(mark=mark, then="time.sleep(60)")
    command = [*NETLAB, *user, "--", sys.executable, "-c", code]
    if who == "its parent":
        command = ["sh", "-c", '"$@"; exit', "sh", *command]
    interfaces = set(netlab.interface_counts())
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # A shell starts its background jobs deaf to SIGINT, and these tests may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for _ in range(2):
        assert started.stdout.readline() == b"up\n"
    assert len(processes_with(mark)) >= 4  # two ranks and two that they have started
    busy = set(processes_with("busy_cores.py")) & descendants(started.pid)
    assert len(busy) == len(os.sched_getaffinity(0))
    spaces = {namespaces()[pid] for pid in descendants(started.pid)} - {namespaces()[os.getpid()]}
    assert len(spaces) == 3  # a switch and two nodes
    started.send_signal(sent)
    assert started.wait(30) == status
    deadline = time.monotonic() + 30
    left = busy
    while left or processes_with(mark) or spaces & set(namespaces().values()):
        left = busy & set(processes_with("busy_cores.py"))
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert set(netlab.interface_counts()) == interfaces


def read_of_each_process(read: Callable[[Path], str]) -> dict[int, str]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found[int(process.name)] = read(process)
        except OSError:
            continue  # it has ended, or is not ours
    return found


def namespaces() -> dict[int, str]:
    return read_of_each_process(lambda process: os.readlink(process / "ns/net"))


def descendants(ancestor: int) -> set[int]:
    """Processes that a process has started, and those that they have."""
    stats = read_of_each_process(lambda process: (process / "stat").read_text())
    parents = {pid: int(text.rpartition(")")[2].split()[1]) for pid, text in stats.items()}
    found, more = set(), {ancestor}
    while more:
        more = {pid for pid, parent in parents.items() if parent in more}
        found |= more
    return found


def processes_with(mark: str) -> list[int]:
    commands = read_of_each_process(lambda process: (process / "cmdline").read_text())
    return [pid for pid, command in commands.items() if mark in command]


# -------------------------------------------------------------------------------------------- paths
# Several paths between two hosts (PYCOMM_INTERFACE=eth0,eth1): real links between namespaces.


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
