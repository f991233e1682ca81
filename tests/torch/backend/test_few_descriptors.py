"""A rank that has hardly a descriptor left: its group is made, or all learn at once why not."""

from __future__ import annotations

import json

from tests.torch.interpreter import run

RANKS = """
import contextlib, json, os, resource, signal, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
import pycomm._build, pycomm.backend, pycomm.straggler.monitor
pycomm._build.load_c10d()
options = {"timeout": timedelta(seconds=100)}

def keep(free):
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, highest + 20))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for fd in taken[len(taken) - free:]:
        os.close(fd)

def outcome(rank, port, free):
    signal.alarm(90)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, **options)
    store.set(f"here {rank}", "")
    store.get(f"here {1 - rank}")
    if free is not None:
        keep(free)
    start = time.monotonic()
    try:
        dist.init_process_group("pycomm", store=store, rank=rank, world_size=2, **options)
        x = torch.ones(4)
        dist.all_reduce(x)
        said = f"sum {x[0].item()}"
    except pycomm.Error as error:
        said = str(error).splitlines()[0]
    return time.monotonic() - start, said

for poor in range(2):
    for free in range(1, 5):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [os.pipe(), os.pipe()]
        for rank in range(2):
            if os.fork() == 0:
                said = outcome(rank, server.port, free if rank == poor else None)
                os.write(pipes[rank][1], json.dumps(said).encode())
                os._exit(0)
        said = []
        for reader, writer in pipes:
            os.close(writer)
            said.append(json.loads(os.read(reader, 1 << 16) or "null"))
        print(json.dumps([poor, free, said]), flush=True)
"""
SOON = 20.0
"""Seconds; the group's own deadline is 100."""


def test_a_group_is_made_or_all_learn_why_not():
    """With 3 left, rank 0 could make shared memory, but not accept who fetches it."""
    ended = run("-c", RANKS, timeout=200)
    cases = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(cases) == 8, ended.stderr
    for poor, free, said in cases:
        assert all(one and one[0] < SOON for one in said), (poor, free, said)
        texts = [text for _, text in said]
        fine = texts == ["sum 2.0"] * 2
        # Who has said why leaves at once, and may be seen to be gone before its words are read.
        assert fine or "Too many open files" in texts[poor], (poor, free, said)
        gone = f"rank {poor} died" in texts[1 - poor]
        assert fine or gone or "Too many open files" in texts[1 - poor], (poor, free, said)
