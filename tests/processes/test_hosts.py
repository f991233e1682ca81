"""Ranks on several hosts, which are network namespaces here: what connects them, and its use."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import cycle, product
from pathlib import Path

import pytest

from pycomm.bench import netlab
from pycomm.bench.lab.wan import Shape
from pycomm.straggler import RankStats, compare
from tests.extent import FULL, part
from tests.faults.injection.case import NETWORK, draw
from tests.faults.injection.play import breaches, play
from tests.processes.labs import far_hosts, near_hosts, printed_by
from tests.torch.interpreter import run_ranks

# Checks all collectives and messages by `==`; prints how the rank is connected.
CHECK_ALL = """
import sys
import numpy as np
from pycomm.communicator import Communicator
from tests.collectives.ways import check_everything, right
with Communicator.from_env(sys.argv[1], timeout=30.0) as c:
    results = right(c.size, (1, 1000, 100_003))
    check_everything(c, results)
    for numel, of in results.items():
        outs = [np.empty(numel, np.float32) for _ in range(c.size)]
        requests = [c.recv(out, peer) for peer, out in enumerate(outs)]
        requests += [c.send(of.mine[c.rank], peer) for peer in range(c.size)]
        for request in requests:
            request.wait()
        assert np.array_equal(outs, of.mine)
    print(c.describe())
"""


def test_shared_memory_inside_a_host_and_tcp_between(tmp_path):
    with near_hosts(2, "unlimited") as lab:
        store = str(tmp_path / "store")
        text = printed_by(lab, CHECK_ALL, tmp_path, store, ranks_per_node=2)
    for rank in range(4):
        neighbour, others = rank ^ 1, "2,3" if rank < 2 else "0,1"
        assert f"shm with {neighbour}; tcp to {others} by eth0 (10.77.0." in text


# ------------------------------------------------------------------------------ failures for good
# A rank whose network fails for good is named by the others at the deadline, however it fails.


@pytest.fixture(scope="module")
def lab():
    with near_hosts(4, "unlimited") as lab:
        yield lab


PHASES = ("split", "steady")


@pytest.mark.parametrize(
    ("fault", "phase"), product(NETWORK, PHASES) if FULL else list(zip(NETWORK, cycle(PHASES)))
)
def test_a_cut_off_rank_is_named_and_leaves_nothing(lab, fault, phase):
    case = draw(7, 0, transports=["tcp"], faults=[fault], phases=[phase])
    assert breaches(play(case, lab)) == [], str(case)


# --------------------------------------------------------------------------- failures for a while
# A network between two hosts that fails for a while: collectives wait, and go on.


GOING_ON = """
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


def test_collectives_survive_flaps_and_killed_connections(tmp_path):
    with near_hosts(2, "1gbit") as lab:
        command = [sys.executable, "-c", GOING_ON, str(tmp_path / "store")]
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


# ------------------------------------------------------------------------------------------ sites
# Hosts near each other, and far from others, are found by the round trips of their connections.


SUMS = """
import torch, torch.distributed as dist
from pycomm import backend

dist.init_process_group("pycomm")
rank = dist.get_rank()
for numel in (5, 100_003):
    x = torch.arange(float(numel)) + rank
    dist.all_reduce(x)
    assert torch.equal(x, 4 * torch.arange(float(numel)) + 6), numel
group = backend.find(dist.group.WORLD)
print(group.levels, group.describe(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


CASES = [
    (1e-4, [(0, 2), (1, 3)], [0, 1, 0, 1], "; 2 sites: 0,2 | 1,3"),
    (2e-3, [(0, 2)], [], " ms\n"),  # between near and far, so there are no sites
]


@pytest.mark.parametrize(("delay", "near", "levels", "told"), part(CASES, 2))
def test_sites_are_found_by_round_trips(tmp_path, delay, near, levels, told):
    differ = {way: Shape(delay) for a, b in near for way in ((a, b), (b, a))}
    with far_hosts(4, "unlimited", shape=Shape(delay=0.03), differ=differ) as lab:
        text = printed_by(lab, SUMS, tmp_path)
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(str(levels))]
    assert len(lines) == 4, text
    assert all("round trips up to 6" in line and told in line for line in lines), text


# ------------------------------------------------------------------------------------- slow links
# The host whose link is slow is named by what the kernels of all hosts count.


# Makes a few all-reduces; prints what the rank knows of them. The kernel's counts are noted about
# once a second, at the end of an operation.
STEPS_ON_LINKS = """
import json, sys, time
from dataclasses import asdict
import numpy as np
from pycomm.communicator import Communicator
from pycomm.straggler import rank_stats
with Communicator.from_env(sys.argv[1], timeout=30.0) as c:
    goes_on, start = np.ones(1, np.float32), time.monotonic()
    while goes_on[0] > 0:
        c.all_reduce(np.ones(100_000, np.float32))
        goes_on[0] = time.monotonic() - start < 1.8
        c.all_reduce(goes_on, "min")
    print(json.dumps(asdict(rank_stats(c.core.trace()))))
"""


def test_the_rank_with_the_slow_link_is_named():
    links = {"rate": "400mbit", "node_rates": {1: "60mbit"}}
    with near_hosts(3, **links) as lab, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", STEPS_ON_LINKS, folder]
        ranks = lab.start(command, stdout=subprocess.PIPE)
        texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    health = compare([RankStats.from_json(json.loads(text)) for text in texts])
    assert (health.finding.rank, health.finding.cause) == (1, "link")


# ------------------------------------------------------------------------------------------ locales
# A program's locale, which may have a decimal comma, changes nothing that ranks read.


GERMAN = "de_DE.UTF-8"


@pytest.fixture(scope="module")
def locales(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a locale that has a decimal comma."""
    folder = tmp_path_factory.mktemp("locales")
    if not shutil.which("localedef"):
        pytest.skip("localedef is not installed")
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(folder / GERMAN)]
    made = subprocess.run(command, capture_output=True, text=True)
    if not (folder / GERMAN).exists():
        pytest.skip(f"localedef cannot make {GERMAN}: {made.stderr}")
    return folder


RANK = """
import array, locale, sys
rank, folder = int(sys.argv[1]), sys.argv[2]
locale.setlocale(locale.LC_ALL, "")
assert locale.str(1.5) == ("1,5", "1.5")[rank]
from pycomm import _C
from pycomm.communicator import Communicator, Store
link = ("12.5mbit/20mbit", "100mbit")[rank]
with Communicator(Store.file(folder), rank, 2, transport="tcp", timeout=20, link=link) as c:
    x = array.array("i", (rank + i for i in range(100_003)))
    c.all_reduce(x)
    print(x.tolist() == [2 * i + 1 for i in range(100_003)])
    print(c.describe().partition("; ")[2])
print(_C.env()["timeout"])
"""


def test_ranks_of_different_locales_know_the_same_links(locales, tmp_path):
    """Variables have a point. By rates that they publish ranks know who owns how much of a sum."""
    common = {"LOCPATH": str(locales), "PYCOMM_TIMEOUT": "1.5"}
    of_rank = [common | {"LC_ALL": own} for own in (GERMAN, "C")]
    ranks = run_ranks("-c", RANK, words=[str(tmp_path / "store")], of_rank=of_rank)
    found = [rank.stdout.splitlines() for rank in ranks]
    assert found[0] == found[1] == ["True", "rates 12.5/20 100 Mbit/s", "1.5"]


# ---------------------------------------------------------------------------------------- addresses
# Addresses between hosts: IPv6 and patterns, in network namespaces.


# A rank sums integers over a group, with variables of its own ({"0": {...}, "1": {...}}).
SUM = r"""
import json, os, sys
os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the lab's choice; here we choose
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


@pytest.mark.parametrize("variable", ["PYCOMM_INTERFACE", "NCCL_SOCKET_IFNAME"])
def test_loopback_between_hosts_is_refused(tmp_path, variable):
    with near_hosts(2, "unlimited") as lab:
        lines = described_by(lab, tmp_path, both({variable: "lo"}))
    assert len(lines) == 2
    for line in lines:
        assert '"lo" is loopback, which no other host can reach; PYCOMM_INTERFACE' in line


def test_a_master_name_for_loopback_does_no_harm(tmp_path):
    """As where /etc/hosts maps the host's own name to 127.0.1.1."""
    with near_hosts(2, "unlimited") as lab:
        lines = described_by(lab, tmp_path, both({"MASTER_ADDR": "127.0.1.1"}))
    assert len(lines) == 2
    assert all("by eth0 (10.77.0." in line for line in lines)


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


def test_ranks_with_different_sets_of_paths_get_one_line(tmp_path):
    with near_hosts(2, "unlimited,unlimited") as lab:
        ranks = {"0": {"PYCOMM_INTERFACE": "eth0,eth1"}, "1": {"PYCOMM_INTERFACE": "eth0"}}
        lines = described_by(lab, tmp_path, ranks)
    # A rank that has seen the other one leave reports its reason.
    assert len(lines) == 2
    sets = (
        r"rank 0 has 2 \(eth0, eth1\), rank 1 has 1 \(10\.77\.0\.2\)",
        r"rank 1 has 1 \(eth0\), rank 0 has 2 \(10\.77\.0\.1, 10\.77\.1\.1\)",
    )
    remedy = "let PYCOMM_INTERFACE name as many interfaces on each host, in the same order"
    for line in lines:
        assert re.search(f"have different sets of paths: ({'|'.join(sets)}); {remedy}$", line), line
