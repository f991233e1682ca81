"""Programs of a rank of test_hosts.py, in a network namespace that stands for its host.

python -m tests.processes.jobs check_all|step FOLDER
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from pycomm.communicator import Communicator
from pycomm.straggler.stats import rank_stats


def check_all(c: Communicator) -> None:
    """Check all collectives and messages by `==`; print how the rank is connected."""
    for numel in (1, 1000, 100_003):
        check_size(c, numel)
    print(c.describe())


def check_size(c: Communicator, numel: int) -> None:
    def values(rank: int, seed: int = 0) -> np.ndarray:
        return np.random.default_rng([seed, rank, numel]).integers(0, 9, numel).astype("f")

    every = np.stack([values(rank) for rank in range(c.size)])
    total = every.sum(0)

    x = values(c.rank)
    c.all_reduce(x)
    assert np.array_equal(x, total)

    parts = np.stack([values(c.rank, seed) for seed in range(c.size)])
    out = np.empty(numel, "f")
    c.reduce_scatter(parts, out)
    assert np.array_equal(out, sum(values(rank, c.rank) for rank in range(c.size)))

    gathered = np.empty((c.size, numel), "f")
    c.all_gather(values(c.rank), gathered)
    assert np.array_equal(gathered, every)

    exchanged = np.empty((c.size, numel), "f")
    c.all_to_all(parts, exchanged)
    assert np.array_equal(exchanged, np.stack([values(r, c.rank) for r in range(c.size)]))

    for root in range(c.size):
        x = values(c.rank)
        c.broadcast(x, root)
        assert np.array_equal(x, every[root])
        out = np.zeros(numel, "f")
        c.reduce(values(c.rank), out if c.rank == root else None, root=root)
        assert c.rank != root or np.array_equal(out, total)
        gathered = np.empty((c.size, numel), "f")
        c.gather(values(c.rank), gathered if c.rank == root else None, root)
        assert c.rank != root or np.array_equal(gathered, every)
        c.scatter(every if c.rank == root else None, out, root)
        assert np.array_equal(out, every[c.rank])

    outs = [np.empty(numel, "f") for _ in range(c.size)]
    requests = [c.recv(out, peer) for peer, out in enumerate(outs)]
    requests += [c.send(values(c.rank), peer) for peer in range(c.size)]
    for request in requests:
        request.wait()
    assert np.array_equal(np.stack(outs), every)
    c.barrier()


def step(c: Communicator) -> None:
    """Make a few all-reduces; print what the rank knows of them."""
    # The kernel's counts are noted about once a second, at the end of an operation.
    goes_on, start = np.ones(1, np.float32), time.monotonic()
    while goes_on[0] > 0:
        c.all_reduce(np.ones(100_000, np.float32))
        goes_on[0] = time.monotonic() - start < 1.8
        c.all_reduce(goes_on, "min")
    print(json.dumps(rank_stats(c.core.trace()).to_json()))


if __name__ == "__main__":
    with Communicator.from_env(sys.argv[2], timeout=30.0) as c:
        {"check_all": check_all, "step": step}[sys.argv[1]](c)
