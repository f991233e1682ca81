"""Networks for tests of this tier, a skip where the machine allows none, and what ranks print."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

from pycomm.bench.netlab import LabUnavailable, Netlab, wait
from tests.processes.faulty_links import NEW_NETWORK, NEW_USER, FaultyNetlab, FaultyWanLab
from tests.torch.interpreter import Interpreter


def near_hosts(nodes: int, rate: str = "80mbit", **options: Any) -> FaultyNetlab:
    """Return hosts in a network without delay."""
    try:
        return FaultyNetlab(nodes, rate, **options)
    except LabUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")


def far_hosts(nodes: int, rate: str = "200mbit", **options: Any) -> FaultyWanLab:
    """Return hosts in a network with delay."""
    try:
        return FaultyWanLab(nodes, rate, **options)
    except LabUnavailable as error:
        pytest.skip(f"no network namespaces with TUN devices: {error}")


def printed_by(lab: Any, job: str, folder: Path, *words: str, forked: bool = False) -> str:
    """Run a program, with these words, as the ranks of a lab, and return what they print.

    Args:
        forked: ranks begin with torch imported.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "printed").open("w+") as printed:
        if forked:
            fork_ranks(lab)
        command = [sys.executable, "-c", job, *words]
        ranks = lab.start(command, env=dict(os.environ), stdout=printed, stderr=printed)
        status = wait(ranks)
        printed.seek(0)
        text = printed.read()
    assert status == 0, text
    return text


# ------------------------------------------------- ranks that begin with torch imported

# Goes to the node's network, writes where the lab's ranks are to write, and runs the command.
BEGIN = """
import ctypes, os, runpy, sys
for _path, _flag in {spaces}:
    with open(_path) as _space:
        if ctypes.CDLL(None, use_errno=True).setns(_space.fileno(), _flag) != 0:
            raise OSError(ctypes.get_errno(), "setns: " + _path)
for _stream, _number in zip({streams}, os.environ["PASSED_FDS"].split(",")):
    os.dup2(int(_number), _stream)
"""
MODULE = "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def fork_ranks(lab: Netlab) -> None:
    """Let a lab start its ranks, which are `python -c CODE` or `python -m MODULE`, this way."""
    lab._keep = partial(keep, lab)  # type: ignore[method-assign]


def keep(
    lab: Netlab,
    node: int,
    command: Sequence[str],
    env: Mapping[str, str],
    stdout: IO[Any] | int | None = None,
    stderr: IO[Any] | int | None = None,
) -> Any:
    """Take the place of the lab's own `_keep`."""
    _, kind, what, *rest = command
    process = f"/proc/{lab._holders[node + 1].pid}/ns"
    spaces = [(f"{process}/user", NEW_USER)] if lab._user else []
    spaces.append((f"{process}/net", NEW_NETWORK))
    files = {1: stdout, 2: stderr}
    streams = {
        n: file for n, file in files.items() if file is not None and not isinstance(file, int)
    }
    code = BEGIN.format(spaces=spaces, streams=tuple(streams))
    words = ["-c", code + what, *rest] if kind == "-c" else ["-c", code + MODULE, what, *rest]
    rank = Interpreter(*words, env=env, fds=[file.fileno() for file in streams.values()])
    lab._ranks.append(rank)  # type: ignore[arg-type]
    return rank
