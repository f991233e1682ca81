"""A Slurm cluster on this machine: a real slurmctld, a slurmd for each virtual node, and munge.

Real: the daemons, the scheduling, srun's launch of tasks, draining and requeueing, the network
between the nodes. Stand-ins: a node is a network namespace with its own host name, and all nodes
share one file system and one set of processors; Slurm limits neither processors nor memory.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pycomm.bench.netlab import LabUnavailable
from tests.world.nodes import Nodes

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
        self._daemon(
            0,
            [
                "munged",
                "--foreground",
                "--force",
                f"--key-file={key}",
                *files,
                f"--socket={munge['socket']}",
            ],
        )
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

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
