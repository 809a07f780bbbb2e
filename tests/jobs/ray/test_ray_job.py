"""The RayJob that `unisono init ray-job` writes has KubeRay's fields, and what its validation asks
for.

Run: pytest tests/jobs/ray/test_ray_job.py

The names are those of the types of KubeRay 1.6 (ray-operator/apis/ray/v1) and of Kubernetes' pods,
as far as they are used here; no cluster has seen the file.
"""

import re
from typing import Any

import pytest
import yaml

from unisono.front.cli.init import template_text

JOB = {
    "activeDeadlineSeconds", "backoffLimit", "rayClusterSpec", "submitterPodTemplate", "metadata", "clusterSelector", "submitterConfig",
    "managedBy", "deletionStrategy", "entrypoint", "runtimeEnvYAML", "jobId", "submissionMode", "entrypointResources", "entrypointNumCpus",
    "entrypointNumGpus", "ttlSecondsAfterFinished", "shutdownAfterJobFinishes", "suspend",
}  # fmt: skip
CLUSTER = {
    "authOptions", "suspend", "managedBy", "autoscalerOptions", "headServiceAnnotations", "enableInTreeAutoscaling", "gcsFaultToleranceOptions",
    "headGroupSpec", "rayVersion", "workerGroupSpecs",
}  # fmt: skip
HEAD = {"template", "headService", "enableIngress", "rayStartParams", "serviceType", "labels", "resources"}
WORKERS = {
    "suspend", "groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "scaleStrategy", "numOfHosts", "labels",
    "resources",
}  # fmt: skip
POD = {
    "containers",
    "volumes",
    "restartPolicy",
    "terminationGracePeriodSeconds",
    "nodeSelector",
    "tolerations",
}
CONTAINER = {"name", "image", "resources", "volumeMounts", "env", "securityContext", "lifecycle"}


@pytest.fixture
def job() -> dict[str, Any]:
    body: dict[str, Any] = yaml.safe_load(template_text("ray-job"))
    return body


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What the pods of the head and of the workers are to be."""
    spec = job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def test_every_field_is_one_that_kuberay_or_kubernetes_has(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) <= JOB
    assert set(cluster) <= CLUSTER
    assert {"rayStartParams", "template"} <= set(cluster["headGroupSpec"]) <= HEAD
    for group in cluster["workerGroupSpecs"]:
        assert (
            {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"} <= set(group) <= WORKERS
        )
    for pod in pods(job):
        assert set(pod) <= POD
        for container in pod["containers"]:
            assert set(container) <= CONTAINER


def test_it_passes_what_kuberay_checks_of_a_job(job: dict[str, Any]) -> None:
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])
    assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "SidecarMode")
    assert spec["ttlSecondsAfterFinished"] == 0 or spec["shutdownAfterJobFinishes"]
    assert spec["backoffLimit"] >= 0
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "a map of strings"
        assert not (group["rayStartParams"] and group.get("resources")), "it takes one of the two"
        assert group["template"]["spec"]["containers"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "a token needs so much"


def test_every_volume_that_is_mounted_is_there(job: dict[str, Any]) -> None:
    for pod in pods(job):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    shm = next(volume for volume in pods(job)[1]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
