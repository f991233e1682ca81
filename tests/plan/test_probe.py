"""`plan probe` measures what ranks have, and the planner takes it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from pycomm.plan import CODINGS, ClusterProbe
from pycomm.plan.__main__ import main
from pycomm.plan.probe.result import middle


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """A quick probe of two ranks that talk by TCP, as on two nodes."""
    path = tmp_path_factory.mktemp("probe") / "probe.json"
    command = [sys.executable, "-m", "pycomm.plan", "probe", "--effort", "0.02", "--out", path]
    env = {"PYCOMM_TRANSPORT": "tcp", "PATH": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path, done.stdout


def test_measures_links_cores_and_codecs(probed):
    path, said = probed
    found = ClusterProbe.read(path)
    assert (found.ranks, found.nodes, found.machines, found.intra) == (2, 2, 1, None)
    assert found.inter is not None
    assert found.inter.rate > 1e6
    assert 0 < found.inter.latency < 1
    assert set(found.codecs) == {coding.name for coding in CODINGS.values() if coding.spec}
    assert all(rates.encode > 1e6 for rates in found.codecs.values())
    assert "between nodes" in said


def test_nodes_on_one_machine_share_its_cores(probed):
    found = ClusterProbe.read(probed[0])
    assert found.cluster(8).cores == found.cores / 8
    assert found.cluster(8).machine == 8


def test_of_several_turns_the_middle_of_each_figure_counts(probed):
    found = ClusterProbe.read(probed[0])
    turns = [
        replace(found, memory=memory, inter=replace(found.inter, rate=rate))
        for memory, rate in ((3e9, 1e8), (1e9, 5e8), (2e9, 9e8))
    ]
    assert middle(turns) == replace(turns[1], memory=2e9)


def test_the_planner_takes_it(probed, capsys):
    words = ["25M", "--ranks", "4", "--compute", "100ms", "--probe", str(probed[0])]
    assert main(words) == 0
    assert ", 4 ranks, " in capsys.readouterr().out
