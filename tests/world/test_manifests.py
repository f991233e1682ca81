"""The manifests are valid by the schemas of what they are for.

Real: Kubernetes' own schemas (kubernetes-validate) for what is in Kubernetes itself, also for the
pods within custom resources; the models that Kubeflow generates from its custom resources, which
refuse unknown values but not unknown keys, so keys are compared. Not here: a cluster, and
SkyPilot's schema.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="PyYAML is not installed: make world")
import yaml

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
    elif manifest["kind"] == "PyTorchJob":
        for replica in spec["pytorchReplicaSpecs"].values():
            yield replica["template"]
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


JOBS = ("jobset.yaml", "pytorchjob.yaml", "trainjob.yaml")


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
    for file in ("jobset.yaml", "pytorchjob.yaml"):
        (manifest,) = documents(file)
        for pod in pods(manifest):
            meta = {"name": "pod", **pod["metadata"]}
            validate({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod["spec"]})
    (jobset,) = documents("jobset.yaml")
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


def test_the_pytorchjob_has_the_fields_of_its_model():
    training = pytest.importorskip(
        "kubeflow.training", reason="kubeflow-training is not installed: make world"
    )
    (manifest,) = documents("pytorchjob.yaml")
    known = training.KubeflowOrgV1PyTorchJobSpec.attribute_map.values()
    replica = training.KubeflowOrgV1ReplicaSpec.attribute_map.values()
    assert set(manifest["spec"]) <= set(known)
    for name, spec in manifest["spec"]["pytorchReplicaSpecs"].items():
        assert name in ("Master", "Worker")
        assert set(spec) <= set(replica)
        assert [c["name"] for c in spec["template"]["spec"]["containers"]] == ["pytorch"]


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
