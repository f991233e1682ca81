"""The manifests' commands train: process trees in network namespaces stand for pods.

Real: the command, the variables and the secret of each manifest, torchrun, TLS between the ranks,
the names of the pods, the endpoint of the probe, and on which ports ranks listen and connect.
Stand-ins: the namespaces for pods, a folder for the volume, the checkout for the image; what the
controllers set is written here, from their documentation. The script gets a few more arguments.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="PyYAML is not installed: make world")
import yaml

from pycomm.bench.netlab import LabUnavailable
from tests.world.nodes import Nodes
from tests.world.test_manifests import CLOUD, ROOT, containers, policy_ports

MORE = ["--steps", "200", "--pause", "0.1"]
SECRET = "c2VjcmV0IG9mIHRoZSB0ZXN0"


@dataclass
class Pod:
    """What runs on a node."""

    names: list[str]
    command: list[str]
    variables: dict[str, str]


def jobset(node: int) -> Pod:
    (container,) = containers("jobset.yaml")
    names = [f"pycomm-node-0-{node}", f"pycomm-node-0-{node}.ranks"]
    variables = {**plain(container), "JOB_COMPLETION_INDEX": str(node)}
    return Pod(names, [*expanded(container["command"], variables), *MORE], variables)


def trainjob(node: int) -> Pod:
    (trainer,) = containers("trainjob.yaml")
    names = [f"pycomm-node-0-{node}", f"pycomm-node-0-{node}.pycomm"]
    return Pod(names, [*trainer["command"], *MORE], {**plain(trainer), **pet(node, names_of(0))})


def pytorchjob(node: int) -> Pod:
    container = containers("pytorchjob.yaml")[node]
    name = ("pycomm-master-0", "pycomm-worker-0")[node]
    variables = {**plain(container), **pet(node, "pycomm-master-0")}
    return Pod([name], [*container["command"], *MORE], variables)


def sky(node: int) -> Pod:
    task = yaml.safe_load((CLOUD / "sky.yaml").read_text())
    variables = {**task["envs"], "PYCOMM_SECRET": SECRET}
    variables |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(node)}
    variables["SKYPILOT_NODE_IPS"] = "10.77.0.1\n10.77.0.2"
    command = task["run"].rstrip() + " " + " ".join(MORE)
    return Pod([f"machine{node}"], ["bash", "-c", command], variables)


def plain(container: Mapping[str, Any]) -> dict[str, str]:
    """Return a container's variables, with the secret's value."""
    found = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    return {**found, "PYCOMM_SECRET": SECRET}


def pet(node: int, master: str) -> dict[str, str]:
    """Return the variables that Kubeflow's controllers set, of which torchrun takes its options."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(node),
        "PET_MASTER_ADDR": master,
        "PET_MASTER_PORT": "29500",
    }


def names_of(node: int) -> str:
    return f"pycomm-node-0-{node}.pycomm"


def expanded(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Replace $(NAME) as Kubernetes does."""
    return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in command]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [jobset, trainjob, pytorchjob, sky], ids=lambda f: f.__name__)
def test_the_command_trains_on_the_ports_of_the_policy(tmp_path, make):
    pods = [make(node) for node in range(2)]
    try:
        nodes = Nodes(tmp_path, [pod.names for pod in pods])
    except LabUnavailable as error:
        pytest.skip(f"no network namespaces: {error}")
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    image = tmp_path / "image"  # the working directory of the container, or of SkyPilot
    image.mkdir()
    (image / "resume.py").symlink_to(ROOT / "examples/resume.py")
    (image / "examples").symlink_to(ROOT / "examples")
    with nodes:
        started = []
        for node, pod in enumerate(pods):
            kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYCOMM_", "PET_"))}
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            kept |= {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            with open(tmp_path / f"output{node}", "w") as output:
                started.append(
                    subprocess.Popen(
                        [*nodes.wrap(node, {"checkpoints": checkpoints}), *pod.command],
                        env=kept | pod.variables,
                        cwd=image,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            latest = (image if make is sky else tmp_path) / "checkpoints/latest"
            end = time.monotonic() + 300
            while not latest.exists() and all(rank.poll() is None for rank in started):
                assert time.monotonic() < end
                time.sleep(0.2)
            sockets = [listening_and_connected(nodes, node) for node in range(2)]
            codes = [rank.wait(300) for rank in started]
        finally:
            for rank in started:
                rank.kill()
    texts = [(tmp_path / f"output{node}").read_text() for node in range(2)]
    assert codes == [0, 0], texts
    assert re.search(r"^begin at step 0 on 2 ranks: tcp .*TLS", texts[0], re.MULTILINE), texts[0]
    assert "end at step 200" in texts[0]

    policy = [port for ports in policy_ports() for port in ports]
    for listens, connects in sockets:
        assert listens <= set(policy)
        assert connects
        # Each connection has one end on a port of the policy; the other end's is arbitrary.
        assert all({here, there} & set(policy) for here, there in connects), connects
    data = {port for _, connects in sockets for pair in connects for port in pair}
    assert data & set(range(29600, 29700))  # not only the store


def listening_and_connected(nodes: Nodes, node: int) -> tuple[set[int], set[tuple[int, int]]]:
    """Return the ports that other hosts can reach, and the ends of connections between nodes."""
    command = [*nodes.wrap(node), "cat", "/proc/net/tcp", "/proc/net/tcp6"]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    listens, connects = set(), set()
    for line in table.splitlines():
        fields = line.split()
        if ":" not in fields[1]:
            continue
        (host, here), (peer, there) = (field.split(":") for field in fields[1:3])
        if host.endswith("0100007F"):  # loopback
            continue
        if fields[3] == "0A":
            listens.add(int(here, 16))
        elif fields[3] == "01" and peer != host:
            connects.add((int(here, 16), int(there, 16)))
    return listens, connects
