"""Run Horovod's own test_torch.py on `pycomm.horovod`: `make trainers HOROVOD=DIR`.

    torchrun --nproc-per-node 2 -m tests.trainers.horovod_suite DIR [NAME ...]

DIR is a checkout of Horovod's repository, of which only the tests are used. Each rank runs each
test; a test has passed if it has on all ranks. After a failure the ranks begin with a new group.
Rank 0 prints a line for each test, and the counts. The exit status is 1 if a test has failed that
EXCEPTIONS and ABSENT do not name, or one has passed that they do name.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import types
import unittest
import unittest.mock
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import pycomm.horovod as hvd

_ORDER = "Horovod negotiates the order of calls; here another order is an error"
_JOIN = "join is refused: torch.distributed.algorithms.Join"
_MUON = "torch.optim.Muon takes no bias: the test fails with this torch on Horovod, too"
EXCEPTIONS = {
    "test_broadcast_state": _MUON,
    "test_broadcast_state_no_grad": "broadcast_optimizer_state leaves gradients as they are",
    "test_broadcast_state_options": _MUON,
    "test_force_allreduce": _MUON,
    "test_horovod_allgather_duplicate_name_error": _ORDER,
    "test_horovod_allreduce_duplicate_name_error": _ORDER,
    "test_horovod_broadcast_duplicate_name_error": _ORDER,
    "test_horovod_join_allgather": _JOIN,
    "test_horovod_join_allreduce": _JOIN,
    "test_horovod_join_broadcast": _JOIN,
    "test_sparse_embeddings": "SparseAdam is refused: its gradients would have to travel sparse",
    "test_timeline_api": "the timeline is refused: PYCOMM_TRACE",
}
"""Tests that fail, with the reasons."""
ABSENT = ("alltoall", "grouped", "process_set", "reducescatter", "async_sparse")
"""Parts of the names of others that fail: these are torch.distributed's."""


def stand_in(folder: Path) -> None:
    """Let `import horovod.torch` find pycomm, and the tests' helpers what they import."""
    horovod = types.ModuleType("horovod")
    horovod.torch = hvd  # type: ignore[attr-defined]
    threads = types.ModuleType("horovod.runner.util.threads")
    threads.in_thread = None  # type: ignore[attr-defined]
    sys.modules |= {
        "horovod": horovod,
        "horovod.torch": hvd,
        "horovod.runner": types.ModuleType("horovod.runner"),
        "horovod.runner.util": types.ModuleType("horovod.runner.util"),
        "horovod.runner.util.threads": threads,
        "mock": unittest.mock,
        "cloudpickle": pickle,
    }
    sys.path.insert(0, str(folder / "test" / "parallel"))


def run(test: unittest.TestCase) -> tuple[str, str]:
    """Return what became of a test on this rank, and why."""
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    for _, text in [*result.errors, *result.failures]:
        return "failed", text.strip().splitlines()[-1]
    return "passed", ""


def main() -> int:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    stand_in(folder)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ |= {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(size)}
    warnings.simplefilter("ignore")
    import test_torch

    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, False, timedelta(minutes=5)
    )
    counts: Counter[str] = Counter()
    bad = []
    for test in unittest.TestLoader().loadTestsFromTestCase(test_torch.TorchTests):
        name = test.id().rpartition(".")[2]
        if names and name not in names:
            continue
        start = time.monotonic()
        outcome, why = run(test)
        key = f"horovod-suite/{name}"
        store.set(f"{key}/{rank}", f"{outcome} {why}")
        said = [store.get(f"{key}/{r}").decode() for r in range(size)]
        outcomes = [text.split()[0] for text in said]
        outcome = next(o for o in ("failed", "passed", "skipped") if o in outcomes)
        if outcome == "failed" and dist.is_initialized():
            hvd.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group()
        counts[outcome] += 1
        fails = name in EXCEPTIONS or any(part in name for part in ABSENT)
        if outcome == ("passed" if fails else "failed"):
            bad.append(name)
        if rank == 0:
            lines = [text for text in dict.fromkeys(said) if not text.startswith("passed")]
            print(f"{outcome:<8}{time.monotonic() - start:6.1f} s  {name}  {'; '.join(lines)}")
            sys.stdout.flush()
    if rank == 0:
        print(", ".join(f"{counts[o]} {o}" for o in ("passed", "failed", "skipped")))
        for name in bad:
            print(f"not as expected: {name}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if bad and not names else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
