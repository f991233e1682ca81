"""Which implementation serves a torch: a binary that is there, else Python, else compiling."""

from __future__ import annotations

import os

import pytest
import torch

from pycomm import _build, env
from pycomm.backend import choice
from pycomm.errors import Error
from tests.torch.interpreter import ROOT, run


@pytest.fixture
def offers(monkeypatch):
    """Return a function that says what there is: what a way gives, or the error it raises."""

    def give(value):
        def get(*_):
            if isinstance(value, Exception):
                raise value
            return value

        return get

    def say(*, ready: object, python: str, compiled: object, wish: str = "auto") -> None:
        monkeypatch.setattr(choice, "ready_c10d", give(ready))
        monkeypatch.setattr(choice, "load_c10d", give(compiled))
        monkeypatch.setattr(choice, "why_not_python", lambda: python)
        monkeypatch.setattr(choice, "_python", lambda: "python")
        monkeypatch.setattr(choice, "env", lambda: env.Env(backend=wish))

    return say


ABSENT = _build.Absent("the wheel has it for torch 2.13")
NO_TOOLS = Error("there is no cmake: install it")
TOO_OLD = "torch 2.13.0 does not let Python make one"


@pytest.mark.parametrize(
    ("ready", "python", "compiled", "wish", "taken"),
    [
        ("ready", "", "compiled", "auto", "ready"),
        (ABSENT, "", "compiled", "auto", "python"),
        (ABSENT, TOO_OLD, "compiled", "auto", "compiled"),
        ("ready", "", "compiled", "python", "python"),
        (ABSENT, "", "compiled", "binary", "compiled"),
    ],
)
def test_the_first_that_is_there_is_taken(offers, ready, python, compiled, wish, taken):
    offers(ready=ready, python=python, compiled=compiled, wish=wish)
    assert choice.load() == taken


def test_an_error_says_how_each_of_the_three_failed(offers):
    offers(ready=ABSENT, python=TOO_OLD, compiled=NO_TOOLS)
    with pytest.raises(Error) as caught:
        choice.load()
    for text in ("the wheel has it for torch 2.13", TOO_OLD, "there is no cmake: install it"):
        assert text in str(caught.value)


def test_what_was_asked_for_and_is_not_there_is_an_error(offers):
    offers(ready="ready", python=TOO_OLD, compiled="compiled", wish="python")
    with pytest.raises(
        Error, match=r"PYCOMM_BACKEND=python has no effect: torch 2\.13\.0 does not"
    ):
        choice.load()


def test_a_torch_that_is_too_old_is_no_case_for_python(offers):
    offers(ready=Error("torch 2.10 is too old"), python="", compiled="compiled")
    with pytest.raises(Error, match="too old"):
        choice.load()


def test_python_makes_backends_from_torch_2_14_on():
    number = tuple(map(int, torch.__version__.split(".")[:2]))
    assert bool(choice.why_not_python()) == (number < (2, 14))


def test_a_wrong_wish_is_named(monkeypatch):
    monkeypatch.setenv("PYCOMM_BACKEND", "cobol")
    env.env.cache_clear()
    try:
        with pytest.raises(ValueError, match="'cobol' is invalid: expected auto, binary or python"):
            env.env()
    finally:
        monkeypatch.undo()
        env.env.cache_clear()


def test_ready_only_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_build, "PACKAGE", tmp_path)
    monkeypatch.setattr(_build, "_fingerprint", lambda: "f")
    monkeypatch.setattr(_build, "_compile_aloud", lambda *_: pytest.fail("compiles"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(_build.sys.modules, "pycomm._c10d", raising=False)
    with pytest.raises(_build.Absent, match="there is none yet"):
        _build.ready_c10d()
    half = tmp_path / "_built" / f"_c10d-torch{torch.__version__}-f" / _build.BINARY
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    with pytest.raises(_build.Absent, match="the compiled one does not load"):
        _build.ready_c10d()


FUTURE = """
import torch
torch.__version__ = "2.99.0"
import torch.distributed as dist, pycomm.backend
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
print(type(pycomm.backend.find()).__module__)
dist.destroy_process_group()
"""


def test_a_future_torch_needs_no_compiler(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYCOMM_")}
    env |= {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = run("-c", FUTURE, env=env, cwd=tmp_path)
    if not choice.why_not_python():
        assert (done.returncode, done.stdout) == (0, "pycomm.backend.python.backend\n"), done.stderr
        return
    assert done.returncode != 0
    for text in (
        "Binaries: ",
        "in Python: torch 2.99.0 does not",
        "there is no ",
        "c++",
    ):
        assert text in done.stderr
    for folder in (ROOT / "pycomm/_built").glob("_c10d-torch2.99.0-*"):
        folder.rmdir()  # nothing was compiled
