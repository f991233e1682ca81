"""Networks for tests of this tier, a skip where the machine allows none, and what ranks print."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pycomm.bench.lab.wan import WanLab
from pycomm.bench.netlab import LabUnavailable, Netlab, wait
from tests.torch.lab_ranks import fork_ranks


def near_hosts(nodes: int, rate: str = "80mbit", **options: Any) -> Netlab:
    """Return hosts in a network without delay."""
    try:
        return Netlab(nodes, rate, **options)
    except LabUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")


def far_hosts(nodes: int, rate: str = "200mbit", **options: Any) -> WanLab:
    """Return hosts in a network with delay."""
    try:
        return WanLab(nodes, rate, **options)
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
