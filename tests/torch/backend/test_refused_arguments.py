"""Invalid arguments are refused at the call, in a one-line error that names them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pycomm
from pycomm.local_sgd import Quorum, Streamed
from pycomm.policy import Guard, Policy, Rule, Trial
from tests.torch import interpreter
from tests.torch.pool import on_ranks


def wrapped() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(8, 8))


def local(**options: Any) -> pycomm.LocalSGD:
    return pycomm.LocalSGD(nn.Linear(8, 8), **{"every": 4, **options})


def options_of(function: Callable[..., Any], name: str, *values: Any) -> list[Callable[[], Any]]:
    return [lambda value=value: function(**{name: value}) for value in values]


NUMBERS = ("4", None, 2.5, True, [4])
NUMPY: list[Callable[[], Any]] = [
    lambda: local(every=np.int64(3)).every,
    lambda: local(lr=np.float32(0.5)).lr,
    lambda: Policy("int8", warmup=np.int32(3)).warmup,
    lambda: Policy("int8", schedule=((np.int64(3), "int4"),)).schedule[0][0],
    lambda: Policy("auto", error=np.float64(0.5)).error,
    lambda: Rule(codec="int8", min_numel=np.int64(5)).min_numel,
    lambda: Guard(every=np.int64(4)).every,
    lambda: Trial(steps=np.int64(4)).steps,
    lambda: pycomm.Feedback("decay", np.float32(0.5)).decay,
    lambda: pycomm.compress(wrapped(), seed=np.uint64(2**63)).seed,
]
REFUSED: list[Callable[[], Any]] = [
    *(lambda what=what: pycomm.compress(what) for what in ("x", None, 8)),
    *(lambda s=s: pycomm.compress(wrapped(), s) for s in (None, 8, b"int8", object(), ["int4"])),
    *(lambda f=f: pycomm.compress(wrapped(), feedback=f) for f in (0.9, 1, "xx", object(), [1])),
    *(lambda s=s: pycomm.compress(wrapped(), seed=s) for s in ("x", None, 1.5, -1, 2**70, True)),
    *options_of(local, "every", *NUMBERS, 0),
    *options_of(local, "lr", "x", None, float("nan"), True, 0),
    *options_of(local, "momentum", "x", None, 1.0),
    *options_of(local, "codec", None, 8),
    *options_of(local, "feedback", 0.5),
    *options_of(local, "optimizer", 3),
    *options_of(local, "exchange", None, "blocking", Streamed, 3),
    *options_of(Streamed, "fragments", *NUMBERS, 0),
    lambda: Quorum(1, grace=-1.0),
    *options_of(Streamed, "overlap", *NUMBERS, -1),
    *options_of(Streamed, "mixing", "x", None, 1.0),
    *options_of(Quorum, "ranks", *NUMBERS, 0),
    lambda: Quorum(1, grace="x"),
    lambda: pycomm.LocalSGD("x", every=3),
    *(lambda what=what: pycomm.codec(what) for what in (None, 8, "", b"int8")),
    *(lambda what=what: Policy(what) for what in (None, 8)),
    *options_of(Policy, "rules", None, ["x"], "x"),
    *options_of(Policy, "error", "4", float("inf"), float("nan"), 0),
    *options_of(Policy, "warmup", "x", 1.5, -1),
    *options_of(Policy, "guard", True, False, 3),
    *options_of(Policy, "trial", 5, None),
    *options_of(Policy, "schedule", (5, "int4"), "int4", ((5,),)),
    *options_of(Policy, "candidates", "int4", (8,)),
    *(lambda what=what: Rule(codec=what) for what in (None, 8)),
    lambda: Rule(codec="int8", name=5),
    lambda: Rule(codec="int8", min_numel="5"),
    *options_of(Guard, "every", *NUMBERS, 0),
    *options_of(Guard, "share", "x", float("nan"), 2),
    *options_of(Trial, "steps", *NUMBERS, 0),
    *options_of(Trial, "margin", "x", -1),
    lambda: Trial(most=1),
    lambda: pycomm.Feedback("decay", decay="x"),
    lambda: pycomm.HookState(8),
    lambda: pycomm.HookState("int8", nn.Linear(3, 3)),
    lambda: pycomm.state_of(5),
    lambda: pycomm.Options(bogus=3),
]

# These calls must leave no trace.
INSIDE = ("object has no attribute", "not supported between", "not iterable", "\n")


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        act()
    return str(caught.value)


@on_ranks(1, timeout=60, deadline=180)
def test_every_public_function_names_what_it_refuses(rank, size):
    state = pycomm.compress(wrapped(), "int4")
    of_state: list[Callable[[], Any]] = [
        lambda: state.follow(optimizer=3),
        lambda: state.follow(scaler=3),
        lambda: state.rescale("x"),
        lambda: state.rescale(-1),
        lambda: state.rescale(0),
        lambda: state.rescale(2.0, names="0.weight"),
        lambda: state.set_epoch("x"),
        lambda: state.load_state_dict({}),
        lambda: state.load_state_dict({"model": 1}),
        lambda: state.load_state_dict(5),
        lambda: state.adopt_state(3),
        lambda: state.set_policy(7),
    ]
    for number, act in enumerate([*REFUSED, *of_state]):
        text = refusal(act)
        assert not any(words in text for words in INSIDE), (number, text)
    # A refused call has changed nothing.
    assert dist.get_world_size() == size
    assert state.decisions["weight"].reason


@on_ranks(1, timeout=60, deadline=180)
def test_numbers_of_numpy_are_numbers(rank, size):
    for number, act in enumerate(NUMPY):
        assert type(act()) in (int, float), number


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(interpreter.ROOT), **environment}
    return interpreter.run("-m", *command, env=env, timeout=110)


@pytest.mark.parametrize(
    ("command", "environment", "says"),
    [
        (["pycomm.doctor"], {"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not an integer"),
        (
            ["pycomm.doctor"],
            {"RANK": "0", "WORLD_SIZE": "2", "PYCOMM_HEALTH": "xx"},
            "PYCOMM_HEALTH='xx' is invalid",
        ),
        (
            ["pycomm.doctor", "--no-self-test", "--json", "/dev/null/x"],
            {},
            "--json /dev/null/x cannot be written",
        ),
        (["pycomm.bench", "step", "--turn-seconds", "-3"], {}, "want seconds above 0"),
        (["pycomm.bench", "step", "--turn-seconds", "nan"], {}, "want seconds above 0"),
        (
            ["pycomm.bench", "training", "--only", "losses", "--csv", "/etc/passwd"],
            {},
            "--csv /etc/passwd holds no rows of this benchmark",
        ),
        (["pycomm.run", "--seed", "-1", "--codec", "int8", __file__], {}, "seed=-1 is invalid"),
    ],
)
def test_programs_say_in_one_line_what_is_wrong(command, environment, says):
    done = run(*command, **environment)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_wrong_variable_is_no_broken_binary():
    """It would be compiled again, for minutes, and then not load either."""
    env = {**os.environ, "PYTHONPATH": str(interpreter.ROOT), "PYCOMM_LINK": "0"}
    code = "from pycomm._build import load_c10d; load_c10d()"
    done = interpreter.run("-c", code, env=env, timeout=110)
    assert "compiling" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "pycomm.errors.Error: PYCOMM_LINK=0 is invalid: expected a rate"
    )


def test_the_doctor_finds_a_variable_that_python_refuses():
    done = run("pycomm.doctor", PYCOMM_HEALTH="xx")
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout
    assert "PYCOMM_HEALTH='xx' is invalid: expected on, off" in done.stdout
    assert "self-test" in done.stdout  # which is left out
    assert "Traceback" not in done.stdout + done.stderr


def test_an_interrupt_is_told_in_one_line(monkeypatch, capsys):
    main = pytest.importorskip("pycomm.bench.__main__")

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run", interrupted)
    assert main.main([]) == 130
    assert capsys.readouterr().err == "python -m pycomm.bench: interrupted\n"
