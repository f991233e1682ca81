"""Backends of the benchmark: pycomm's core and backends of torch.distributed, in one process.

`pycomm` is the core without torch. `pycomm:ring` and the like fix the algorithm, and `pycomm-tls`
encrypts connections. `pycomm-torch` is pycomm's backend of torch.distributed, and `gloo` is torch's
own. Backends with `-shared` work on memory that the group has allocated, so that peers access it in
place.

On a GPU (`--device cuda`) `pycomm-torch` takes the way that pycomm chooses: kernels among peers, or
the host; `pycomm-host` goes by way of the host, `nccl` is torch's own, and `pycomm-nccl` codes what
NCCL moves. A call on a GPU is timed by the clock until the GPU has done it, and by events of the
GPU.
"""

from __future__ import annotations

import os
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import pycomm
import pycomm.backend  # registers the name, which installed packages do without this
from pycomm import _C, takeover
from pycomm.bench.common import accelerator
from pycomm.bench.ops import coded
from pycomm.bench.ops.operations import Case, Run, empty, neighbours, sendrecv
from pycomm.policy import Decision, Parameter
from pycomm.reduction import two_shot
from pycomm.reduction.bucket import Bucket
from pycomm.reduction.paths import chosen

CORE = ("pycomm", "pycomm-shared", "pycomm-tls")
ON_CPU = (
    *CORE,
    *("pycomm-torch", "pycomm-torch-shared", "gloo"),
    *(f"pycomm:{algo}" for algo in _C.ALGOS),
)
ON_DEVICE = ("pycomm-torch", "pycomm-host", "nccl", "pycomm-nccl")
"""Those of `--device cuda`."""
CPU = torch.device("cpu")
LIMIT = 60.0  # seconds for the first rank
UNKNOWN = ("uint32", "uint64")
"""types that Gloo and GPUs do not reduce or send"""


class Core:
    """The core's collectives, called without torch."""

    coded = coded.CORE
    """names of the operations that it runs with a codec"""

    def __init__(self, name: str, store: _C.Store, rank: int, ranks: int) -> None:
        self.name = name
        options = _C.CommunicatorOptions()
        options.group = f"bench-{name}"
        if ":" in name:
            options.algo = name.partition(":")[2]
        if name == "pycomm-tls":
            options.tls = "on"
        self.communicator: _C.Communicator = _C.Communicator(store, rank, ranks, options)

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a buffer."""
        if self.name != "pycomm-shared":
            return empty(numel, dtype)
        memory = self.communicator.allocate(numel * dtype.itemsize, _C.DType.uint8)
        return torch.frombuffer(memory, dtype=dtype)

    def refuses(self, case: Case) -> str:
        """Return why this backend cannot run the case; empty if it can."""
        return ""

    def prepare(self, case: Case, x: torch.Tensor, y: torch.Tensor, codec: str = "none") -> Run:
        """Return a callable that runs the operation once, from `x` to `y`, with all set-up done."""
        op, core, source, target = case.op, self.communicator, x.data_ptr(), y.data_ptr()
        if codec != "none":
            pieces = _pieces(case, codec)
            coded_call = core.run_coded
            return partial(coded_call, op.name, source, target, pieces, dtype=case.core_dtype)
        if op.name == "sendrecv":
            after, before = neighbours(case)
            send = partial(core.send, source, x.nbytes, after)
            return sendrecv(send, partial(core.recv, target, x.nbytes, before))
        how = case.core_redop if op.reduces else _C.ReduceOp.sum
        call = op.name, source, target, case.count, case.core_dtype, how, op.root
        return partial(core.run, *call)

    def explain(self, case: Case, codec: str = "none") -> str:
        """Return which algorithm runs a case, and why."""
        pieces = None if codec == "none" else _pieces(case, codec)
        return self.communicator.explain(case.op.name, case.size, pieces, case.core_dtype)

    def sent_bytes(self) -> int | None:
        """Return the bytes this rank has sent since the start; None if they are not counted."""
        return self.communicator.sent_bytes()

    def describe(self) -> str:
        return self.communicator.describe()

    def close(self) -> None:
        del self.communicator


def _pieces(case: Case, codec: str) -> _C.Pieces:
    pieces = _C.Pieces()
    pieces.add(case.count, _C.Codec(codec))
    return pieces


def in_torch(name: str) -> str:
    """Return the name in torch.distributed of a backend."""
    return "nccl" if name.endswith("nccl") else name.partition("-")[0]


class TimedRun:
    """Calls that are done when they return, and that events of the GPU time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seconds: list[float] = []

    def __call__(self) -> None:
        self._seconds.append(accelerator.seconds(self._run))

    def time(self) -> float:
        """Return the median of the calls by the GPU's clock, in us."""
        return 1e6 * statistics.median(self._seconds)


class Torch:
    """A backend of torch.distributed.

    Args:
        name: of the backend.
        group: its process group.
        device: of its tensors.
    """

    def __init__(self, name: str, group: Any, device: torch.device = CPU) -> None:
        self.name, self.group, self.device = name, group, device
        self.coded = coded.CORE if name.startswith("pycomm") else ()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device; shared: that of the group, where DDP keeps its buckets."""
        if self.device != CPU:
            return torch.empty(numel, dtype=dtype, device=self.device)
        if not self.name.endswith("-shared"):
            return empty(numel, dtype)
        backend = self.group._get_backend(self.device)
        shared: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=self.device)
        return shared

    def refuses(self, case: Case) -> str:
        if case.dtype in UNKNOWN and (self.name == "gloo" or self.device != CPU):
            return f"{self.name} has no {case.dtype}"
        if self.name == "gloo" and case.redop == "avg":
            return "gloo has no avg"
        if self.name == "pycomm-nccl" and case.op.name not in coded.CORE:
            return f"{self.name} codes {', '.join(coded.CORE)}"
        return ""

    def prepare(self, case: Case, x: torch.Tensor, y: torch.Tensor, codec: str = "none") -> Run:
        if codec == "none":
            run = case.op.torch(self.group, case, x, y)
        else:
            run = coded_run(self.group, case, x, y, codec)
        return run if self.device == CPU else TimedRun(run)

    def sent_bytes(self) -> int | None:
        if in_torch(self.name) != "pycomm":
            return None
        sent: int = self.group._get_backend(self.device).sent_bytes
        return sent

    def describe(self) -> str:
        shared = "" if self.device == CPU else accelerator.sharing(self.group.size())
        told = f"torch {torch.__version__} {in_torch(self.name)}"
        return ", ".join(filter(None, [told, shared]))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def coded_run(group: Any, case: Case, x: torch.Tensor, y: torch.Tensor, spec: str) -> Run:
    """Return one call of a coded collective by the path that hooks take on a group."""
    parameter = Parameter("values", (case.count,), x.dtype)
    rows = case.ranks if case.op.name == "reduce_scatter" else 1
    decision = Decision(parameter, pycomm.codec(spec), "the benchmark's")
    bucket = Bucket([decision], [0], None, x.device, rows=rows)
    tensors = (x,) if case.op.name == "all_reduce" else (y, x)
    native: Any = chosen(bucket, group, case.op.name, tensors[0]).native
    if native is not None:
        own = getattr(native, f"compressed_{case.op.name}")
        return lambda: own(*tensors, bucket.native, bucket.sides, seed=0, step=0).wait()
    call: Any = getattr(two_shot, case.op.name)
    how = {"seed": 0, "step": 0, "found_inf": tensors[0].new_zeros(1, dtype=torch.float32)}
    return lambda: call(*tensors, bucket, group, **how)


def torch_store(store: _C.Store, rank: int) -> dist.Store:
    """Return a store of torch, of which the first rank tells the others by another one."""
    master = os.environ["MASTER_ADDR"]
    port = 0 if rank == 0 else int(store.get("port of torch's store", LIMIT))
    found = dist.TCPStore(master, port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        store.set("port of torch's store", str(found.port))
    return found


Backend = Core | Torch


def connect(name: str, store: _C.Store, rank: int, ranks: int, device: str) -> Backend:
    """Connect to the other ranks in a backend, with tensors of the CPU or of this rank's GPU."""
    if name.partition(":")[0] in CORE:
        return Core(name, store, rank, ranks)
    place = CPU if device == "cpu" else accelerator.take(rank, ranks)
    with takeover.released():  # ignores PYCOMM_TAKEOVER
        if not dist.is_initialized():
            met = torch_store(store, rank)
            dist.init_process_group("gloo", store=met, rank=rank, world_size=ranks)
        options = accelerator.group(in_torch(name), place.type)
        if name == "pycomm-host":
            options["pg_options"] = pycomm.Options(device_path="host")
        return Torch(name, dist.new_group(**options), place)
