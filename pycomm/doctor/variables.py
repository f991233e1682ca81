"""The environment variables that pycomm reads: which are set, and whether each makes sense."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pycomm.doctor.finding import Finding
from pycomm.doctor.probe import AT_IMPORT
from pycomm.env import PREFIX, with_only

TOPIC = "environment"
# Read by the core (csrc/core/env.h), which says itself what is wrong with one.
CORE = {
    "PYCOMM_ALGO": "one algorithm for all collectives",
    "PYCOMM_CHECK": "whether ranks compare results",
    "PYCOMM_CHECKSUM": "what TCP frames are checked by",
    "PYCOMM_INTERFACE": "interfaces or addresses for TCP: see network",
    "PYCOMM_LINK": "rate to which each rank paces what it sends by TCP",
    "PYCOMM_SECRET": "secret of the handshake between ranks",
    "PYCOMM_SOCKETS": "TCP sockets per peer",
    "PYCOMM_TLS": "encryption of TCP connections",
    "PYCOMM_SPIN": "looks at shared memory before a wait yields",
    "PYCOMM_TIMEOUT": "seconds that an operation may take",
    "PYCOMM_TRACE": "folder for the recent operations of a group that fails",
    "PYCOMM_TRACE_SIZE": "operations that a group remembers",
    "PYCOMM_TRANSPORT": "how ranks talk",
}
# Read by Python (pycomm/env.py).
PYTHON = {
    "PYCOMM_HEALTH": "whether, or how often, ranks are compared to find who is slow",
    "PYCOMM_IMPL": "implementation of all codecs",
    "PYCOMM_RUN": "options of pycomm.run for processes that others start",
    "PYCOMM_TAKEOVER": "backend names that pycomm answers for",
}
BUILD = ("PYCOMM_CUDA", "PYCOMM_CUDA_ARCH", "PYCOMM_TORCH", "PYCOMM_SANITIZE")
# Those of others from which the core takes its interface, if PYCOMM_INTERFACE is not set.
OTHERS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR")
SECRETS = ("PYCOMM_SECRET",)
# Which must be equal on all ranks.
SHARED = (
    "PYCOMM_ALGO",
    "PYCOMM_CHECK",
    "PYCOMM_SECRET",
    "PYCOMM_SOCKETS",
    "PYCOMM_TAKEOVER",
    "PYCOMM_TIMEOUT",
    "PYCOMM_TLS",
    "PYCOMM_TRANSPORT",
)
# What is meant for trying things out, and costs something where it is forgotten.
FORGOTTEN = {
    "PYCOMM_LINK": "every rank sends no faster than that by TCP",
    "PYCOMM_ALGO": "no size of message gets the algorithm that is best for it",
    "PYCOMM_TRANSPORT": "ranks talk that way alone",
    "PYCOMM_IMPL": "codecs have this implementation or fail",
}


def judge(
    given: Mapping[str, str],
    refused: Mapping[str, str],
    impl_error: str = "",
    no_effect: Sequence[str] = (),
) -> Iterator[Finding]:
    """Findings about the variables that are set.

    Args:
        given: their names and values.
        refused: what the core says against those that it does not take.
        impl_error: why PYCOMM_IMPL cannot be had.
        no_effect: why what is set for the import of torch does nothing.
    """
    known = {**CORE, **PYTHON}
    for name, value in given.items():
        shown = "(a secret)" if name in SECRETS else value
        text = f"{shown}: {known.get(name, '')}"
        if name in refused:
            yield _finding("problem", name, refused[name], "correct it, or unset it")
        elif name == "PYCOMM_IMPL" and impl_error:
            advice = "unset it, and the best that is there is taken"
            yield _finding("problem", name, f"{shown} cannot be had: {impl_error}", advice)
        elif name in AT_IMPORT and no_effect:
            advice = "correct it, or unset it; `python -m pycomm.run --help` has the options"
            yield _finding("problem", name, f"{shown} has no effect: {no_effect[0]}", advice)
        elif name == "PYCOMM_TRACE" and not _can_be_written(Path(value)):
            advice = "name a folder that every rank can write, shared or of its host"
            yield _finding("problem", name, f"{shown} cannot be written", advice)
        elif value and name in FORGOTTEN and value != "auto":
            advice = "unset it, unless you are trying something out"
            yield _finding("note", name, f"{shown}: {FORGOTTEN[name]}", advice)
        elif name in known:
            yield _finding("ok", name, text if value else "empty, as if it were not set")
        elif name in BUILD:
            yield _finding("ok", name, f"{shown}: read when pycomm is built, not later")
        elif name in OTHERS:
            yield _finding("ok", name, shown)
        else:
            near = difflib.get_close_matches(name, [*known, *BUILD], 1)
            guess = f"did you mean {near[0]}? Else unset it" if near else "unset it"
            yield _finding("warning", name, "nothing of pycomm reads it", guess)
    if not any(name.startswith(PREFIX) for name in given):
        yield _finding("ok", f"{PREFIX}*", "none is set: everything is as we chose it")


def _finding(level: str, name: str, text: str, advice: str = "") -> Finding:
    return Finding(level, TOPIC, name, text, advice)


def _can_be_written(folder: Path) -> bool:
    """True if the folder can be written, or made."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def shared(given: Mapping[str, str]) -> dict[str, str]:
    """Those that must be equal on all ranks."""
    return {name: value for name, value in given.items() if name in SHARED}


def refusals(given: Mapping[str, str]) -> dict[str, str]:
    """What the core says against each variable, asked one at a time: it stops at the first."""
    program = (
        "from pycomm import _C\ntry: _C.env()\nexcept Exception as error: print(error, end='')"
    )
    command = [sys.executable, "-c", program]
    asked = {
        name: subprocess.Popen(
            command, env=with_only(name), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in given
        if name in CORE
    }
    words = {name: process.communicate(timeout=30)[0] for name, process in asked.items()}
    return {name: text for name, text in words.items() if text}
