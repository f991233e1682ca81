"""Autoload: `import torch` alone registers the backend, and never fails because of it."""

from __future__ import annotations

import os
import subprocess
import sys
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


def forked(code: str, *path: Path, **environment: str) -> str:
    """Return the output of an interpreter that loads torch's entry points when it has begun."""
    variables = {"PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT])), **environment}
    done = interpreter.run("-c", code, env={**os.environ, **variables}, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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
    (installed / "sitecustomize.py").write_text(
        "import pycomm._autoload\n"
        "def fail(name): raise RuntimeError('as if torch had changed')\n"
        "pycomm._autoload.import_module = fail\n"
    )
    assert run("import torch; print(torch.ones(2).sum().item())", installed) == "2.0"


def test_pyproject_names_the_entry_points():
    text = (ROOT / "pyproject.toml").read_text()
    for group in ("torch.backends", "torch.distributed.backends"):
        assert f'[project.entry-points."{group}"]\npycomm = "pycomm._autoload:register"' in text


def test_import_pycomm_is_light():
    assert run("import sys, pycomm; print('torch' in sys.modules, len(dir(pycomm)) > 5)") == (
        "False True"
    )


def test_the_version_is_that_of_pyproject():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{run("import pycomm; print(pycomm.__version__)")}"\n' in text


def test_import_order_does_not_matter():
    for first in ("import torch, pycomm", "import pycomm.backend"):
        code = first + "; import torch.distributed as d; print(d.Backend('pycomm'))"
        assert run(code).endswith("pycomm")


def test_compress_is_a_function_whichever_way_it_is_imported():
    for way in (
        "import pycomm; f = pycomm.compress",
        "from pycomm import compress as f",
        "import pycomm.compress; f = pycomm.compress",
        "from pycomm.compress import compress; import pycomm; f = pycomm.compress",
    ):
        assert forked(f"{way}; print(callable(f))") == "True"


TAKEOVER = """
import sys, warnings, torch, torch.distributed as dist
print("pycomm.takeover" in sys.modules)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend(), dist.group.WORLD._get_backend(torch.device("cpu")).name())
dist.destroy_process_group()
"""


def test_takeover_by_environment(installed):
    assert run(TAKEOVER, installed, PYCOMM_TAKEOVER="gloo, nccl").split() == [
        *("True", "gloo", "pycomm")
    ]
    assert run(TAKEOVER, installed, PYCOMM_TAKEOVER="").split() == ["False", "gloo", "gloo"]


def test_run_by_environment(installed):
    code = TAKEOVER.replace(
        "dist.destroy",
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "print([hook.__name__ for hook, _ in model._comm_hooks])\ndist.destroy",
    )
    said = run(code, installed, PYCOMM_RUN="--codec int4").split()
    assert said == ["True", "gloo", "pycomm", "['compress_hook']"]


def test_import_torch_survives_wrong_variables(installed):
    code = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import torch\n"
        "    MORE\n"
        "print(*(w.message for w in caught if 'pycomm' in str(w.message)))"
    )
    at_import = code.replace("MORE", "")
    assert "cannot answer for the backend 'mpi'" in run(at_import, installed, PYCOMM_TAKEOVER="mpi")
    code = code.replace("MORE", "torch._import_device_backends()")  # the last thing of an import
    for text, wrong in (
        ("--codec int9", "unknown codec 'int9'"),
        ("--codc int4", "unrecognized arguments: --codc int4"),
        ("int4", "unrecognized arguments: int4"),
        ("--codec", "expected one argument"),
        ("--codec 'int4", "No closing quotation"),
    ):
        said = forked(code, installed, PYCOMM_RUN=text)
        assert f"PYCOMM_RUN={text!r} has no effect: " in said
        assert wrong in said
        assert said.endswith('such as PYCOMM_RUN="--codec int4"')


def test_of_two_variables_the_right_one_counts(installed):
    said = run(TAKEOVER, installed, PYCOMM_TAKEOVER="gloo", PYCOMM_RUN="--codec 'int4")
    assert said.split() == ["True", "gloo", "pycomm"]
    said = run(TAKEOVER, installed, PYCOMM_TAKEOVER="mpi", PYCOMM_RUN="--codec int4")
    assert said.split() == ["True", "gloo", "pycomm"]
