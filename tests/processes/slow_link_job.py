"""Program of a rank of test_slow_link.py, in a network namespace that stands for its host: a few
all-reduces. Prints what the rank knows of them.

    python -m tests.processes.slow_link_job FOLDER
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from pycomm.communicator import Communicator
from pycomm.straggler.stats import rank_stats

with Communicator.from_env(sys.argv[1], timeout=30) as c:
    # The kernel's counts are noted about once a second, at the end of an operation.
    goes_on, start = np.ones(1, np.float32), time.monotonic()
    while goes_on[0] > 0:
        c.all_reduce(np.ones(100_000, np.float32))
        goes_on[0] = time.monotonic() - start < 1.8
        c.all_reduce(goes_on, "min")
    print(json.dumps(rank_stats(c.core.trace()).to_json()))
