"""Slurm: the sbatch files of examples/slurm train, and a job that is requeued goes on as it was.

Real are slurmctld, slurmd, munge, srun and the network between the nodes; the nodes are namespaces
of this machine, which have host names of their own, and share one file system and one set of
processors; Slurm limits neither processors nor memory.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pycomm.bench.netlab import LabUnavailable
from tests.world.test_manifests import Nodes

ROOT = Path(__file__).parents[2]
STEPS = 40
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")

CONFIG = """
ClusterName=world
SlurmctldHost=node1
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=3
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
MinJobAge=300
NodeName=node[1-{nodes}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """Virtual nodes node1, node2, ... with the daemons of Slurm; the first runs slurmctld, too."""

    def __init__(self, folder: Path, nodes: int) -> None:
        """
        Args:
            folder: an empty folder for configuration, state and logs.
            nodes: number of nodes.

        Raises:
            LabUnavailable: daemons, rights or network namespaces are missing; the text says which.
        """
        missing = [name for name in DAEMONS if not _program(name)]
        if missing:
            raise LabUnavailable(f"no {', '.join(missing)} (apt-get install slurm-wlm munge)")
        if os.geteuid() != 0:
            raise LabUnavailable("slurmd starts jobs as their users, and needs root")
        self.folder = folder
        self.nodes = Nodes(folder, [[f"node{node + 1}"] for node in range(nodes)])
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._start(nodes)
        except BaseException:
            self.close()
            raise

    def _start(self, nodes: int) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o755)
        self.folder.chmod(0o755)
        key = self.folder / "munge/key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        config = CONFIG.format(folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(config)
        munge = {name: f"{self.folder}/munge/{name}" for name in ("socket", "pid", "log", "seed")}
        files = [f"--{name}-file={munge[name]}" for name in ("pid", "log", "seed")]
        # munged insists on folders that only root may write, and /tmp is not one.
        command = ["munged", "--foreground", "--force", f"--key-file={key}", *files]
        self._daemon(0, [*command, f"--socket={munge['socket']}"])
        until(lambda: Path(munge["socket"]).exists(), 10, lambda: "munged made no socket")
        self._daemon(0, ["slurmctld", "-D"])
        for node in range(nodes):
            (self.folder / f"node{node + 1}").mkdir()
            self._daemon(node, ["slurmd", "-D", "-N", f"node{node + 1}"])
        until(lambda: self.states() == ["idle"] * nodes, 60, self._log)

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def _daemon(self, node: int, command: Sequence[str]) -> None:
        program = _program(command[0])
        assert program is not None
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*self.nodes.wrap(node), program, *command[1:]],
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )

    def run(self, *command: str, **options: Any) -> str:
        """Run a command on the first node, and return what it prints."""
        done = subprocess.run(
            [*self.nodes.wrap(0), *command],
            env=self.environment() | options.pop("env", {}),
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def _log(self) -> str:
        return "the nodes did not become idle: " + (self.folder / "daemons.log").read_text()

    def states(self) -> list[str]:
        """Return the state of each node, as sinfo names it."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").split()

    def job(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` says: JobState, Restarts, NodeList, ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def close(self) -> None:
        """Stop the daemons and with them their jobs."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []
        self.nodes.close()


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def until(done: Callable[[], bool], seconds: float, failure: Callable[[], str]) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it is not within these seconds; the text is what `failure` returns.
    """
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, failure()
        time.sleep(0.3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    try:
        cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=3)
    except LabUnavailable as error:
        pytest.skip(f"no Slurm: {error}")
    with closing(cluster):
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
