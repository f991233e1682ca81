"""Groups between hosts that are far from each other: real links with delay (bench/lab/wan.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm.backend  # noqa: F401  not within the step that is counted
from pycomm._build import load_c10d
from pycomm.bench.lab.jobs import Failed, command_of
from pycomm.bench.lab.wan import Shape, WanLab
from tests.extent import part
from tests.processes.labs import CountedWanLab, far_hosts, printed_by


@pytest.mark.parametrize(
    ("nodes", "round_trip"), part([(2, 0.06), (3, 0.06), (3, 0.2), (2, 0.2)], 2)
)
def test_a_group_takes_few_round_trips(nodes, round_trip):
    """Ranks that the machine delays ask the store once more: then the job is repeated."""
    total = [float(sum(range(nodes)) + nodes * i) for i in range(4)]
    took = dict.fromkeys(PROMISED, float("inf"))
    with far_hosts(nodes, shape=Shape(delay=round_trip / 2)) as lab:
        for _ in range(4):
            steps, printed = run_steps(lab)
            # What torch's store says of a network without name servers, and rank 0 of its group.
            expected = ("hostname of the client socket", "pycomm: version ")
            lines = printed.splitlines()
            assert [line for line in lines if not any(text in line for text in expected)] == []
            assert [name for name, *_ in steps] == list(STEPS)
            for name, trips, results in steps:
                assert results == [total if "operation" in name else None] * nodes
                if name in took:
                    took[name] = min(took[name], trips)
            if all(trips <= PROMISED[name] for name, trips in took.items()):
                return
    pytest.fail(f"{took} round trips, and {PROMISED} are promised")


# Rank 1 sends so many datagrams to rank 0, each after the answer to the one before if there are
# answers. Rank 0 is there in either case, so that nothing says that nobody is.
DATAGRAMS = """
import os, socket, sys
address, count, answers = (os.environ["MASTER_ADDR"], 5000), int(sys.argv[1]), sys.argv[2:]
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    end.bind(address)
    print("ready", flush=True)
    for _ in range(count if answers else 0):
        end.sendto(*end.recvfrom(100))
    sys.stdin.read()
else:
    sys.stdin.readline()
    for _ in range(count):
        end.sendto(b"x", address)
        if answers:
            end.recv(100)
"""


def send(lab: CountedWanLab, count: int, *answers: str) -> int:
    """Send datagrams from node 1 to node 0; return how many packets were lost."""
    before = lab.packets()[1]
    server, client = (
        subprocess.Popen(
            [*lab.wrap(rank), sys.executable, "-c", DATAGRAMS, str(count), *answers],
            env={**os.environ, "MASTER_ADDR": lab.master, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    )
    assert server.stdout.readline() == b"ready\n"
    lab.mark()
    client.communicate(b"\n", timeout=60)
    server.communicate(timeout=60)
    return lab.packets()[1] - before


def test_trips_are_counted():
    """What the test above relies on."""
    with far_hosts(2, shape=Shape(delay=0.001)) as lab:
        assert send(lab, 5, "answers") == 0
        assert lab.trips() == 10
        lab.mark()
        assert lab.trips() == 0
        # In another session the lab's idle processes hold it up for seconds (sched_autogroup).
        assert os.getsid(lab._link.pid) == os.getsid(0)


@pytest.mark.parametrize(
    ("loss", "differ", "least", "most"),
    [
        (0.3, {}, 228, 372),
        (1, {}, 1000, 1000),
        (0, {(0, 1): Shape(loss=1)}, 0, 0),
        (0, {(1, 0): Shape(loss=1)}, 1000, 1000),
    ],
)
def test_packets_are_lost_as_often_as_asked(loss, differ, least, most):
    """Which ones is random: 1000 packets at 30 % lose 300, and 5 standard deviations are 72."""
    with far_hosts(2, "unlimited", shape=Shape(loss=loss), differ=differ) as lab:
        assert least <= send(lab, 1000) <= most


def test_netlab_moves_packets_with_delay():
    command = [sys.executable, "-m", "pycomm.bench.netlab", "--rate", "1gbit@2ms", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 2 and "cannot be made here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0
    assert "1 ms one way, in user space" in done.stderr


# Makes a group where the kernel lets it choose a congestion control, or refuses, as one that
# forbids bbr. setsockopt is 54 on x86-64 and 208 on others.
CONTROLLED = """
import errno, platform, socket, sys
import numpy as np
from pycomm.communicator import Communicator
from tests.ranks import refuse

if sys.argv[2] == "refuses":
    number = 54 if platform.machine() == "x86_64" else 208
    refuse(number, errno.EPERM, {1: socket.IPPROTO_TCP, 2: socket.TCP_CONGESTION})
group = Communicator.from_env(sys.argv[1], transport="tcp", timeout=30)
x = np.ones(1000, np.float32)
group.all_reduce(x)
assert (x == 2).all()
print(group.describe(), flush=True)
"""


HAS_BBR = "bbr" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()
needs_bbr = pytest.mark.skipif(not HAS_BBR, reason="this kernel has no bbr")


@pytest.mark.parametrize(
    ("delay", "kernel", "sockets"),
    [(0.03, "refuses", 4), (0.001, "refuses", 2), pytest.param(0.03, "allows", 2, marks=needs_bbr)],
)
def test_far_peers_have_more_sockets_without_bbr(tmp_path, delay, kernel, sockets):
    """The rank that connects decides by the round trip that it has measured, and by its kernel."""
    with far_hosts(2, shape=Shape(delay=delay)) as lab:
        text = printed_by(lab, CONTROLLED, tmp_path, str(tmp_path / "store"), kernel)
    told = f", {sockets} sockets each, "
    assert text.count(told) == 3, text  # rank 0 tells it at the start, too


@needs_bbr
@pytest.mark.parametrize(("kernel", "control"), [("allows", "bbr"), ("refuses", "reno")])
def test_far_peers_get_bbr_where_the_kernel_allows_it(tmp_path, kernel, control):
    """The system's congestion control is reno in the lab."""
    with far_hosts(2, shape=Shape(delay=0.001)) as lab:
        text = printed_by(lab, CONTROLLED, tmp_path, str(tmp_path / "store"), kernel)
    assert text.count(f", {control}\n") == 3, text  # rank 0 tells it at the start, too


# A host of so many ranks. They print the algorithms and the results of coded all-reduces, where no
# owner has a residual, and where one might.
CODED = """
import hashlib, os, sys
import torch, torch.distributed as dist, pycomm.backend
from pycomm._build import load_c10d

hosts, local = int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
child = os.fork() if local == 2 else None
rank = int(os.environ["RANK"]) * local + (child == 0)
os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(hosts * local)}
dist.init_process_group("pycomm")
native = pycomm.backend.find()
for may_owe in (False, True):
    layout = load_c10d().Layout(owner_residuals=may_owe)
    layout.add(1000, "quant:bits=8", 0)
    layout.add(5000, "quant:bits=4,rounding=stochastic", 1)
    x = torch.randn(6000, generator=torch.Generator().manual_seed(rank))
    native.compressed_all_reduce(x, layout, [(0, 0)] * 2, 7, 3).wait()
    algo, digest = native.trace()["records"][-1]["algo"], hashlib.sha256(x.numpy().tobytes())
    os.write(1, f"went in {algo}\\nresult {digest.hexdigest()}\\n".encode())
dist.destroy_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("local", [1, 2])
def test_far_hosts_without_feedback_use_one_round(tmp_path, local):
    """With the bits of two rounds."""
    with far_hosts(2, shape=Shape(delay=0.03)) as lab:
        lines = printed_by(lab, CODED, tmp_path, str(local)).splitlines()
    algos = [line for line in lines if line.startswith("went in ")]
    want = ["one_shot", "two_shot"] if local == 1 else ["hierarchical"] * 2
    assert sorted(algos) == sorted(f"went in {algo}" for algo in want * 2 * local), lines
    results = [line for line in lines if line.startswith("result ")]
    assert len(results) == 4 * local
    assert len(set(results)) == 1, lines


# Prints how many sockets have carried a part of so many all-reduces of so many values, after two
# that warm them up.
SOCKETS_IN_USE = r"""
import re, subprocess, sys
import numpy as np
from pycomm.communicator import Communicator

def sent():
    # A line about the addresses of each connection, and one with its counts.
    lines = subprocess.run(["ss", "-Htin"], capture_output=True, text=True, check=True).stdout
    counts = re.findall(r"^ESTAB +\S+ +\S+ +(\S+ +\S+).*\n.* bytes_sent:(\d+)", lines, re.M)
    return {address: int(count) for address, count in counts}

group = Communicator.from_env(sys.argv[1], transport="tcp", timeout=60)
count, numel = int(sys.argv[2]), int(sys.argv[3])
x = np.ones(numel, np.float32)
for turn in range(2 + count):
    if turn == 2:
        before = sent()
    group.all_reduce(x)
assert (x == 2.0 ** (2 + count)).all()
now, least = sent(), count * x.nbytes // 40
print("in use:", sum(n - before.get(k, 0) > least for k, n in now.items()))
group.all_reduce(x[:1])  # both have looked
"""


@needs_bbr
def test_short_messages_stay_on_one_socket(tmp_path):
    """TCP finds a loss at once only if the next message follows on its socket."""
    with far_hosts(2, "200mbit", shape=Shape(delay=0.015)) as lab:
        text = printed_by(lab, SOCKETS_IN_USE, tmp_path, str(tmp_path / "store"), "40", "2048")
    assert text.count("in use: 1\n") == 2, text


# -------------------------------------------------------------------------------------------- steps
# A job makes a group, runs its first operation, makes other groups from it, and shuts down; all
# ranks begin each step at once. Round trips are counted, not timed: the lab numbers each packet by
# the longest chain of packets before it.


STEPS = (
    "init",
    "first operation",
    "operation",
    "new_group",
    "first operation of new_group",
    "split_group",
    "first operation of split_group",
    "reconfigure",
    "first operation of reconfigure",
    "reconfigure again",
    "reconfigure with a new member",
    "shutdown",
)
FORMED = ("reconfigure", "reconfigure again", "reconfigure with a new member")
PROMISED = {
    "init": 9,  # 8 if the ranks reach the exchange of values together, after torch's part of it
    "first operation": 2,
    "new_group": 5,
    "first operation of new_group": 2,
    "split_group": 6,  # two are torch's, which connects to its store once more
    "first operation of split_group": 2,
    "reconfigure": 8,
    "first operation of reconfigure": 2,
    "reconfigure again": 8,
    "reconfigure with a new member": 8,  # the last one has left, and another process has come
    "shutdown": 2,
}
"""the most round trips that a step of pycomm takes, where all ranks begin it at once"""
LIMIT = 300.0  # seconds for one step: a rank that hangs must not hang this


def run_steps(lab: WanLab) -> tuple[list[tuple[str, float, list[Any]]], str]:
    """Return the steps of one job with one rank per node, and all that its ranks have printed.

    A step has a name, its round trips, which are half of the longest chain of one-way trips that
    packets made, and what it returned on each rank. The chain depends on what waits for what, and
    not on how fast this machine is.

    Raises:
        Failed: a rank failed.
    """
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as printed:
        folder = Path(name)
        command = command_of(take_steps, (folder,), folder / "log")
        ranks = lab.start(command, env=dict(os.environ), stdout=printed, stderr=printed)
        slowest = 2 * lab.shape.delay

        def text() -> str:
            printed.seek(0)
            return printed.read().decode(errors="replace")

        def await_all(pattern: str) -> list[Path]:
            files = [folder / pattern.format(rank=rank) for rank in range(lab.nodes)]
            until = time.monotonic() + LIMIT
            while not all(file.exists() for file in files):
                if any(rank.poll() for rank in ranks) or time.monotonic() > until:
                    raise Failed(f"a rank failed in step {pattern}:\n{text()}")
                time.sleep(0.001)
            return files

        steps = []
        for number, step in enumerate(STEPS):
            await_all(f"{number}.{{rank}}")
            time.sleep(1.5 * slowest)  # until the packets of the step before are gone
            lab.mark()
            (folder / f"{number}.go").touch()
            done = [json.loads(file.read_text()) for file in await_all(f"{number}.{{rank}}.done")]
            steps.append((step, lab.trips() / 2, done))
        for rank in ranks:
            if rank.wait(LIMIT) != 0:
                raise Failed(f"a rank failed at its end:\n{text()}")
        return steps, text()


# ------------------------------------------------------------------------ ranks


def take_steps(folder: Path) -> Iterator[None]:
    """Be a rank that makes groups step by step, each of which begins on all ranks at once.

    Ranks wait for each other in files, not over the network: before step S, rank R makes `S.R`, and
    waits for `S.go`; after it, it writes the step's result into `S.R.done`.
    """
    yield from ()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    made: dict[str, Any] = {}

    def reduce(group: str = "") -> list[float]:
        x = torch.arange(4, dtype=torch.float32) + rank
        made[group].allreduce([x]).wait()
        return x.tolist()

    def init() -> None:
        dist.init_process_group("pycomm", timeout=timedelta(seconds=120))
        made[""] = dist.group.WORLD

    def make(name: str) -> None:
        everyone = list(range(size))
        if name == "new_group":
            made[name] = dist.new_group(everyone)
        else:
            made[name] = made[""].split_group(everyone, group_name=name)

    def form(uuid: int) -> None:
        if uuid == 1 or (uuid == 3 and rank == size - 1):
            made["former"] = made.get("reconfigure")
            options = load_c10d().Options()
            options.enable_reconfigure, options.group_name = True, "elastic"  # without members yet
            made["reconfigure"] = load_c10d().Backend(dist.HashStore(), 0, 1, options, "elastic")
        # Handles travel in files, as an agent of the cluster may bring them.
        elastic = made["reconfigure"]
        handle = folder / f"handle.{uuid}.{rank}"
        fresh = folder / f"{handle.name}.new"
        fresh.write_text(elastic.handle())
        fresh.rename(handle)
        files = [folder / f"handle.{uuid}.{r}" for r in range(size)]
        while not all(file.exists() for file in files):
            time.sleep(0.0005)
        elastic.form(uuid, [file.read_text() for file in files], timedelta(seconds=120))

    def take(step: str) -> Any:
        if "operation" in step:
            return reduce(step.partition(" of ")[2])
        if step in FORMED:
            return form(1 + FORMED.index(step))
        if step.endswith("_group"):
            return make(step)
        return init() if step == "init" else dist.destroy_process_group()

    # As under torchrun the store runs before the ranks come: a rank that does not find it yet would
    # try again, and that would count.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    server = None
    if rank == 0:
        port = int(os.environ["MASTER_PORT"])
        server = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    for number, step in enumerate(STEPS):
        (folder / f"{number}.{rank}").touch()
        while not (folder / f"{number}.go").exists():
            time.sleep(0.0005)
        done = folder / f"{number}.{rank}.done"
        done.with_suffix(".new").write_text(json.dumps(take(step)))
        done.with_suffix(".new").rename(done)
    for name in ("former", "reconfigure"):
        if made.get(name) is not None:
            made[name].shutdown()
    del server
