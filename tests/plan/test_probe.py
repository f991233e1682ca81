"""`plan probe` measures what ranks have, and the planner takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from pycomm.env import env
from pycomm.plan import CODINGS, ClusterProbe
from pycomm.plan.__main__ import main
from pycomm.plan.codecs import NONE
from pycomm.plan.probe import cli, links
from pycomm.plan.probe.result import Crowd, middle
from tests.extent import FULL


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
    assert all(rates.measured and rates.encode > 1e6 for rates in found.codecs.values())
    assert "between nodes" in said


def test_nodes_on_one_machine_share_its_cores(probed):
    found = ClusterProbe.read(probed[0])
    assert found.cluster(8).cores == found.cores / 8
    assert found.cluster(8).machine == 8


def test_ranks_without_a_core_pay_more_for_a_byte_and_wait(probed):
    found = ClusterProbe.read(probed[0])
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


def test_predictions_beyond_the_probe_are_not_negative(probed):
    found = replace(ClusterProbe.read(probed[0]), cores=2)
    fewer = (
        Crowd(4, 2e-9, 2e-4, 1.4, 1.3),
        Crowd(8, 1.5e-9, 1e-4, 1.2, 1.1),
    )  # the larger was seen to do well
    cluster = replace(found, crowds=fewer).cluster(1024)
    assert cluster.inter.byte == 1.5e-9
    assert cluster.inter.latency == found.inter.latency
    assert cluster.processor.rates["topk:0.01"] == found.codecs["topk:0.01"]


def test_ranks_without_a_core_have_slower_codecs(probed):
    crowd = Crowd(4, 2e-9, whole=2.0, far_whole=3.0, segmented=1.5)
    found = replace(ClusterProbe.read(probed[0]), cores=2, crowds=(crowd,))
    rates, far = found.cluster(4).processor.rates, found.cluster(4).processor.far.rates
    for mine, alone, factor in ((rates, found.codecs, 2), (far, found.far_codecs, 3)):
        assert mine["topk:0.01"].encode == pytest.approx(alone["topk:0.01"].encode / factor)
        assert mine["int8"].encode == pytest.approx(alone["int8"].encode / 1.5)


def test_a_crowd_is_as_slow_as_its_all_reduces_were(probed):
    found = ClusterProbe.read(probed[0])
    fast = replace(found.inter, rate=1e12, byte=1e-10)  # so that cores are the limit
    found = replace(found, cores=2, inter=fast, crowds=())  # as if this machine had two cores
    here, length = Crowd(4, 1e-10), 16 << 20
    memory = found.cluster(4).holding(length // 4).processor.memory
    core = 1 / memory + 2 * 3 / 4 * 6e-9  # per byte, of which some was waiting
    wall = links.expected(found, replace(here, byte=3e-9), NONE, length // 4)
    assert links.moving(found, here, length, wall, core).byte == pytest.approx(3e-9, rel=0.02)
    assert links.moving(found, here, length, 9 * wall, core).byte == pytest.approx(6e-9)
    for name in ("topk:0.01", "int8"):
        slow = replace(here, whole=1.7, far_whole=1.7, segmented=1.7)
        wall = links.expected(found, slow, CODINGS[name], 1 << 18)
        factor = links.longer(found, here, CODINGS[name], 1 << 18, wall)
        assert factor == pytest.approx(1.7, rel=0.02)


def test_of_several_turns_the_middle_of_each_figure_counts(probed):
    found = ClusterProbe.read(probed[0])
    crowd = Crowd(4, 2e-9, 1e-3, 1.5)
    turns = [
        replace(found, memory=memory, inter=replace(found.inter, rate=rate)).crowded(crowd)
        for memory, rate in ((3e9, 1e8), (1e9, 5e8), (2e9, 9e8))
    ]
    assert middle(turns) == replace(turns[1], memory=2e9)


@pytest.mark.skipif(not FULL, reason="takes half a minute: make soak")
def test_more_ranks_than_cores_are_probed(tmp_path):
    path, two = tmp_path / "probe.json", sorted(os.sched_getaffinity(0))[:2]
    words = ["probe", "--effort", "0.02", "--ranks", "4", "--out", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "pycomm.plan", *words],
        env={"PYCOMM_TRANSPORT": "tcp", "PATH": ""},
        preexec_fn=lambda: os.sched_setaffinity(0, two),
    )
    assert done.returncode == 0
    found = ClusterProbe.read(path)
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


def test_ranks_of_several_nodes_are_told_to_name_a_folder(monkeypatch, capsys):
    place = {"rank": 0, "world_size": 4, "local_world_size": 2}
    monkeypatch.setattr(cli, "env", lambda: replace(env(), **place))
    with pytest.raises(SystemExit):
        main(["probe"])
    assert "4 ranks on nodes of 2" in capsys.readouterr().err
