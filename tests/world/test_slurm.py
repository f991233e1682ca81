"""Slurm: the sbatch files of examples/slurm train, and a job that is requeued goes on as it was.

Real are slurmctld, slurmd, munge, srun and the network between the nodes; the nodes are namespaces
of this machine, see slurm_cluster.py.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from pycomm.bench.netlab import LabUnavailable
from tests.world.slurm_cluster import SlurmCluster, until

ROOT = Path(__file__).parents[2]
STEPS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3)
    except LabUnavailable as error:
        pytest.skip(f"no Slurm: {error}")
    with cluster:
        yield cluster


def submit(cluster: SlurmCluster, file: str, output: Path, *words: str) -> int:
    """Submit a file of examples/slurm with words for its script; return the number of the job."""
    environment = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CHECKPOINTS": str(output.with_suffix(".checkpoints")),
    }
    options = ["--parsable", f"--output={output}", f"--chdir={ROOT}"]
    path = str(ROOT / "examples/slurm" / file)
    words = ("--steps", str(STEPS), "--every", "10", *words)
    return int(cluster.run("sbatch", *options, path, *words, env=environment))


def finish(cluster: SlurmCluster, job: int, output: Path) -> str:
    """Wait for the end of a job and return its output."""
    ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def shown() -> str:
        return f"{cluster.job(job)}\n{output.read_text()}"

    until(lambda: cluster.job(job)["JobState"] in ends, 300, shown)
    text = output.read_text()
    assert cluster.job(job)["JobState"] == "COMPLETED", text
    return text


def weights(text: str) -> str:
    (norm,) = re.findall(rf"^end at step {STEPS}, norm of the weights (.*)$", text, re.MULTILINE)
    return str(norm)


@pytest.mark.timeout(900)
def test_a_requeued_job_ends_with_the_same_bits(cluster, tmp_path):
    calm_output = tmp_path / "calm"
    calm = finish(cluster, submit(cluster, "srun.sbatch", calm_output), calm_output)
    # Two ranks on each of two hosts: rank 0 has one peer in shared memory, two behind TCP.
    assert re.search(r"^begin at step 0 on 4 ranks: .*shm.*tcp", calm, re.MULTILINE), calm

    output = tmp_path / "cut"
    job = submit(cluster, "torchrun.sbatch", output, "--pause", "0.3")
    latest = output.with_suffix(".checkpoints") / "latest"
    until(latest.exists, 300, lambda: f"no checkpoint: {output.read_text()}")
    assert cluster.job(job)["NodeList"] == "node[1-2]"
    cluster.run("scontrol", "update", "nodename=node2", "state=drain", "reason=test")
    assert cluster.states()[1] in ("draining", "draining*")
    cluster.run("scontrol", "requeue", str(job))
    until(lambda: cluster.job(job)["JobState"] == "PENDING", 60, lambda: "it does not end")
    # Slurm starts a requeued job two minutes later; an administrator may be faster.
    cluster.run("scontrol", "update", f"jobid={job}", "starttime=now+2")
    cut = finish(cluster, job, output)

    assert cluster.job(job)["Restarts"] == "1"
    assert cluster.job(job)["NodeList"] == "node[1,3]"
    assert cluster.states()[1] == "drained"
    begins = [int(step) for step in re.findall(r"^begin at step (\d+) ", cut, re.MULTILINE)]
    assert begins[0] == 0
    assert begins[1] in (10, 20, 30), begins
    assert weights(cut) == weights(calm)
    cluster.run("scontrol", "update", "nodename=node2", "state=resume")
