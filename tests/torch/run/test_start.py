"""What ranks say at the start of a job, and how a program silences them."""

from __future__ import annotations

import io
import logging
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pycomm
from pycomm import log, takeover
from pycomm.backend import find
from pycomm.communicator import Communicator
from pycomm.env import REMOVED
from pycomm.errors import WireMismatch
from pycomm.log import ABOUT, logger, tell
from pycomm.policy import agreement
from tests.options import rows
from tests.ranks import run
from tests.torch import interpreter
from tests.torch.harness import check_sum
from tests.torch.pool import on_ranks

pytestmark = pytest.mark.timeout(300)  # ranks of two or three jobs start in a test

SCRIPT = """
import sys, torch, torch.distributed as dist, pycomm
dist.init_process_group(sys.argv[1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
pycomm.compress(model, "int8")
model(torch.ones(2, 64)).sum().backward()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Let this process be at its start, with no logging configured but pytest's, and no PYCOMM_."""
    for name in [name for name in os.environ if name.startswith("PYCOMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(log, "_begun", False)
    monkeypatch.setattr(log, "_warned", set())
    yield
    logger.setLevel(logging.NOTSET)


def leave_alone(monkeypatch) -> None:
    """Take away the handlers that pytest sets before each call: logging is not configured."""
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [log._standard_error])


def launched(folder: Path, backend: str = "pycomm", **env: str) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    said = interpreter.launch("train.py", backend, folder=folder, **env).splitlines()
    return [line.removeprefix("pycomm: ") for line in said if line.startswith("pycomm: ")]


# ------------------------------------------------------------------------------- one way of all


def test_messages_go_to_standard_error_alone(monkeypatch, capsys):
    leave_alone(monkeypatch)
    tell("int8 for 100 % of all")
    logger.warning("slow")
    captured = capsys.readouterr()
    assert captured.err == "pycomm: int8 for 100 % of all\npycomm: slow\n"
    assert captured.out == ""


def test_a_program_with_handlers_gets_all_messages(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="pycomm"):
        tell("int8 for 100 % of all")
    assert caplog.record_tuples == [("pycomm", logging.INFO, "int8 for 100 % of all")]
    assert capsys.readouterr().err == ""


def test_a_message_that_cannot_be_written_raises_nothing(monkeypatch):
    leave_alone(monkeypatch)
    with io.TextIOWrapper(open("/dev/full", "wb", 0), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        logger.warning("no space left")


@pytest.mark.parametrize("way", ["level", "disable", "filter", "variable"])
def test_a_program_silences_all_messages(way, capsys, monkeypatch):
    leave_alone(monkeypatch)
    if way == "level":
        logger.setLevel(logging.CRITICAL)
    elif way == "disable":
        monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    elif way == "filter":
        monkeypatch.setattr(logger, "filters", [lambda record: False])
    else:
        monkeypatch.setenv("PYCOMM_LOG", "off")
    monkeypatch.setenv("PYCOMM_SOKETS", "3")
    log.begin(0, "2 ranks: shm with 1", ("group", "shm"))
    logger.error("worse")
    assert capsys.readouterr().err == ""


def test_warnings_of_the_core_take_the_same_way(monkeypatch, capsys):
    leave_alone(monkeypatch)
    short = {"secret": "short", "tls": "off", "transport": "tcp"}
    run(2, lambda c: None, **short)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("pycomm: the secret has 5 ")]


# -------------------------------------------------------------------------------- at the start


def test_rank_0_says_at_the_start_what_it_runs_on(tmp_path):
    version = f"version {pycomm.__version__}, torch "
    (first, *others) = launched(tmp_path, PYCOMM_TRANSPORT="tcp", PYCOMM_SOCKETS="3")
    assert first.startswith(version)
    assert "rank 0 of 2 ranks: tcp to 1 by lo (127.0.0.1), 3 sockets" in first
    allowed = "policy: ", "feedback: ", "1 steps in "
    assert not [line for line in others if not line.startswith(allowed)]
    every = launched(tmp_path, PYCOMM_LOG="info")
    said = sorted(line.partition("; ")[2] for line in every if line.startswith(version))
    assert said == ["rank 0 of 2 ranks: shm with 1", "rank 1 of 2 ranks: shm with 0"]
    assert launched(tmp_path, PYCOMM_LOG="warning") == []


def test_a_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("PYCOMM_LOG", "loud")
    with pytest.raises(ValueError, match="PYCOMM_LOG='loud' is invalid: expected one of debug, "):
        log.begin(0, "", ())


@pytest.mark.parametrize(
    ("unread", "advice"),
    [
        ("SOKETS", "did you mean PYCOMM_SOCKETS? Else unset it"),
        # The nearest name says something else: a folder, or the secret itself.
        *((name, f"it was removed: {instead}") for name, instead in REMOVED.items()),
    ],
)
def test_a_variable_that_nothing_reads_is_named_once(monkeypatch, caplog, unread, advice):
    for name in (f"PYCOMM_{unread}", "PYCOMM_TEST_X", "PYCOMM_CUDA", "PYCOMM_SOCKETS"):
        monkeypatch.setenv(name, "3")
    for _ in range(2):
        log.begin(0, "", ("group", "tcp", "shm"))
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert said == f"nothing reads PYCOMM_{unread}: {advice}"


# --------------------------------------------------------------------- options that are ignored


@pytest.mark.parametrize("chosen", ["shm", "tcp"])
def test_each_option_that_a_group_ignores_is_named(chosen, monkeypatch, caplog):
    table = [row for row in rows() if row.name.startswith("PYCOMM_") and row.acts == "tcp"]
    assert len(table) > 6
    for row in table:
        monkeypatch.setenv(row.name, "5")
    log.begin(0, "2 ranks", ("group", chosen))
    said = {text.partition("=")[0] for text in caplog.messages if "no effect" in text}
    assert said == {row.name for row in table if row.acts != chosen}


def test_what_has_its_default_is_not_named(monkeypatch, caplog):
    monkeypatch.setenv("PYCOMM_CONGESTION", "auto")
    monkeypatch.setenv("PYCOMM_SOCKETS", "")
    log.begin(0, "2 ranks", ("group", "shm"))
    assert "no effect" not in caplog.text


def test_every_row_says_what_heeds_it():
    assert {row.acts for row in rows()} <= {*ABOUT, ""}
    assert all(row.acts in ("group", "tcp") for row in rows() if row.option)


def test_another_backend_ignores_what_is_pycomm_s(tmp_path):
    said = launched(tmp_path, "gloo", PYCOMM_LINK="200mbit", PYCOMM_IMPL="reference")
    assert "rank 0 of 2 ranks, by gloo" in said[0]
    assert said[1] == (
        "PYCOMM_LINK=200mbit has no effect here (2 ranks, by gloo): it is for groups of the "
        "backend pycomm"
    )
    assert not [line for line in said[2:] if "no effect" in line]


def test_a_codec_in_the_core_ignores_pycomm_impl(tmp_path):
    said = [line for line in launched(tmp_path, PYCOMM_IMPL="reference") if "no effect" in line]
    assert len(said) == 1
    assert said[0].startswith("PYCOMM_IMPL=reference has no effect here (core (coded and ")
    assert not [line for line in launched(tmp_path, PYCOMM_IMPL="native") if "effect" in line]


# ------------------------------------------------------------------------------------- versions


def test_ranks_of_other_versions_do_not_compress(monkeypatch):
    group = type("Group", (), {"size": lambda self: 2, "rank": lambda self: 0})()

    def gathered(mine, _):
        ((version, *options),) = mine
        assert version == f"pycomm {pycomm.__version__}"
        return [mine, [["pycomm 9.9.9", *options]]]

    monkeypatch.setattr(agreement, "gather_json", gathered)
    with pytest.raises(WireMismatch, match=r"rank 1 runs pycomm 9\.9\.9; install the same version"):
        agreement.agree_on_options(["codec int8"], group)
    assert Communicator(None, 0, 1).size == 1


# ----------------------------------------------------------------------------------------- takeover
# Hard-coded backend names get pycomm, and look as if they had got what they asked for.


@contextmanager
def taken(*names: str) -> Iterator[None]:
    """Names are taken over within it; ranks of the pool outlive it."""
    takeover.install(names)
    try:
        yield
    finally:
        takeover._taken.clear()


def looks(group: dist.ProcessGroup | None = None) -> tuple[Any, ...]:
    """All the ways by which a library may ask what a group is."""
    group = group or dist.group.WORLD
    return (
        dist.get_backend(group),
        dist.get_backend_config(group),
        sorted(map(str, group._device_types)),
        dist.distributed_c10d._get_object_coll_device(group),
    )


@on_ranks(2, backend=None)
def test_gloo(rank, size, store):
    def start(name: str, **options: Any) -> None:
        keys = dist.PrefixStore(name, store)  # torch counts its groups from 0 again
        dist.init_process_group("gloo", store=keys, rank=rank, world_size=size, **options)

    start("plain")
    as_gloo = looks()
    assert find() is None
    dist.barrier()  # Gloo hangs on a rank that still connects while another leaves
    dist.destroy_process_group()
    with taken("gloo"):
        start("taken", pg_options=dist.ProcessGroupGloo._Options())  # only pycomm's count
        assert find() is not None
        assert looks() == as_gloo
        check_sum()
        dist.monitored_barrier()

        # Lightning waits for rank 0 in this way.
        for_ever = dist.new_group(backend="gloo", timeout=timedelta(days=10000))
        for_ever.monitored_barrier()
        assert looks(for_ever) == as_gloo
        assert find(for_ever) is not None

        by_tcp = dist.new_group(backend="gloo", pg_options=pycomm.Options(transport="tcp"))
        assert "tcp" in find(by_tcp).describe()

        half = dist.new_group([1])
        if rank == 1:
            assert looks(half) == as_gloo
            check_sum(half)

        with takeover.released():
            own = dist.new_group(backend="gloo")
        assert isinstance(own._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        assert find(own) is None
        check_sum(own)
        check_sum()


@on_ranks(2, backend=None)
def test_other_names(rank, size, store):
    with taken("gloo", "nccl"):
        for asked in ("nccl", None, "cpu:gloo,cuda:nccl", "cpu:gloo", "pycomm"):
            dist.init_process_group(asked, store=store, rank=rank, world_size=size)
            assert dist.get_backend() == (asked or "undefined")  # as torch calls it
            assert find() is not None
            check_sum()
            check_sum(dist.new_group())
            objects = [None] * size
            dist.all_gather_object(objects, rank)
            assert objects == list(range(size))
            dist.destroy_process_group()
    with taken("nccl"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        assert find() is None
        dist.barrier()  # Gloo's ranks do not wait for each other when they connect


@on_ranks(2, backend=None)
def test_detailed_debugging_checks_over_the_real_gloo(rank, size, store):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with taken("gloo"):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            assert find() is not None
            check_sum()
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


@on_ranks(4, backend=None)
def test_device_mesh(rank, size, store):
    with taken("gloo"):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"tp": "gloo"}
        )
        for name in ("dp", "tp"):
            group = mesh[name].get_group()
            assert dist.get_backend(group) == "gloo"
            assert find(group) is not None
            check_sum(group)


@pytest.mark.parametrize("name", ["mpi", "fake", "undefined", "pycomm", "cpu:gloo", ""])
def test_names_that_cannot_be_answered_for(name):
    with pytest.raises(ValueError, match=r"cannot answer for|is not the name of a backend"):
        takeover.install(["gloo", name])
    assert takeover._taken == set()


# ----------------------------------------------------------------------------------------- autoload
# Autoload: `import torch` alone registers the backend, and never fails because of it.


ROOT = Path(__file__).parents[3]


def forked(
    code: str, *path: Path, loaded: bool = False, fresh: bool = False, **environment: str
) -> str:
    """Return the output of an interpreter that has imported torch without its entry points.

    With `loaded` it loads them before the code begins, as the last thing of `import torch`; with
    `fresh` nothing is imported.
    """
    variables = {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), **environment}
    options = {} if fresh else {"autoload": loaded}
    done = interpreter.run("-c", code, variables=variables, cwd="/", fresh=fresh, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def in_each(values: tuple[str, ...], code: str, *path: Path) -> list[str]:
    """Run code in a process for each value, which is `each` there; return their lines.

    Each process has imported torch without its entry points, and not pycomm.
    """
    loop = f"""
import os, sys
for each in {values!r}:
    child = os.fork()
    if child == 0:
{textwrap.indent(code, " " * 8)}
        sys.stdout.flush()
        os._exit(0)  # without the end of an interpreter, which takes as long as all before
    assert os.waitpid(child, 0)[1] == 0
"""
    return forked(loop, *path).splitlines()


def test_backend_is_known_without_importing_pycomm(installed):
    code = """
import sys
import torch.distributed as dist
print("pycomm.backend" in sys.modules)
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend(), "pycomm.backend" in sys.modules)
dist.destroy_process_group()
"""
    assert forked(code, installed, fresh=True).split() == ["False", "pycomm", "True"]


def test_import_torch_survives_a_failing_registration(installed):
    code = """
import torch, pycomm._autoload
called = []
def fail(name):
    called.append(name)
    raise RuntimeError('as if torch had changed')
pycomm._autoload.import_module = fail
torch._import_device_backends()  # the last thing of an import
print(set(called), torch.ones(2).sum().item())
"""
    assert forked(code, installed) == "{'torch.distributed'} 2.0"


def test_pyproject_names_the_entry_points():
    text = (ROOT / "pyproject.toml").read_text()
    for group in ("torch.backends", "torch.distributed.backends"):
        assert f'[project.entry-points."{group}"]\npycomm = "pycomm._autoload:register"' in text


def test_import_is_light_and_knows_the_version():
    code = "import sys, pycomm; light = len(dir(pycomm)) > 5 and 'torch' not in sys.modules"
    light, version = forked(f"{code}; print(light, pycomm.__version__)", fresh=True).split()
    assert light == "True"
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()


def test_import_order_does_not_matter():
    names = "import torch.distributed as d; print(d.Backend('pycomm'))"
    assert forked(f"import torch, pycomm; {names}").endswith("pycomm")
    assert forked(f"import pycomm.backend; {names}", fresh=True).endswith("pycomm")


def test_compress_is_imported_as_a_function():
    ways = (
        "import pycomm; f = pycomm.compress",
        "from pycomm import compress as f",
        "import pycomm.compression; f = pycomm.compress",
    )
    code = "exec(each, found := {}); print(callable(found['f']))"
    assert in_each(ways, code) == ["True"] * 3


TAKEOVER = """
import sys, warnings, torch, torch.distributed as dist
print("pycomm.takeover" in sys.modules)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend(), dist.group.WORLD._get_backend(torch.device("cpu")).name())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"PYCOMM_TAKEOVER": "gloo, nccl"}, ["True", "gloo", "pycomm"]),
        ({"PYCOMM_TAKEOVER": ""}, ["False", "gloo", "gloo"]),
        # The other one is wrong; another test has a wrong name of a backend beside right options.
        ({"PYCOMM_TAKEOVER": "gloo", "PYCOMM_RUN": "--codec 'int4"}, ["True", "gloo", "pycomm"]),
    ],
)
def test_takeover_by_environment(installed, given, said):
    assert forked(TAKEOVER, installed, loaded=True, **given).split() == said


CAUGHT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    import torch
    MORE
print(*(w.message for w in caught if 'pycomm' in str(w.message)))
"""


def test_import_torch_survives_a_wrong_variable(installed):
    """Here torch is imported, so that not all of it is there yet when the variables are read."""
    code = CAUGHT.replace("MORE", "pass") + TAKEOVER.replace(
        "dist.destroy",
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "print([hook.__name__ for hook, _ in model._comm_hooks])\ndist.destroy",
    )
    given = {"PYCOMM_TAKEOVER": "mpi", "PYCOMM_RUN": "--codec int4"}
    said = forked(code, installed, fresh=True, **given)
    warned, *said = said.splitlines()
    assert "cannot answer for the backend 'mpi'" in warned
    assert said == ["True", "gloo pycomm", "['compress_hook']"]


def test_import_torch_survives_wrong_variables(installed):
    wrongs = {
        "--codec int9": "unknown codec 'int9'",
        "--codc int4": "unrecognized arguments: --codc int4",
        "int4": "unrecognized arguments: int4",
        "--codec": "expected one argument",
        "--codec 'int4": "No closing quotation",
    }
    # These are the last thing of an import.
    code = CAUGHT.replace("MORE", "torch._import_device_backends()")
    lines = in_each(tuple(wrongs), "os.environ['PYCOMM_RUN'] = each" + code, installed)
    for (text, wrong), said in zip(wrongs.items(), lines, strict=True):
        assert f"PYCOMM_RUN={text!r} has no effect: " in said
        assert wrong in said
        assert said.endswith('such as PYCOMM_RUN="--codec int4"')
