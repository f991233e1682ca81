"""Program of a rank of test_hosts.py, in a network namespace that stands for its host: all
collectives and messages, checked by `==`. Prints how the rank is connected.

    python -m tests.processes.hosts_job FOLDER
"""

from __future__ import annotations

import sys

import numpy as np

from pycomm.communicator import Communicator


def check_all(c: Communicator, numel: int) -> None:
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


if __name__ == "__main__":
    with Communicator.from_env(sys.argv[1], timeout=30.0) as c:
        for numel in (1, 1000, 100_003):
            check_all(c, numel)
        print(c.describe())
