"""Ranks on several hosts, which are network namespaces here: what connects them, and its use."""

from __future__ import annotations

import json
import os
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
from pycomm.straggler.compare import RankStats, compare
from tests.extent import FULL, each_value, part
from tests.faults.injection.case import NETWORK, draw
from tests.faults.injection.judge import breaches
from tests.faults.injection.play import lab_of, play
from tests.processes.labs import far_hosts, near_hosts, printed_by

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
JOB = [sys.executable, "-c", CHECK_ALL]


def run(
    rate: str, ranks_per_node: int, command: list[str], env: Mapping[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank on two hosts; the command gets a shared folder."""
    with near_hosts(2, rate) as lab, tempfile.TemporaryDirectory() as folder:
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


def test_a_master_name_for_loopback_does_no_harm():
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


# ------------------------------------------------------------------------------ failures for good
# A rank whose network fails for good is named by the others at the deadline, however it fails.


@pytest.fixture(scope="module")
def lab():
    try:
        return lab_of(4)
    except netlab.LabUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")


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


# ------------------------------------------------------------------------------------------ nodes
# Collectives on real nodes: network namespaces, joined by links that count their bytes.


NUMEL = 2_000_000

# Every rank reduces and gathers; rank 0 prints how it is connected.
ONE_CALL = f"""
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


@each_value
@pytest.mark.parametrize("local", [[2, 2], [1, 3]], ids=["2+2", "1+3"])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_each_byte_crosses_a_link_once(tmp_path, local, op):
    with near_hosts(2, "1gbit") as lab:
        before = [lab.sent_bytes(node) or 0 for node in range(2)]
        nodes = [node for node, count in enumerate(local) for _ in range(count)]
        ranks = [
            subprocess.Popen(
                [*lab.wrap(node), sys.executable, "-c", ONE_CALL, str(tmp_path), op],
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(len(nodes))},
                stdout=subprocess.PIPE,
            )
            for rank, node in enumerate(nodes)
        ]
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
        text = printed_by(lab, SUMS, tmp_path, forked=True)
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(str(levels))]
    assert len(lines) == 4, text
    assert all("round trips up to 6" in line and told in line for line in lines), text


# ------------------------------------------------------------------------------------- slow links
# The host whose link is slow is named by what the kernels of all hosts count.


# Makes a few all-reduces; prints what the rank knows of them. The kernel's counts are noted about
# once a second, at the end of an operation.
STEPS_ON_LINKS = """
import json, sys, time
import numpy as np
from pycomm.communicator import Communicator
from pycomm.straggler.compare import rank_stats
with Communicator.from_env(sys.argv[1], timeout=30.0) as c:
    goes_on, start = np.ones(1, np.float32), time.monotonic()
    while goes_on[0] > 0:
        c.all_reduce(np.ones(100_000, np.float32))
        goes_on[0] = time.monotonic() - start < 1.8
        c.all_reduce(goes_on, "min")
    print(json.dumps(rank_stats(c.core.trace()).to_json()))
"""


def test_the_rank_with_the_slow_link_is_named():
    links = {"rate": "400mbit", "node_rates": {1: "60mbit"}}
    with near_hosts(3, **links) as lab, tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", STEPS_ON_LINKS, folder]
        ranks = lab.start(command, stdout=subprocess.PIPE)
        texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    health = compare([RankStats.from_json(json.loads(text)) for text in texts])
    assert (health.finding.rank, health.finding.cause) == (1, "link")


# --------------------------------------------------------------------------------- measured rates
# What ranks have sent says how fast their links are, and owners' shares of exact sums follow.


# The ranks tell each other what they have measured after 8 and after 32 collectives. In each sum, a
# fast rank sends for one or two windows of its meter before it waits for the slow one.
MEASURED_SUMS = """
import numpy as np, torch.distributed as dist
from pycomm.stores import TorchStore
from pycomm.communicator import Communicator, Piece, Store

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
requests = TorchStore(dist.distributed_c10d._get_default_store())
group = Communicator(Store.of(requests), rank, ranks, transport="tcp", timeout=120)

def values(seed):
    return np.random.default_rng(seed).standard_normal(5 << 16).astype(np.float32)

def check(x, turn):
    expected = values(turn)
    for r in range(1, ranks):
        expected = expected + values(1000 * r + turn)
    assert x.tobytes() == expected.tobytes(), turn

def buffers(call, size):
    sent = group.wire_bytes()
    call()
    return f"{(group.wire_bytes() - sent) / size:.2f}"

x = values(1000 * rank)
group.all_reduce(x)
check(x, 0)
before = group.describe()
for calls in range(2, 34):
    if calls < 6 or 9 < calls < 14:  # a busy machine needs more of them
        group.all_reduce(values(1000 * rank))
    else:
        group.barrier()
    if "exact shares" in group.describe():
        break
x = values(1000 * rank + 2)
exact = buffers(lambda: group.all_reduce(x), x.nbytes)
check(x, 2)
piece = Piece(x.size, "quant:bits=8")
coded = buffers(lambda: group.all_reduce_coded(x, [piece]), x.size)
print(rank, "measured" in before, exact, coded, group.core.shares, group.describe(), flush=True)
dist.barrier()
group.close()
"""


def test_a_slow_sender_owns_little_of_exact_sums(tmp_path):
    """It sends less than 4/3 of a buffer, and all sums keep their bits; coded shares stay equal."""
    rates = {0: "5mbit/15mbit", 1: "15mbit", 2: "15mbit"}
    with far_hosts(3, "unlimited", shape=Shape(delay=0.01), node_rates=rates) as lab:
        text = printed_by(lab, MEASURED_SUMS, tmp_path, forked=True)
    lines = sorted(line for line in text.splitlines() if "round trips" in line)
    assert len(lines) == 3, text
    # The same on all ranks.
    assert len({line.partition("round trips")[2] for line in lines}) == 1, text
    shares = re.search(r", exact shares (\S+) (\S+) (\S+)$", lines[0])
    assert shares, text
    # None at all, unless a busy machine kept the other two from sending at their rates.
    slow, *others = map(float, shares.groups())
    assert slow < 0.2, text
    assert slow <= min(others), text
    for rank, line in enumerate(lines):
        assert line.startswith(f"{rank} False "), text
        assert " [] 3 ranks: " in line, text
        exact, coded = map(float, line.split()[2:4])
        share = float(shares.group(rank + 1))
        # What others own goes to them, and what this rank owns to both; frames have headers.
        assert 1 + share - 0.01 < exact < 1.1 * (1 + share), text
        assert 1.33 <= coded < 1.5, text  # and int8 has scales


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


def test_variables_are_read_with_a_point(locales):
    code = (
        f"import json, locale; locale.setlocale(locale.LC_ALL, {GERMAN!r})\n"
        "assert locale.str(1.5) == '1,5'\n"
        "from pycomm import _C; print(json.dumps(_C.env()))"
    )
    given = {"PYCOMM_TIMEOUT": "1.5", "PYCOMM_LINK": "2.5mbit", "LOCPATH": str(locales)}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["timeout"] == 1.5
    assert found["link_bytes_per_second"] == 2.5e6 / 8


RANK = """
import array, locale, sys
rank, folder, own = int(sys.argv[1]), sys.argv[2], sys.argv[3]
locale.setlocale(locale.LC_ALL, own)
from pycomm.communicator import Communicator, Store
rate = ("12.5mbit/20mbit", "100mbit")[rank]
with Communicator(Store.file(folder), rank, 2, transport="tcp", timeout=20, rate=rate) as c:
    x = array.array("i", (rank + i for i in range(100_003)))
    c.all_reduce(x)
    print(x.tolist() == [2 * i + 1 for i in range(100_003)])
    print(c.describe().partition("; ")[2])
"""


def test_ranks_of_different_locales_know_the_same_links(locales, tmp_path):
    """Both publish rates, and compute from all of them who owns how much of a sum."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), own],
            env=os.environ | {"LOCPATH": str(locales)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, own in enumerate((GERMAN, "C"))
    ]
    found = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert [lines[:1] for lines in found] == [["True"], ["True"]], found
    assert found[0][1] == found[1][1] == "rates 12.5/20 100 Mbit/s"


# ---------------------------------------------------------------------------------------- addresses
# Addresses between hosts: IPv6, NAT, firewalls and patterns, in network namespaces.


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
