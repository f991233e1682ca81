"""Checks of pycomm's environment variables: which are set, and whether each value is valid."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pycomm.doctor import children
from pycomm.doctor.finding import Finding, Topic
from pycomm.doctor.probe import AT_IMPORT, SECONDS
from pycomm.env import BUILD, PREFIX, VARIABLES, Variable, everything, guess, with_only

TOPIC = Topic("environment")
# Other projects' variables: the core takes its interface from them if PYCOMM_INTERFACE is not set.
OTHERS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")
# Variables meant for experiments, and their cost if they are left set; PYCOMM_LINK with a slash
# describes a real link.
FORGOTTEN = {
    "PYCOMM_LINK": "every rank sends no faster than that by TCP",
    "PYCOMM_ALGO": "no size of message gets the algorithm that is best for it",
    "PYCOMM_TRANSPORT": "ranks talk that way alone",
    "PYCOMM_IMPL": "codecs have this implementation or fail",
}


@cache
def core() -> dict[str, Variable]:
    """Return the variables of the core, as a child process reads them; none if it does not load."""
    program = "import json; from pycomm import _C; print(json.dumps({'rows': _C.OPTIONS}))"
    found, _ = _said(children.start("-c", program, env=with_only()))
    rows = found[0]["rows"] if found else ()
    return {row["name"]: Variable(**row) for row in rows if row["name"].startswith(PREFIX)}


def _said(child: subprocess.Popen[str]) -> tuple[list[Any], str]:
    return children.outcome(child, SECONDS, time.monotonic())


def judge(
    given: Mapping[str, str],
    refused: Mapping[str, str],
    impl_error: str = "",
    no_effect: Sequence[str] = (),
) -> Iterator[Finding]:
    """Yield findings on the variables that are set.

    Args:
        given: their names and values.
        refused: the core's error for each variable that it rejects.
        impl_error: why PYCOMM_IMPL is not available.
        no_effect: why the variables for the import of torch have no effect.
    """
    known = {**core(), **VARIABLES}
    for name, value in given.items():
        text = f"{value}: {known[name].meaning}" if name in known else value
        if name in refused:
            yield TOPIC.problem(name, refused[name], "correct it, or unset it")
        elif name == "PYCOMM_IMPL" and impl_error:
            advice = "unset it, and the best that is there is taken"
            yield TOPIC.problem(name, f"{value} cannot be had: {impl_error}", advice)
        elif name in AT_IMPORT and no_effect:
            advice = "correct it, or unset it; `python -m pycomm.run --help` has the options"
            yield TOPIC.problem(name, f"{value} has no effect: {no_effect[0]}", advice)
        elif value and name in FORGOTTEN and value != "auto" and "/" not in value:
            advice = "unset it, unless you are trying something out"
            yield TOPIC.note(name, f"{value}: {FORGOTTEN[name]}", advice)
        elif name in known:
            yield TOPIC.ok(name, text if value else "empty, as if it were not set")
        elif name in BUILD:
            yield TOPIC.ok(name, f"{value}: read when pycomm is built, not later")
        elif name in OTHERS:
            yield TOPIC.ok(name, value)
        elif not core():
            yield TOPIC.note(name, f"{value}: the core, which may read it, does not load")
        else:
            yield TOPIC.warning(name, "nothing of pycomm reads it", guess(name, known))
    if not any(name.startswith(PREFIX) for name in given):
        yield TOPIC.ok(f"{PREFIX}*", "none is set: everything is as we chose it")


def shared(given: Mapping[str, str]) -> dict[str, str]:
    """Return those variables that must be equal on all ranks."""
    known = {**core(), **VARIABLES}
    return {name: value for name, value in given.items() if name in known and known[name].same}


def refused() -> dict[str, str]:
    """Return the core's error, by the variable that it begins with: of several the first one's."""
    program = (
        "import json\nfrom pycomm import _C\n"
        "try: _C.env()\nexcept Exception as error: print(json.dumps({'error': str(error)}))"
    )
    said, _ = _said(children.start("-c", program, env=everything()))
    return {re.split(r"\W", line["error"])[0]: line["error"] for line in said}
