"""Autoload: `import torch` alone registers the backend, and never fails because of it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.torch import interpreter

ROOT = Path(__file__).parents[3]


def run(code: str, *path: Path, **environment: str) -> str:
    """Return the output of a fresh interpreter that finds pycomm without an installation."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])),
            **environment,
        },
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def forked(code: str, *path: Path, loaded: bool = False, **environment: str) -> str:
    """Return the output of an interpreter that has imported torch without its entry points.

    With `loaded` it loads them before the code begins, as the last thing of `import torch`.
    """
    variables = {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), **environment}
    env = {**os.environ, **variables}
    done = interpreter.run("-c", code, env=env, cwd="/", autoload=loaded)
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
    assert run(code, installed).split() == ["False", "pycomm", "True"]


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
    assert forked(code, installed) == "{'pycomm._register'} 2.0"


def test_pyproject_names_the_entry_points():
    text = (ROOT / "pyproject.toml").read_text()
    for group in ("torch.backends", "torch.distributed.backends"):
        assert f'[project.entry-points."{group}"]\npycomm = "pycomm._autoload:register"' in text


def test_import_is_light_and_knows_the_version():
    code = "import sys, pycomm; light = len(dir(pycomm)) > 5 and 'torch' not in sys.modules"
    light, version = run(f"{code}; print(light, pycomm.__version__)").split()
    assert light == "True"
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()


def test_import_order_does_not_matter():
    names = "import torch.distributed as d; print(d.Backend('pycomm'))"
    assert forked(f"import torch, pycomm; {names}").endswith("pycomm")
    assert run(f"import pycomm.backend; {names}").endswith("pycomm")


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


def test_takeover_by_environment(installed):
    for given, said in (
        ("gloo, nccl", ["True", "gloo", "pycomm"]),
        ("", ["False", "gloo", "gloo"]),
    ):
        assert forked(TAKEOVER, installed, loaded=True, PYCOMM_TAKEOVER=given).split() == said


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
    said = run(code, installed, PYCOMM_TAKEOVER="mpi", PYCOMM_RUN="--codec int4")
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


def test_of_two_variables_the_right_one_counts(installed):
    """Another test has a wrong name of a backend beside the right options."""
    given = {"PYCOMM_TAKEOVER": "gloo", "PYCOMM_RUN": "--codec 'int4"}
    said = forked(TAKEOVER, installed, loaded=True, **given)
    assert said.split() == ["True", "gloo", "pycomm"]
