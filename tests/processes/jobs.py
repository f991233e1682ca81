"""Programs of a rank of test_hosts.py, in a network namespace that stands for its host.

python -m tests.processes.jobs check_all|step FOLDER
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from pycomm.communicator import Communicator
from pycomm.straggler.compare import rank_stats
from tests.collectives.ways import check_everything, right


def check_all(c: Communicator) -> None:
    """Check all collectives and messages by `==`; print how the rank is connected."""
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
