"""The MPIJob of a job against golden files, its names, and what is refused before it is sent."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mxdist.errors import SpecError
from mxdist.launch.hosts import place
from mxdist.launch.kubernetes import KubernetesLauncher
from mxdist.launch.mpijob import Start, build, job_name, token_label
from mxdist.launch.mpijob_schema import check
from mxdist.spec import parse_job

GOLDEN = Path(__file__).parent / "golden"
MANIFEST = {"manifest_uri": "s3://data/mnist/manifests/1.json", "version": "0" * 64}
SMALL = {"kind": "kubernetes", "nodes": 2, "kubernetes": {"image": "registry.local/node-cpu:1"}}
LARGE = {
    "kind": "kubernetes", "slots": 4, "workdir": "/scratch/jobs", "python": "/usr/bin/python3",
    "kubernetes": {
        "namespace": "vision", "image": "registry.local/node-cu112@sha256:ab", "image_pull_secrets": ["registry"],
        "service_account": "trainer", "secret": "s3-and-mlflow", "queue": "gpus", "priority_class": "high",
        "gang_timeout_s": 300, "gpus_per_worker": 4, "cpus_per_worker": "7500m", "memory_per_worker": "60.5Gi",
        "node_selector": {"nvidia.com/gpu.product": "A100"},
    },
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "kubernetes_two_workers": {
        "name": "mnist", "model": {"name": "lenet"}, "dataset": MANIFEST, "parallelism": {"world_size": 2},
        "cluster": SMALL,
    },
    "kubernetes_everything": {
        "name": "resnet", "model": {"name": "lenet"}, "batch_size": 60, "dataset": MANIFEST,
        "parallelism": {"world_size": 12},
        "limits": {"deadline_s": 3600.5, "grace_s": 29.5}, "cluster": LARGE,
        "storage": {"endpoint_url": "https://s3.local"},
    },
}  # fmt: skip


def manifest_of(name: str, *, secret: str | None = None, **changes: Any) -> dict[str, Any]:
    job = parse_job(JOBS[name])
    start = Start(
        **{
            "job_key": "train-0123456789abcdef", "attempt": 3, "incarnation": 2, "token": "a-token", "nonce": "a-nonce",
            "document": {"what": "supervisor"}, "texts": {"MXDIST_POD": "<pod>"},
            "command": ["/opt/node/bin/python", "-c", "..."], **changes,
        }
    )  # fmt: skip
    return build(job, place(job), start, secret=secret or job.cluster.kubernetes.secret)


def test_dollars_arrive_as_they_are() -> None:
    workdir = "/scratch/$(id)/$$/$HOME"
    spec = manifest_of("kubernetes_two_workers", document={"workdir": workdir})["spec"]
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    sent = next(one["value"] for one in launcher["env"] if one["name"] == "MXDIST_DOCUMENT")
    pairs = re.findall(r"\$\$|[^$]", sent)
    assert "".join(pairs) == sent, "a single $ could begin $(NAME), which Kubernetes replaces"
    assert json.loads("".join(pair[0] for pair in pairs)) == {"workdir": workdir}


@pytest.mark.parametrize("name", JOBS)
def test_manifest_is_the_golden_one(name: str) -> None:
    manifest = manifest_of(name)
    check(manifest)
    assert yaml.safe_dump(manifest, sort_keys=False, width=1000) == (GOLDEN / f"{name}.yaml").read_text()


def test_every_worker_counts_for_the_gang_but_not_the_launcher_that_waits_for_them() -> None:
    policy = manifest_of("kubernetes_everything")["spec"]["runPolicy"]["schedulingPolicy"]
    assert policy["minAvailable"] == 3
    # three workers of 7.5 cores, 60.5 GiB and 4 GPUs
    assert policy["minResources"] == {"cpu": "22500m", "memory": "181.5Gi", "nvidia.com/gpu": "12"}


def test_net_is_beyond_the_deadline_the_grace_and_the_last_words() -> None:
    policy = manifest_of("kubernetes_everything")["spec"]["runPolicy"]
    assert policy["activeDeadlineSeconds"] == 3600 + 30 + 90 + 600  # 3600.5 + 29.5 is a whole number
    assert "activeDeadlineSeconds" not in manifest_of("kubernetes_two_workers")["spec"]["runPolicy"]


def test_secrets_go_to_the_launcher_alone_and_by_name() -> None:
    roles = manifest_of("kubernetes_two_workers", secret="keys-1")["spec"]["mpiReplicaSpecs"]
    containers = {role: roles[role]["template"]["spec"]["containers"][0] for role in roles}
    assert containers["Launcher"]["envFrom"] == [{"secretRef": {"name": "keys-1"}}]
    assert "envFrom" not in containers["Worker"]


def test_token_stands_in_labels_as_a_digest() -> None:
    label = hashlib.sha256(b"a-token").hexdigest()[:40]
    manifest = manifest_of("kubernetes_two_workers")
    templates = [role["template"] for role in manifest["spec"]["mpiReplicaSpecs"].values()]
    assert [one["metadata"]["labels"]["mxdist/attempt"] for one in (manifest, *templates)] == [label] * 3
    assert token_label("a-token") == label


@pytest.mark.parametrize(
    ("key", "attempt", "incarnation", "workers"),
    [
        ("a", 1, 1, 1), ("1st", 1, 1, 1), ("train-0123456789abcdef", 1, 1, 2), ("k" * 80, 1, 1, 1),
        ("k" * 80, 99, 12, 512),
        ("ends-with-a-hyphen-where-it-is-" + "-cut" * 10, 1, 1, 2), ("k" * 47, 1, 1, 1),
    ],
)  # fmt: skip
def test_last_worker_has_a_name_of_63_letters_at_most(key: str, attempt: int, incarnation: int, workers: int) -> None:
    name = job_name(key, attempt, incarnation, workers=workers)

    longest = max(len(f"{name}-worker-{workers - 1}"), len(f"{name}-launcher"))
    assert longest <= 63
    assert name.startswith("mxdist-")
    assert name.endswith(f"-{attempt}-{incarnation}")
    manifest = manifest_of("kubernetes_two_workers")
    manifest["metadata"]["name"] = name
    manifest["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] = workers
    check(manifest)


def test_short_keys_stay_and_long_ones_stay_different() -> None:
    assert job_name("mnist-0123456789ab", 2, 1, workers=2) == "mxdist-mnist-0123456789ab-2-1"
    # 63 letters less "-launcher", "mxdist-" and "-1-1": the longest that fits as it is
    assert job_name("k" * 43, 1, 1, workers=10) == f"mxdist-{'k' * 43}-1-1"
    assert job_name("k" * 44, 1, 1, workers=10) != f"mxdist-{'k' * 44}-1-1"
    assert job_name("k" * 43, 1, 1, workers=11) != f"mxdist-{'k' * 43}-1-1"
    assert job_name("k" * 70 + "a", 1, 1, workers=2) != job_name("k" * 70 + "b", 1, 1, workers=2)


def _set(path: str, value: Any) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for step in way:
            manifest = manifest[int(step)] if step.isdigit() else manifest[step]  # type: ignore[index]
        manifest[last] = value

    return change


_WORKER = "spec.mpiReplicaSpecs.Worker"
WRONG = {
    "unknown field": ("spec.runPolicy.cleanPodPolicies", "All", "spec.runPolicy.cleanPodPolicies: no such field"),
    "bad enum": ("spec.runPolicy.cleanPodPolicy", "Al", "spec.runPolicy.cleanPodPolicy: input should be 'None'"),
    "bad role": ("spec.mpiReplicaSpecs.Workers", {}, "spec.mpiReplicaSpecs.Workers: no such field"),
    "restart policy": (f"{_WORKER}.restartPolicy", "Always", f"{_WORKER}.restartPolicy: input should be 'Never'"),
    "type": (f"{_WORKER}.replicas", "2", f"{_WORKER}.replicas: input should be a valid integer"),
    "truth": ("spec.runPolicy.suspend", "false", "spec.runPolicy.suspend: input should be a valid boolean"),
    "no worker": (f"{_WORKER}.replicas", 0, f"{_WORKER}.replicas: input should be greater than or equal to 1"),
    "pod field": (f"{_WORKER}.template.spec.hostNetwrok", True, f"{_WORKER}.template.spec.hostNetwrok: no such field"),
    "quantity": (
        f"{_WORKER}.template.spec.containers.0.resources", {"limits": {"cpu": "two"}},
        f"{_WORKER}.template.spec.containers.0.resources.limits.cpu: string should match pattern",
    ),
    "label": ("metadata.labels", {"mxdist/attempt": "a b"}, "metadata.labels.mxdist/attempt: string should match"),
    "null": ("spec.runPolicy.backoffLimit", None, "spec.runPolicy.backoffLimit: input should be a valid integer"),
    "long name": ("metadata.name", "m" * 55, "no pod can be called so"),
    "digit first": ("metadata.name", "1st", "no pod can be called so"),
    "volume": (f"{_WORKER}.template.spec.volumes", [], "volumes and volumeMounts differ in jobs, shm"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_manifest_is_refused_with_the_path(what: str) -> None:
    path, value, told = WRONG[what]
    manifest = copy.deepcopy(manifest_of("kubernetes_two_workers"))
    _set(path, value)(manifest)

    with pytest.raises(SpecError) as caught:
        check(manifest)
    assert told in str(caught.value)


def test_all_problems_are_told_at_once() -> None:
    manifest = manifest_of("kubernetes_two_workers")
    manifest["spec"]["slotsPerWorker"] = 0
    del manifest["spec"]["sshAuthMountPath"]
    with pytest.raises(SpecError) as caught:
        check(manifest)
    assert [problem.path for problem in caught.value.problems] == ["spec.slotsPerWorker", "spec.sshAuthMountPath"]


def test_what_is_sent_is_shown_without_what_exists_only_later() -> None:
    job = parse_job(JOBS["kubernetes_everything"])
    (sent,) = KubernetesLauncher().sends(job, "train-0123456789abcdef", runs_uri="s3://runs")

    assert sent.title == "MPIJob to namespace vision"
    manifest = yaml.safe_load(sent.text)
    assert manifest["metadata"]["name"] == "mxdist-train-0123456789abcdef-<attempt>-1"
    variables = {one["name"]: one["value"] for one in _launcher(manifest)["env"]}
    assert variables["MXDIST_POD"] == "<mxdist_pod>"
    document = json.loads(variables["MXDIST_DOCUMENT"])
    assert document["code"] == {"how": "bundle", "uri": "s3://runs/_code/<digest>.zip", "digest": "<digest>"}
    assert document["storage"]["endpoint_url"] == "https://s3.local"


@pytest.mark.parametrize(
    ("runs_uri", "code", "told"),
    [("/mnt/runs", "bundle", "which no pod sees"), ("s3://runs", "shared", "pods share no disk")],
)
def test_what_no_pod_could_read_is_refused(runs_uri: str, code: str, told: str) -> None:
    job = parse_job({**JOBS["kubernetes_two_workers"], "cluster": {**SMALL, "code": code}})
    with pytest.raises(SpecError, match=told):
        KubernetesLauncher().plan(job, "key", runs_uri=runs_uri)


def test_plan_places_ranks_on_workers() -> None:
    job = parse_job(JOBS["kubernetes_everything"])
    plan = KubernetesLauncher().plan(job, "key", runs_uri="s3://runs")
    assert len(plan.ranks) == 12
    assert plan.python == "/usr/bin/python3"
    assert plan.attempt_dir == "/scratch/jobs/key/<attempt>"


def test_image_brings_mxdist_but_not_the_users_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()\n")
    cluster = {**SMALL, "code": "image"}
    model = {**JOBS["kubernetes_two_workers"], "cluster": cluster}
    script = {"name": "own", "script": {"path": str(tmp_path / "train.py")}, "cluster": cluster}
    assert _code(model) == {"how": "image"}
    assert _code(script)["how"] == "bundle"


def _code(job: dict[str, Any]) -> dict[str, str]:
    (sent,) = KubernetesLauncher().sends(parse_job(job), "key", runs_uri="s3://runs")
    variables = {one["name"]: one["value"] for one in _launcher(yaml.safe_load(sent.text))["env"]}
    code: dict[str, str] = json.loads(variables["MXDIST_DOCUMENT"])["code"]
    return code


def _launcher(manifest: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = manifest["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    return container
