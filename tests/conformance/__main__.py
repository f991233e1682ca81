"""`make conformance`: PyTorch's own DistributedTest suite against pycomm and Gloo, and the page
docs/conformance.md.

    python -m tests.conformance --world-size 2,3,4              all, both backends; writes the page
    python -m tests.conformance --backend pycomm -k barrier     a few; writes nothing

Ends 1 if Gloo passes a test that pycomm does not.

The suite ships in the torch wheel, and was written for gloo, nccl, ucc and mpi: its tests decide by
the backend's *name* whether they run. `load` makes it believe: `BACKEND` becomes a string that
keeps its own value but also equals `like`, and the suite's lists of names learn the new one. With
that, the tests that torch runs for MPI only (list all_to_all on the CPU), with eight ranks only, or
with GPUs only run as well; the last ones on CPU tensors: devices change, the maths does not.

Every test runs in processes of its own, forked from one that has imported torch and nothing more.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "conformance.md"


@dataclass(frozen=True)
class Config:
    """What to judge, and how."""

    backend: str
    world_size: int
    like: str = "gloo"  # the known backend whose place it takes: "gloo" or "nccl"
    seconds: int = 60  # that one test may take


class Alias(str):
    """A string that is itself and also equals other names; it hashes like the first of them."""

    names: tuple[str, ...]

    def __new__(cls, value: str, *names: str) -> Alias:
        self = super().__new__(cls, value)
        self.names = names
        return self

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (isinstance(other, str) and str(other) in self.names)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.names[0])


def load(config: Config) -> type[unittest.TestCase]:
    """Import the suite as `config` says. Once per process: its decorators run at import."""
    os.environ |= {
        "BACKEND": config.backend,
        "WORLD_SIZE": str(config.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "TEMP_DIR": tempfile.gettempdir(),
        "INIT_METHOD": "file:///unused",
    }
    import torch
    from torch.testing._internal import common_distributed

    torch.set_num_threads(1)
    names = common_distributed.DistTestCases
    for feature in [*names.backend_feature.values(), *names.skip_collective.values()]:
        if config.like in feature:
            feature.add(config.backend)
    names.backend_feature["plugin"].add(config.backend)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.TIMEOUT_DEFAULT = config.seconds
    common_distributed.skip_if_small_worldsize = lambda test: test
    open_gates(common_distributed)

    with _environment_reads("BACKEND", Alias(config.backend, config.like, "mpi")):
        from torch.testing._internal.distributed import distributed_test
    # Which tests there are was decided at import; inside them we behave like a CPU backend.
    distributed_test.BACKEND = Alias(config.backend, "gloo")
    if config.backend != "gloo":
        _open_monitored_barrier()
    return _suite_class(distributed_test, config)


@contextlib.contextmanager
def _environment_reads(name: str, value: str) -> Any:
    """os.environ[name] gives `value`, whatever its class (the real environment holds plain str)."""
    real = type(os.environ)

    class Bent(real):  # type: ignore[misc, valid-type]
        def __getitem__(self, key: str) -> str:
            return value if key == name else super().__getitem__(key)

    os.environ.__class__ = Bent
    try:
        yield
    finally:
        os.environ.__class__ = real


def _open_monitored_barrier() -> None:
    """dist.monitored_barrier refuses every name but gloo; ask the group itself instead."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        if c10d._rank_not_in_group(group):
            return
        if timeout is None:
            timeout = c10d._get_default_timeout(c10d.get_backend(group))
        elif isinstance(timeout, float):
            timeout = c10d.timedelta(seconds=timeout)
        (group or c10d._get_default_group()).monitored_barrier(
            timeout, wait_all_ranks=wait_all_ranks
        )

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def _suite_class(distributed_test: Any, config: Config) -> type[unittest.TestCase]:
    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._spawn_processes()

        def tearDown(self) -> None:
            for process in self.processes:
                if process.is_alive():
                    process.kill()
                process.join()
            super().tearDown()
            with contextlib.suppress(OSError):
                os.unlink(self.file_name)

        def _spawn_processes(self) -> None:
            import torch.multiprocessing as mp

            self._start_processes(mp.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, file_name: str, pipe: Any, **kwargs: Any) -> None:
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
            super()._run(rank, test_name, file_name, pipe, **kwargs)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            test: Callable[..., Any] = getattr(self, test_name)

            @functools.wraps(test)
            def on_cpu(*args: Any, **kwargs: Any) -> Any:
                with for_rank(self.rank, config.backend):
                    return test(*args, **kwargs)

            setattr(self, test_name, on_cpu)
            super().run_test(test_name, parent_pipe)

    return Suite


# ------------------------------------------------------------------ CPU tensors


def open_gates(common_distributed: Any) -> None:
    """Drop the suite's checks for GPUs, before it is imported."""

    def let_through(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)  # the suite looks for __wrapped__
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return test(*args, **kwargs)

        return wrapper

    common_distributed.skip_if_no_gpu = let_through
    for gate in ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, gate, lambda *args, **kwargs: let_through)
    common_distributed.init_multigpu_helper = lambda world_size, backend: {
        rank: [rank] for rank in range(int(world_size))
    }


def for_rank(rank: int, ours: str) -> contextlib.AbstractContextManager[Any]:
    """In a rank's process: everything that names a CUDA device means the CPU."""
    import torch
    import torch.distributed as dist
    from torch.overrides import TorchFunctionMode

    cpu = torch.device("cpu")

    def moved(device: Any) -> Any:
        is_number = isinstance(device, int) and not isinstance(device, bool)
        is_name = isinstance(device, str) and device.startswith("cuda")
        is_device = isinstance(device, torch.device) and device.type == "cuda"
        return cpu if is_number or is_name or is_device else device

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if "device" in kwargs:
                kwargs["device"] = moved(kwargs["device"])
            if func is torch.Tensor.to and len(args) > 1:
                args = (args[0], moved(args[1]), *args[2:])
            return func(*args, **kwargs)

    class NoStream:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: None

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: rank
    torch.cuda.current_stream = torch.cuda.device = torch.cuda.stream = nothing
    torch.cuda.Stream = lambda *args, **kwargs: NoStream()
    torch.accelerator.current_stream = lambda *args, **kwargs: NoStream()

    module_to, new_group = torch.nn.Module.to, dist.new_group
    torch.nn.Module.to = lambda self, *args, **how: module_to(
        self, *map(moved, args), **{name: moved(value) for name, value in how.items()}
    )
    torch.nn.Module.cuda = lambda self, *args, **how: self
    # Some tests ask for a second group by that very name.
    dist.new_group = lambda *args, **how: new_group(
        *args, **how | ({"backend": ours} if how.get("backend") == "nccl" else {})
    )
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp_init = ddp.__init__
    ddp.__init__ = lambda self, module, device_ids=None, output_device=None, *args, **how: ddp_init(
        self, module, None, None, *args, **how
    )
    return OnCpu()


# --------------------------------------------------------------------------- one test after another
# A `Runner` keeps one server process that has imported torch and the suite; for each test that
# process forks the ranks, so a test does not pay for the import.


@dataclass(frozen=True)
class Outcome:
    """How one test ended: "pass", "fail", "timeout" or "skip", and why."""

    test: str
    status: str
    seconds: float
    reason: str = ""  # one line
    detail: str = ""  # tracebacks of the ranks


class Runner:
    """Runs tests: `Runner(Config("pycomm", 2), log).run("test_x")`."""

    def __init__(self, config: Config, log: Path) -> None:
        """What the ranks print goes to the file `log`."""
        self.config = config
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("ab") as sink:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.conformance", "--serve", json.dumps(asdict(config))],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        self.names: list[str] = self._answer()

    def run(self, test: str) -> Outcome:
        """Run one test on all ranks."""
        self._server.stdin.write(test + "\n")
        self._server.stdin.flush()
        return Outcome(**self._answer())

    def _answer(self) -> Any:
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of {self.config} died; see its log")
        return json.loads(line)

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


def _run(suite: type[unittest.TestCase], test: str) -> Outcome:
    case, result, start = suite(test), unittest.TestResult(), time.monotonic()
    case.run(result)
    seconds = round(time.monotonic() - start, 2)
    if result.skipped:
        return Outcome(test, "skip", seconds, result.skipped[0][1])
    for _, text in result.failures + result.errors:
        status = "timeout" if "terminated or timed out after" in text else "fail"
        return Outcome(test, status, seconds, _last_error(text), text[-6000:])
    if result.unexpectedSuccesses:
        return Outcome(test, "fail", seconds, "was expected to fail and did not")
    return Outcome(test, "pass", seconds)


def _last_error(text: str) -> str:
    """The line of a traceback that names the error, of the first rank that had one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        kind, separator, _ = line.partition(": ")
        is_error = kind.replace(".", "").replace("_", "").isalnum() and kind.endswith(
            ("Error", "Exception", "Timeout", "Lost", "Mismatch")
        )
        if separator and is_error and "exited with error code" not in line:
            return line[:300]
    return lines[-1][:300] if lines else ""


def serve(config: Config) -> None:
    """Answer with all names, then with one outcome for each name that is asked for."""
    # Only the answers go to our standard output; what ranks print goes to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    suite = load(config)
    suite.setUpClass()
    print(json.dumps(sorted(n for n in dir(suite) if n.startswith("test"))), file=answers)
    for line in sys.stdin:
        print(f"\n===== {line.strip()}", flush=True)
        print(json.dumps(asdict(_run(suite, line.strip()))), file=answers)


# ------------------------------------------------------------------------------------------ results
# `results.csv.xz` holds the last full run (`make conformance`) of pycomm and, in the same run, of
# Gloo. docs/conformance.md lists the exceptions.


RESULTS = HERE / "results.csv.xz"

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


# ------------------------------------------------------------------ the command


def judge(config: Config, log: Path, wanted: list[str], only: set[str] | None) -> list[Row]:
    """Run the suite in one configuration, and print every test that does not pass."""
    rows = []
    with contextlib.closing(Runner(config, log)) as runner:
        for test in runner.names:
            if (wanted and not any(w in test for w in wanted)) or (only and test not in only):
                continue
            if test in NOT_JUDGED:
                status, seconds, reason = "n/a", 0.0, NOT_JUDGED[test]
            else:
                outcome = runner.run(test)
                status, seconds, reason = outcome.status, outcome.seconds, outcome.reason
                if status in ("fail", "timeout"):
                    print(f"  {status} {test}: {reason}", flush=True)
            reason = " ".join(reason.split())
            rows.append(
                Row(config.like, config.world_size, config.backend, test, status, seconds, reason)
            )
    counts = {s: sum(row.status == s for row in rows) for s in ("pass", "fail", "timeout", "skip")}
    seconds = sum(row.seconds for row in rows)
    print(f"{config}: {counts}, {seconds:.0f} s", flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)  # of `Runner`
    parser.add_argument("--world-size", default="2,3,4")
    parser.add_argument("--backend", default="pycomm,gloo")
    parser.add_argument("--like", default="gloo,nccl", help="known backends whose place they take")
    parser.add_argument("-k", action="append", default=[], help="part of a test's name; repeatable")
    parser.add_argument("--log", type=Path, help="what the ranks print; kept if given")
    parser.add_argument(
        "--results", type=Path, help="file to write, as results.csv.xz; default: the committed one"
    )
    given = parser.parse_args(arguments)
    if given.serve:
        serve(Config(**given.serve))
        return 0
    log = given.log or Path(tempfile.mkstemp(suffix=".log")[1])
    print(f"what the ranks print: {log}")

    rows: list[Row] = []
    for world_size in map(int, given.world_size.split(",")):
        # Reserved for NCCL: what torch skips in Gloo's place and has for NCCL's.
        reserved = set()
        for like in given.like.split(","):
            for backend in given.backend.split(","):
                config = Config(backend, world_size, like)
                only = reserved if like == "nccl" and reserved else None
                rows += judge(config, log, given.k, only)
            if like == "gloo":
                reserved = {row.test for row in rows if row.status == "skip"}
    everything = parser.parse_args([])
    if given.results:
        write(rows, given.results)
    elif all(vars(given)[k] == vars(everything)[k] for k in ("world_size", "backend", "like", "k")):
        write(rows)
        write_page(read())
    bugs = worse(rows)
    for row in bugs:
        print(f"Gloo passes and pycomm does not: {row}")
    return 1 if bugs else 0


# ------------------------------------------------------------------ the page


INTRODUCTION = """\
# Conformance

PyTorch tests its own backends with a suite of 285 tests that ships in the wheel
(`torch/testing/_internal/distributed/distributed_test.py`). `make conformance` runs it against
pycomm and Gloo, and writes this page; `tests/conformance/results.csv.xz` has every test.

The suite decides by the *name* of the backend which tests run. pycomm and Gloo take Gloo's place
and then NCCL's (on CPU tensors), with the tests that torch keeps for MPI and for eight ranks. Tests
are counted on 2, 3 and 4 ranks together.

| torch | in the place of | tests | pycomm passes | Gloo passes |
| --- | --- | --- | --- | --- |
"""


def write_page(rows: list[Row]) -> None:
    """Write the page. `rows` are a full run of both backends, on this torch."""
    import torch

    runs = {torch.__version__.partition("+")[0]: rows}
    for path in sorted(HERE.glob("results-*.csv.xz")):
        runs[path.name.removeprefix("results-").removesuffix(".csv.xz")] = read(path)
    lines = [line for version, found in runs.items() for line in _lines(version, found)]
    parts = [INTRODUCTION + "\n".join(lines) + "\n"]
    if bugs := [row for found in runs.values() for row in worse(found)]:
        parts.append(_list("Gloo passes, pycomm does not", bugs))
    else:
        parts.append("Every test that Gloo passes, pycomm passes.\n")
    missed = []
    for found in runs.values():
        gloo = {r.key for r in found if r.backend == "gloo" and r.status == "pass"}
        failed = [r for r in found if r.backend == "pycomm" and r.status in ("fail", "timeout")]
        missed += [r for r in failed if r.key not in gloo]
    parts.append(_list("Neither passes", missed))
    parts.append(_not_judged())
    PAGE.write_text("\n".join(parts))


def _lines(version: str, rows: list[Row]) -> list[str]:
    """Return the table's lines of one torch: what passed, of what was not skipped."""
    counts = Counter((r.like, r.backend, r.status) for r in rows)
    lines = []
    for like in sorted({r.like for r in rows}):
        passed = [counts[like, backend, "pass"] for backend in ("pycomm", "gloo")]
        failed = sum(counts[like, "pycomm", status] for status in ("fail", "timeout"))
        cells = version, like, passed[0] + failed, *passed
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _list(title: str, rows: list[Row]) -> str:
    """One line per reason: what a test says there first, and the tests that say so."""
    first: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: (r.test, r.world_size)):
        first.setdefault(row.test, row)
    reasons: dict[str, list[str]] = {}
    for test, row in first.items():
        sizes = ", ".join(sorted({str(r.world_size) for r in rows if r.test == test}))
        said = row.reason[:60].replace("|", "/")
        reasons.setdefault(f"{said} | {sizes}", []).append(f"`{test}`")
    lines = [f"## {title}", "", "| says | ranks | tests |", "| --- | --- | --- |"]
    for reason, tests in reasons.items():
        more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        lines.append(f"| {reason} | {tests[0]}{more} |")
    return "\n".join(lines) + "\n"


def _not_judged() -> str:
    """Return the section of the tests that say nothing about a CPU backend."""
    counts = {why: len(tests) for why, tests in NOT_ON_CPU.items()}
    counts |= Counter(BOUND_TO_A_NAME.values())
    reasons = (f"{why} ({count})" for why, count in counts.items())
    return f"## Not judged\n\n{'; '.join(reasons)}.\n"


if __name__ == "__main__":
    sys.exit(main())
