"""The manifests are valid by the schemas of what they are for, and their commands train.

Real: Kubernetes' own schemas (kubernetes-validate) for what is in Kubernetes itself, also for the
pods within custom resources; the models that Kubeflow generates from its custom resources, which
refuse unknown values but not unknown keys, so keys are compared. The command, the variables and the
secret of each manifest, torchrun, TLS between the ranks, the names of the pods, the endpoint of the
probe, and on which ports ranks listen and connect. Not here: a cluster, and SkyPilot's schema.
Stand-ins: network namespaces for pods, a folder for the volume, the checkout for the image; what
the controllers set is written here, from their documentation. The script gets a few more arguments.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="PyYAML is not installed: make world")
import yaml

from pycomm.bench.netlab import LabUnavailable, Netlab

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "examples" / "kubernetes"
CLOUD = ROOT / "examples" / "cloud"


def documents(file: str) -> list[dict[str, Any]]:
    """Return the documents of a file in examples/kubernetes."""
    return [d for d in yaml.safe_load_all((KUBERNETES / file).read_text()) if d]


def pods(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each template of a pod; of a TrainJob, what it patches in the runtime's."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            yield job["template"]["spec"]["template"]
    elif manifest["kind"] == "TrainJob":
        for patch in spec["runtimePatches"]:
            for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                yield job["template"]["spec"]["template"]


def containers(file: str) -> list[dict[str, Any]]:
    """Return the containers of a job; a TrainJob's trainer stands for one."""
    (manifest,) = documents(file)
    if manifest["kind"] == "TrainJob":
        return [manifest["spec"]["trainer"]]
    return [c for pod in pods(manifest) for c in pod["spec"]["containers"]]


def policy_ports() -> list[range]:
    """Return the ports on which the NetworkPolicy lets ranks reach each other."""
    (policy,) = (d for d in documents("common.yaml") if d["kind"] == "NetworkPolicy")
    entries = policy["spec"]["ingress"][0]["ports"]
    return [range(e["port"], e.get("endPort", e["port"]) + 1) for e in entries]


JOBS = ("jobset.yaml", "trainjob.yaml")


@pytest.fixture
def validate() -> Any:
    module = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: make world"
    )
    return lambda manifest: module.validate(manifest, module.latest_version(), strict=True)


def test_what_is_in_kubernetes_itself_is_valid(validate):
    kinds = [document["kind"] for document in documents("common.yaml")]
    assert kinds == ["PersistentVolumeClaim", "NetworkPolicy"]
    for document in documents("common.yaml"):
        validate(document)


def test_the_pods_of_custom_resources_are_valid(validate):
    (jobset,) = documents("jobset.yaml")
    for pod in pods(jobset):
        meta = {"name": "pod", **pod["metadata"]}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod["spec"]})
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": spec})


@pytest.mark.parametrize("file", JOBS)
def test_no_container_has_more_rights_than_it_needs(file):
    (manifest,) = documents(file)
    specs = [pod["spec"] for pod in pods(manifest)]
    assert specs
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }


def test_no_example_puts_its_secret_where_ray_shows_it():
    """Its dashboard shows a job's environment and the arguments of its training."""
    for example in (ROOT / "examples" / "trainers").glob("*ray*.py"):
        assert '"PYCOMM_SECRET": f"file:{file}"' in example.read_text(), example


def test_the_check_finds_a_wrong_pod(validate):
    (manifest,) = documents("jobset.yaml")
    pod = next(pods(manifest))
    pod["spec"]["containers"][0]["livenessProbes"] = {}
    wrong = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod["spec"]}
    with pytest.raises(Exception, match="livenessProbes"):
        validate(wrong)


def unknown_keys(given: Any, model: Any, path: str = "") -> list[str]:
    """Return the paths of what is in a manifest and not in the model that was made of it."""
    if isinstance(given, dict) and isinstance(model, dict):
        return [
            found
            for key, value in given.items()
            for found in (
                unknown_keys(value, model[key], f"{path}.{key}")
                if key in model
                else [f"{path}.{key}"]
            )
        ]
    if isinstance(given, list) and isinstance(model, list):
        pairs = zip(given, model, strict=True)
        return [found for a, b in pairs for found in unknown_keys(a, b, f"{path}[]")]
    return []


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("trainjob.yaml", "TrainerV1alpha1TrainJob"),
        ("jobset.yaml", "JobsetV1alpha2JobSet"),
    ],
)
def test_custom_resources_have_the_fields_of_their_models(file, model):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed: make world"
    )
    (manifest,) = documents(file)
    made = getattr(models, model).from_dict(manifest)
    assert unknown_keys(manifest, json.loads(made.to_json())) == []
    manifest["spec"]["nonsense"] = 1
    made = getattr(models, model).from_dict(manifest)
    assert unknown_keys(manifest, json.loads(made.to_json())) == [".spec.nonsense"]


def test_the_ray_cluster_is_valid():
    util = pytest.importorskip(
        "ray.autoscaler._private.util", reason="ray is not installed: make world"
    )
    config = yaml.safe_load((CLOUD / "ray-cluster.yaml").read_text())
    util.validate_config(util.prepare_config(config))  # what `ray up` does first


@pytest.mark.parametrize("file", JOBS)
def test_ranks_listen_on_the_ports_that_the_policy_opens(file):
    opened = {port for ports in policy_ports() for port in ports}
    for container in containers(file):
        (text,) = (e["value"] for e in container["env"] if e["name"] == "PYCOMM_PORTS")
        first, last = map(int, text.split("-"))
        assert set(range(first, last + 1)) <= opened
    assert 29500 in opened  # the store's, torchrun's default


COMMAND_LINES = re.compile(r"(from-literal|PYCOMM_SECRET)=[^\n]*(urandom|openssl)")


def test_no_secret_is_on_a_command_line():
    """Every user of a host sees the command lines of all."""
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    files = [f for f in (ROOT / "examples").rglob("*") if f.suffix in (".yaml", ".sbatch", ".py")]
    for file in [*pages, *files]:
        for line in file.read_text().splitlines():
            shown = COMMAND_LINES.search(line) and "export " not in line
            assert not shown, f"{file.name}: {line}"


@pytest.mark.parametrize("file", JOBS)
def test_the_secret_is_no_part_of_the_manifest(file):
    for container in containers(file):
        (secret,) = (e for e in container["env"] if e["name"] == "PYCOMM_SECRET")
        assert "value" not in secret
        assert secret["valueFrom"]["secretKeyRef"] == {"name": "pycomm", "key": "secret"}


def test_the_image_runs_as_a_user_by_its_number():
    user = [w for w in (KUBERNETES / "Dockerfile").read_text().splitlines() if w.startswith("USER")]
    assert user == ["USER 1000"]  # a number, or Kubernetes cannot tell that it is not root


def test_what_the_image_copies_exists():
    lines = (KUBERNETES / "Dockerfile").read_text().splitlines()
    sources = [line.split()[1] for line in lines if line.startswith("COPY")]
    wheel = "dist/pycomm-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"  # as `make release` names it
    for source in sources:
        assert (ROOT / source).exists() or fnmatch.fnmatch(wheel, source), source


# -------------------------------------------------------------------------------------------- pods


class Nodes:
    """Nodes 0, 1, ... at 10.77.0.1, 10.77.0.2, ... on one switch without a limit."""

    def __init__(self, folder: Path, names: Sequence[Sequence[str]]) -> None:
        """
        Args:
            folder: for the file of hosts.
            names: of each node; the first is its host name.

        Raises:
            Unavailable: network namespaces are not possible here; the text says why.
        """
        self.names = [list(own) for own in names]
        self.lab = Netlab(len(names), "unlimited")
        self._hosts = folder / "hosts"
        lines = [f"10.77.0.{n} {' '.join(own)}" for n, own in enumerate(names, start=1)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def wrap(self, node: int, mounts: Mapping[str, Path] | None = None) -> list[str]:
        """Return the words that run a command on a node.

        Args:
            node: its number, from 0.
            mounts: folders that the command sees below /mnt, by their names there.
        """
        lines = [
            f"hostname {self.names[node][0]}",
            f"mount --bind {shlex.quote(str(self._hosts))} /etc/hosts",
        ]
        if mounts:
            lines.append("mount -t tmpfs tmpfs /mnt")
        for name, folder in (mounts or {}).items():
            lines += [f"mkdir /mnt/{name}", f"mount --bind {shlex.quote(str(folder))} /mnt/{name}"]
        script = "\n".join([*lines, 'exec "$@"'])
        own = ["unshare", "--mount", "--uts", "sh", "-ec", script, "sh"]
        return [*self.lab.wrap(node), *own]

    def close(self) -> None:
        self.lab.close()


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
    return Pod(
        names,
        [*trainer["command"], *MORE],
        {**plain(trainer), **pet(node, "pycomm-node-0-0.pycomm")},
    )


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


def expanded(command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Replace $(NAME) as Kubernetes does."""
    return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in command]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [jobset, trainjob, sky], ids=lambda f: f.__name__)
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
    with closing(nodes):
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
