"""The manifests of examples/kubernetes and examples/cloud, and the containers in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
