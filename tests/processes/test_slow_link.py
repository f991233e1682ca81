"""The host whose link is slow is named by what the kernels of all hosts count."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from pycomm.straggler.compare import compare
from pycomm.straggler.stats import RankStats
from tests.processes.labs import near_hosts

JOB = [sys.executable, "-m", "tests.processes.slow_link_job"]


def test_the_rank_with_the_slow_link_is_named():
    lab = near_hosts(3, "400mbit", node_rates={1: "60mbit"})
    with lab, tempfile.TemporaryDirectory() as folder:
        ranks = lab.start([*JOB, folder], stdout=subprocess.PIPE)
        texts = [rank.communicate(timeout=60)[0] for rank in ranks]
    health = compare([RankStats.from_json(json.loads(text)) for text in texts])
    assert health is not None
    assert health.finding is not None
    assert (health.finding.rank, health.finding.cause) == (1, "link")
