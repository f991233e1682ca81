"""`plan probe` measures what ranks have, and the planner takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pycomm.plan import CODINGS, Probe
from pycomm.plan.__main__ import main
from pycomm.plan.probed import Crowd


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
    found = Probe.read(path)
    assert (found.ranks, found.nodes, found.machines, found.intra) == (2, 2, 1, None)
    assert found.inter is not None
    assert found.inter.rate > 1e6
    assert 0 < found.inter.latency < 1
    assert set(found.codecs) == {coding.name for coding in CODINGS.values() if coding.spec}
    assert all(rates.measured and rates.encode > 1e6 for rates in found.codecs.values())
    assert "between nodes" in said


def test_nodes_on_one_machine_share_its_cores(probed):
    found = Probe.read(probed[0])
    assert found.cluster(8).cores == found.cores / 8
    assert found.cluster(8).machine == 8


def test_ranks_without_a_core_pay_more_for_a_byte_and_wait(probed):
    found = Probe.read(probed[0])
    alone = replace(found.inter, byte=1e-9)
    found = replace(found, cores=2, inter=alone)
    crowds = (Crowd(4, 2 * alone.byte, 1e-3), Crowd(8, 4 * alone.byte, 3e-3))
    found = found.crowded(crowds[0]).crowded(crowds[1])
    links = {ranks: found.cluster(ranks).inter for ranks in (2, 4, 6, 8)}
    late = {ranks: link.latency - alone.latency for ranks, link in links.items()}
    more = {ranks: link.byte / alone.byte for ranks, link in links.items()}
    assert late == pytest.approx({2: 0, 4: 1e-3, 6: 2e-3, 8: 3e-3})
    assert more == pytest.approx({2: 1, 4: 2, 6: 3, 8: 4})
    assert found.cluster(8, 8).inter == alone  # they share a node's link


def test_more_ranks_than_cores_are_probed(tmp_path):
    path, two = tmp_path / "probe.json", sorted(os.sched_getaffinity(0))[:2]
    words = ["probe", "--effort", "0.02", "--ranks", "4", "--out", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "pycomm.plan", *words],
        env={"PYCOMM_TRANSPORT": "tcp", "PATH": ""},
        preexec_fn=lambda: os.sched_setaffinity(0, two),
    )
    assert done.returncode == 0
    found = Probe.read(path)
    assert found.cores == len(two)
    assert found.crowds[-1].ranks == 4
    assert found.crowds[-1].byte >= found.inter.byte


def test_the_planner_takes_it(probed, capsys):
    words = ["25M", "--ranks", "4", "--compute", "100ms", "--probe", str(probed[0]), "--json", "-"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 4


def test_another_file_is_refused(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text('{"ranks": 2}')
    with pytest.raises(SystemExit):
        main(["25M", "--ranks", "4", "--compute", "1s", "--probe", str(path)])
    assert "not written by `plan probe`" in capsys.readouterr().err
