"""`python -m pycomm.bench.gpu` with less work: for the stand-in, whose operations take a while."""

from __future__ import annotations

import os
import sys

from pycomm.bench.gpu import __main__ as gpu
from pycomm.bench.gpu import checks

STEP = ("--model", "tiny", "--paced", "--rate", "1gbit", "--turn-seconds", "0.05")
gpu.WORDS |= {
    "step": (*gpu.WORDS["step"], *STEP, "--methods", "exact,sign"),
    "collectives": (*gpu.WORDS["collectives"], "-b", "4K", "-e", "4K", "-n", "5"),
    "optimizer": ("training", "--only", "optimizer", "--models", "tiny"),
    "trace": (*gpu.WORDS["trace"], *STEP),
}
checks.PARTS, checks.SANITIZERS = ("sign",), ("memcheck",)
# They have devices of their own, in processes that test_operations.py and test_exact.py start.
checks.RANKS = ()

os.sched_getaffinity = lambda process: {0}  # type: ignore[assignment] # one pytest a suite
gpu.STAGES = {name: (20, stage) for name, (_, stage) in gpu.STAGES.items()}  # a busy machine

if __name__ == "__main__":
    sys.exit(gpu.main(sys.argv[1:]))
