"""Judged tests of the suite: those that say something about a CPU backend, with their outcomes.

`results.csv.xz` holds the last full run (`make conformance`) of pycomm and, in the same run, of
Gloo. docs/conformance.md lists the exceptions.
"""

from __future__ import annotations

import csv
import lzma
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results.csv.xz"

# Tests that no backend can pass with CPU tensors, or not here.
NOT_ON_CPU = {
    "SyncBatchNorm wants modules on a GPU": [
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
        "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
        "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
        "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_ddp_inference",
        "test_ddp_sync_bn_training_vs_eval",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
        "test_sync_bn_logged",
    ],
    "looks at CUDA device numbers": ["test_ddp_device", "test_ddp_logging_data_gpu"],
    "DDP's own mixed precision needs device events": [
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    ],
    "wants NCCL itself": [
        "test_monitored_barrier_allreduce_hang",
        "test_monitored_barrier_allreduce_hang_wait_all_ranks",
        "test_nccl_high_priority_stream",
    ],
    "takes minutes on a CPU": ["test_ddp_uneven_inputs"],
    "wants torchvision": ["test_SyncBatchNorm_process_group"],
}
NOT_JUDGED = {test: reason for reason, tests in NOT_ON_CPU.items() for test in tests}

# Tests in which torch itself compares the backend's name: no backend from elsewhere passes them.
BOUND_TO_A_NAME = {
    "test_ddp_logging_data_cpu": "torch calls every backend from elsewhere 'custom'",
}


@dataclass(frozen=True)
class Row:
    """One line of the results."""

    like: str
    world_size: int
    backend: str
    test: str
    status: str
    seconds: float
    reason: str

    @property
    def key(self) -> tuple[str, int, str]:
        """What the outcomes of several backends are compared by."""
        return self.like, self.world_size, self.test


def read(path: Path = RESULTS) -> list[Row]:
    """The committed outcomes."""
    with lzma.open(path, "rt", newline="") as file:
        return [
            Row(**row | {"world_size": int(row["world_size"]), "seconds": float(row["seconds"])})
            for row in csv.DictReader(file)
        ]


def write(rows: list[Row], path: Path = RESULTS) -> None:
    """Write the outcomes, sorted."""
    with lzma.open(path, "wt", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row.__annotations__)
        for row in sorted(rows, key=lambda r: (r.like, r.world_size, r.backend, r.test)):
            writer.writerow(vars(row).values())


def worse(rows: list[Row], than: str = "gloo", backend: str = "pycomm") -> list[Row]:
    """Rows of `backend` that did not pass where `than` did: each is a bug."""
    passed = {row.key for row in rows if row.backend == than and row.status == "pass"}
    return [
        row
        for row in rows
        if row.backend == backend
        and row.status != "pass"
        and row.key in passed
        and row.test not in BOUND_TO_A_NAME
    ]
