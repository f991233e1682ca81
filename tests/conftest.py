"""Fixtures of all tests: the tiers, and the table of their counts that ends every run."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.extent import without_the_rest
from tests.torch.interpreter import SHARED, start_server, with_entry_point
from tests.torch.pool import Pool

# One thread for torch's own operations, as under torchrun: their threads would wait for each other
# on cores that workers, ranks and compilers share, which takes up to four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ranks of a test write to one file. Unbuffered, a line leaves in several parts, and another rank
# may write between them.
os.environ.pop("PYTHONUNBUFFERED", None)

# Without a GPU the Triton kernels run in its interpreter. Triton reads this when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

TIERS = ("unit", "contract", "PTX", "transports", "collectives", "process", "torch")
OUTCOMES = ("passed", "failed", "skipped")
FOLDERS = {
    "transports": "transports",
    "collectives": "collectives",
    "processes": "process",
    "faults": "process",
    "torch": "torch",
    "conformance": "torch",
    "trainers": "torch",
    "world": "process",
}
COUNTS: Counter[tuple[str, str]] = Counter()
SECONDS: Counter[str] = Counter()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders whose tests run when they are asked for: `make trainers`, `make world`."""
    words = config.invocation_params.args
    asked = any(collection_path.name in word for word in words)
    return True if collection_path.name in ("trainers", "world") and not asked else None


def pytest_configure(config: pytest.Config) -> None:
    """Start the server that forks torch's processes for all workers, before they start."""
    if getattr(config.option, "numprocesses", None) and SHARED not in os.environ:
        os.environ[SHARED] = start_server()


@pytest.fixture(autouse=True)
def _cores_are_given_back() -> Iterator[None]:
    """Fail a test that leaves its worker on fewer cores: all later tests would share them."""
    cores = os.sched_getaffinity(0)
    yield
    left = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    assert left == cores, "the test has left its thread on other cores than it had"


def pytest_collection(session: pytest.Session) -> None:
    """Rewrite the assertions of a share of the test files, while other workers rewrite the rest.

    All workers import all files in one order, so each would rewrite each file in a fresh tree.
    """
    if not getattr(session.config.option, "numprocesses", None):
        # Collection makes a million objects that stay: each search for garbage would visit them.
        gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    files: set[Path] = set()
    for arg in session.config.args:
        path = Path(arg.partition("::")[0]).resolve()
        files |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
    for file in sorted(files)[int(worker["workerid"][2:]) :: worker["workercount"]]:
        # Collection imports it once more, and reports what fails or skips the file.
        with suppress(Exception, pytest.skip.Exception):
            name = file.relative_to(session.config.rootpath).with_suffix("")
            importlib.import_module(".".join(name.parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the extent leaves out, and put the rest in order.

    Files whose tests mostly wait are spread over the others, which compute: one after the other,
    all workers would wait at once.
    """
    if not any("[" in argument for argument in config.args):  # who names a case wants that one
        items[:], others = without_the_rest(items)
        config.hook.pytest_deselected(items=others)
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(file_of(item.nodeid), []).append(item)
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for path in files:
        kinds[tier_of(path) in ("transports", "process")].append(path)
    place = {
        path: (number + 0.5) / len(paths)
        for paths in kinds.values()
        for number, path in enumerate(paths)
    }
    items[:] = [item for path in sorted(files, key=place.__getitem__) for item in files[path]]


def pytest_collection_finish() -> None:
    # A lab keeps all processors busy, so that times on its links are those of machines of their
    # own. Tests judge no such times, and would pay for those processors.
    labs = sys.modules.get("pycomm.bench.lab.base")
    if labs is not None:
        labs.Lab._keep_cores_busy = lambda lab: None
    # Half a million objects of torch stay to the end: no garbage collection needs to visit them.
    gc.freeze()
    gc.enable()


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@cache
def tier_of(file: str) -> str:
    """Return the tier of a test file: by its folder, or by its name if a folder holds several."""
    *folders, name = file.split("/")
    if name.startswith("test_contract"):
        return "contract"
    if name.startswith("test_ptx"):
        return "PTX"
    return next((FOLDERS[folder] for folder in folders if folder in FOLDERS), "unit")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    tier = tier_of(file_of(report.nodeid))
    SECONDS[tier] += report.duration
    # A test is counted once, by its call; a failing set-up or clean-up counts as a failure.
    if report.when == "call" or report.outcome != "passed":
        COUNTS[tier, report.outcome] += 1


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        COUNTS[tier_of(file_of(report.nodeid)), "failed"] += 1


def pytest_unconfigure(config: pytest.Config) -> None:
    """Print the table after everything else, so that the last line of all is the sum."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or config.option.collectonly or not COUNTS:
        return
    terminal.write_line("")
    terminal.write_line(f"{'tier':<12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for tier in TIERS:
        passed, failed, skipped = (COUNTS[tier, outcome] for outcome in OUTCOMES)
        terminal.write_line(f"{tier:<12}{passed:>8}{failed:>8}{skipped:>9}{SECONDS[tier]:>9.1f}")
    total = [sum(COUNTS[tier, outcome] for tier in TIERS) for outcome in OUTCOMES]
    terminal.write_line("{} passed, {} failed, {} skipped".format(*total))


# ------------------------------------------------------------------------- fixtures of torch's tier


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that are torch processes; see pool.py."""
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return a folder in which torch finds pycomm's entry point, as after an installation."""
    return with_entry_point(tmp_path)


@pytest.fixture(scope="module")
def fakes() -> Iterator[Pool]:
    """Start ranks with the simulated device, apart from others: it cannot be unloaded."""
    from tests.codecs.cuda import emulated
    from tests.torch.device import fake_device

    fake_device.built()
    emulated.all_kernels()  # compiled here, not within the deadline of a rank's answer
    pool = Pool()
    yield pool
    pool.stop()
