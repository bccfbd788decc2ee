"""MPIJobs on a real API server: made once, watched, refused with a reason. Nothing runs here: no pod, no operator."""

from __future__ import annotations

import copy
import re
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from mxdist.errors import LaunchError, SpecError
from mxdist.launch.base import Life
from mxdist.launch.bundle import Bundle
from mxdist.launch.client import JobClient
from mxdist.launch.kubernetes import KubernetesLauncher
from mxdist.launch.kubernetes_api import KubernetesApi
from mxdist.launch.kubernetes_watch import JobWatch
from mxdist.launch.mpijob_schema import check
from mxdist.spec import JobState, parse_job
from mxdist.store import Attempt, JobRun, Result, open_store
from mxdist.store.run import State
from stack.ports import free_ports
from stack.processes import wait_until
from support.kube import ADMIN, MXDIST, STRANGER, Cluster, documented_rules, running_cluster

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "of-s3", "HOME": "/not/allowed"}
BUNDLE = Bundle({"mxdist/__init__.py": b""})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


@pytest.fixture
def namespace(cluster: Cluster) -> str:
    """A fresh namespace, in which the user ``mxdist`` has the rights that the documentation grants."""
    made = cluster.namespace()
    cluster.grant(made, documented_rules())
    return made


def attempt_in(namespace: str, folder: Path, limits: dict[str, Any] | None = None, **kubernetes: Any) -> Attempt:
    job = parse_job(
        {
            "name": "mnist", "script": {"path": "/home/ada/train.py"}, "parallelism": {"world_size": 2},
            "limits": limits or {},
            "cluster": {
                "kind": "kubernetes", "nodes": 2,
                "kubernetes": {"namespace": namespace, "image": "registry.local/node:1", **kubernetes},
            },
        }
    )  # fmt: skip
    return JobRun(open_store(str(folder / "runs")), f"key-{uuid.uuid4().hex[:8]}").claim(job, after=0)


def launcher_of(cluster: Cluster, user: str = MXDIST) -> KubernetesLauncher:
    return KubernetesLauncher(kubeconfig=str(cluster.kubeconfig(user)))


def status(kind: str, *, completed: bool = False, message: str = "") -> dict[str, Any]:
    """The status that an operator writes."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    last = {"type": kind, "status": "True", "message": message or f"MPIJob is {kind.lower()}."}
    conditions = [{"type": "Created", "status": "True"}, last]
    return {"conditions": conditions, **({"completionTime": now} if completed else {})}


def pod_of(job: dict[str, Any], name: str, **more: Any) -> dict[str, Any]:
    """A pod as the operator makes it: it holds its MPIJob back from being deleted in the foreground."""
    template = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    container = {"name": "worker", "image": template["spec"]["containers"][0]["image"]}
    return {
        "metadata": {"name": name, "labels": template["metadata"]["labels"]},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 3600, **more},
    }


def test_of_many_launchers_at_once_one_makes_the_job(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path)
    with ThreadPoolExecutor(4) as pool:
        started = list(
            pool.map(
                lambda launcher: launcher.start(attempt, BUNDLE, incarnation=1, secrets=KEYS),
                [launcher_of(cluster) for _ in range(4)],
            )
        )

    assert sorted(started) == [False, False, False, True]
    (job,) = cluster.jobs(namespace)
    assert job["metadata"]["name"] == f"mxdist-{attempt.claim.job_key}-1-1"
    assert launcher_of(cluster).life(attempt) is Life.ALIVE


def test_keys_stand_in_one_secret_that_belongs_to_the_job(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path)
    for _ in range(2):
        launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets=KEYS)

    (secret,) = cluster.core.list_namespaced_secret(namespace).items
    (job,) = cluster.jobs(namespace)
    assert secret.data.keys() == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    (owner,) = secret.metadata.owner_references
    assert (owner.kind, owner.uid) == ("MPIJob", job["metadata"]["uid"])
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["envFrom"] == [{"secretRef": {"name": secret.metadata.name}}]
    assert "of-s3" not in yaml.safe_dump(job)


def test_secret_that_a_killed_launcher_did_not_make_is_made_by_the_next(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    attempt = attempt_in(namespace, tmp_path)
    launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets=KEYS)
    (secret,) = cluster.core.list_namespaced_secret(namespace).items
    cluster.core.delete_namespaced_secret(secret.metadata.name, namespace)  # as if it had died in between

    assert not launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets=KEYS)
    (again,) = cluster.core.list_namespaced_secret(namespace).items
    assert again.metadata.name == secret.metadata.name


def test_job_whose_secret_is_refused_is_deleted_and_made_by_the_next_try(cluster: Cluster, tmp_path: Path) -> None:
    namespace = cluster.namespace()
    cluster.grant(namespace, [rule for rule in documented_rules() if "secrets" not in rule["resources"]])
    attempt = attempt_in(namespace, tmp_path)
    with pytest.raises(LaunchError, match=r'cannot create resource "secrets".*docs/kubernetes.md'):
        launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets=KEYS)
    (job,) = cluster.jobs(namespace)
    assert "deletionTimestamp" in job["metadata"]
    cluster.release(job)
    assert launcher_of(cluster).life(attempt) is Life.NEVER

    assert launcher_of(cluster, ADMIN).start(attempt, BUNDLE, incarnation=1, secrets=KEYS)
    assert len(cluster.core.list_namespaced_secret(namespace).items) == 1


def test_secret_that_the_job_names_is_used_instead(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path, secret="ours")
    launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets=KEYS)

    assert cluster.core.list_namespaced_secret(namespace).items == []
    (job,) = cluster.jobs(namespace)
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["envFrom"] == [{"secretRef": {"name": "ours"}}]


def test_job_of_another_attempt_with_the_same_name_is_left_alone(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    first = attempt_in(namespace, tmp_path)
    launcher_of(cluster).start(first, BUNDLE, incarnation=1, secrets={})
    elsewhere = JobRun(open_store(str(tmp_path / "other")), first.claim.job_key).claim(first.claim.parsed(), after=0)

    with pytest.raises(LaunchError, match="belongs to another attempt") as caught:
        launcher_of(cluster).start(elsewhere, BUNDLE, incarnation=1, secrets={})
    assert not caught.value.retryable
    assert launcher_of(cluster).life(elsewhere) is Life.NEVER
    launcher_of(cluster).kill(elsewhere, grace_s=0)
    assert len(cluster.jobs(namespace)) == 1


def test_cluster_that_knows_no_mpijob_is_told(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path)
    cluster.uninstall()
    try:
        with pytest.raises(LaunchError, match="install Kubeflow's mpi-operator") as caught:
            launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets={})
        found = {one.check: one for one in findings(cluster, attempt)}
    finally:
        cluster.install()
    assert not caught.value.retryable
    assert "mpi-operator" in found["mpijob"].problem


def test_account_without_rights_is_told(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path)
    with pytest.raises(LaunchError, match=r'cannot create resource "mpijobs".*docs/kubernetes.md') as caught:
        launcher_of(cluster, STRANGER).start(attempt, BUNDLE, incarnation=1, secrets={})
    assert not caught.value.retryable
    found = {one.check: one.problem for one in findings(cluster, attempt, user=STRANGER)}
    every = "create mpijobs, get mpijobs, list mpijobs, watch mpijobs, delete mpijobs, list pods, delete pods"
    assert f"we may not {every}, create secrets in namespace {namespace}" in found["rights"]


def test_wrong_token_is_told(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    path = cluster.kubeconfig()
    path.write_text(path.read_text().replace(cluster.server.tokens[ADMIN], "f" * 32))
    attempt = attempt_in(namespace, tmp_path)
    with pytest.raises(LaunchError, match="credentials are wrong or have expired"):
        KubernetesLauncher(kubeconfig=str(path)).start(attempt, BUNDLE, incarnation=1, secrets={})
    (row,) = KubernetesLauncher(kubeconfig=str(path)).findings(attempt.claim.parsed(), "key", runs_uri="s3://runs")
    assert row.check == "server"
    assert "cannot ask for the server's version: Unauthorized. Its credentials are wrong" in row.problem


def test_full_quota_is_told_and_may_pass(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    hard, used = {"count/mpijobs.kubeflow.org": "1"}, {"count/mpijobs.kubeflow.org": "0"}
    cluster.core.create_namespaced_resource_quota(namespace, {"metadata": {"name": "few"}, "spec": {"hard": hard}})
    # a controller does this, where one runs; from then on the server counts
    cluster.core.patch_namespaced_resource_quota_status("few", namespace, {"status": {"hard": hard, "used": used}})
    refused: list[LaunchError] = []

    def taken() -> bool:
        try:
            return launcher_of(cluster).start(attempt_in(namespace, tmp_path), BUNDLE, incarnation=1, secrets={})
        except LaunchError as error:
            refused.append(error)
            return False

    assert wait_until(taken, 60)  # the server looks at quotas anew every few seconds only
    assert all("status unknown for quota" in error.message and error.retryable for error in refused)
    assert not taken()
    assert "exceeded quota: few" in refused[-1].message
    assert "raise the namespace's quota" in refused[-1].hint
    assert refused[-1].retryable
    found = {one.check: one.problem for one in findings(cluster, attempt_in(namespace, tmp_path))}
    assert "count/mpijobs.kubeflow.org: the job takes 1, of quota few 0 of 1 are left" in found["quota"]


def test_namespace_that_is_not_there_is_told(cluster: Cluster, tmp_path: Path) -> None:
    attempt = attempt_in("nowhere", tmp_path)
    with pytest.raises(LaunchError, match="Create the namespace first"):
        launcher_of(cluster, ADMIN).start(attempt, BUNDLE, incarnation=1, secrets={})


def test_nobody_in_particular_is_told_to_log_in(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    path = cluster.kubeconfig()
    path.write_text(path.read_text().replace(f"token: {cluster.server.tokens[ADMIN]}", "username: nobody"))
    attempt = attempt_in(namespace, tmp_path)
    with pytest.raises(LaunchError, match="credentials are wrong or have expired"):
        KubernetesLauncher(kubeconfig=str(path)).start(attempt, BUNDLE, incarnation=1, secrets={})


def test_server_that_does_not_answer_is_told(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    launcher = KubernetesLauncher(kubeconfig=str(cluster.kubeconfig(url=f"https://127.0.0.1:{port}")))
    attempt = attempt_in(namespace, tmp_path)
    with pytest.raises(LaunchError, match="the API server does not answer") as caught:
        launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    assert caught.value.retryable
    with pytest.raises(LaunchError, match="the API server does not answer"):
        launcher.life(attempt)
    (row,) = launcher.findings(attempt.claim.parsed(), "key", runs_uri="s3://runs")
    assert (row.check, "the API server does not answer" in row.problem) == ("server", True)
    attempt.write_state(State(heartbeat=time.time()))
    assert launcher.life(attempt) is Life.ALIVE  # the supervisor writes: the cluster's state does not matter


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.runPolicy.cleanPodPolicy", "Everything"),
        ("spec.runPolicy.cleanPodsPolicy", "All"),
        ("spec.launcherCreationPolicy", "WhenWorkersAreReady"),
        ("spec.mpiReplicaSpecs.Workers", {"replicas": 2}),
        ("spec.mpiReplicaSpecs.Worker.restartPolicy", "Sometimes"),
    ],
)
def test_what_the_server_takes_without_a_word_is_refused_by_us(
    cluster: Cluster, namespace: str, tmp_path: Path, path: str, value: Any
) -> None:
    attempt = attempt_in(namespace, tmp_path)
    launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets={})
    (made,) = cluster.jobs(namespace)
    metadata = {name: made["metadata"][name] for name in ("name", "namespace", "labels", "annotations")}
    manifest = copy.deepcopy({**made, "metadata": {**metadata, "name": "wrong"}})
    check(manifest)  # what the server has of it is what was sent
    *way, last = path.split(".")
    place = manifest
    for step in way:
        place = place[step]
    place[last] = value

    KubernetesApi(cluster.client()).create_job(manifest)  # taken
    with pytest.raises(SpecError, match=re.escape(path)):
        check(manifest)


def test_watch_tells_every_change_to_its_end(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path, queue="gpus")
    launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets={})
    (job,) = cluster.jobs(namespace)
    where = ("kubeflow.org", "v2beta1", namespace, "mpijobs", job["metadata"]["name"])
    seen: list[str] = []

    for standing in launcher_of(cluster).watch(attempt, timeout_s=120):
        seen.append(standing.phase)
        if standing.phase == "queued":
            assert standing.message == "it waits in queue gpus"
            cluster.custom.patch_namespaced_custom_object(*where, {"spec": {"runPolicy": {"suspend": False}}})
        elif standing.phase == "new":
            cluster.set_status(job, status("Running"))
        elif standing.phase == "running":
            cluster.set_status(job, status("Succeeded", completed=True))
    assert seen == ["queued", "new", "running", "succeeded"]


def test_watch_lists_again_when_the_server_has_forgotten_where_it_was(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    attempt = attempt_in(namespace, tmp_path)
    launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets={})
    watch = JobWatch(KubernetesApi(cluster.client(MXDIST)), namespace, "mxdist/attempt", version="1")

    jobs = next(watch.snapshots(60))

    assert list(jobs) == [f"mxdist-{attempt.claim.job_key}-1-1"]
    assert watch.lists == 1


def test_watch_goes_on_where_an_earlier_one_stopped(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    api = KubernetesApi(cluster.client(MXDIST))
    first = JobWatch(api, namespace, "mxdist/attempt")
    assert next(first.snapshots(60)) == {}
    attempt = attempt_in(namespace, tmp_path)
    launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets={})

    second = JobWatch(api, namespace, "mxdist/attempt", version=first.version)
    assert list(next(second.snapshots(60))) == [f"mxdist-{attempt.claim.job_key}-1-1"]
    assert second.lists == 0


def test_watch_outlives_a_restart_of_the_server(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path)
    launcher_of(cluster).start(attempt, BUNDLE, incarnation=1, secrets={})
    watch = JobWatch(KubernetesApi(cluster.client(MXDIST)), namespace, "mxdist/attempt")
    snapshots = watch.snapshots(300)
    assert len(next(snapshots)) == 1
    cluster.server.restart()
    (job,) = cluster.jobs(namespace)
    cluster.set_status(job, status("Running"))

    found = next(snapshots)
    assert [one["status"]["conditions"][-1]["type"] for one in found.values()] == ["Running"]


def test_start_that_came_to_nothing_is_told_and_counted(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt, launcher = attempt_in(namespace, tmp_path), launcher_of(cluster)
    launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    (job,) = cluster.jobs(namespace)
    name = f"{job['metadata']['name']}-launcher-abcde"
    cluster.core.create_namespaced_pod(namespace, pod_of(job, name))
    ended = {"exitCode": 1, "message": "cannot read s3://runs: InvalidAccessKeyId"}
    container = {"name": "worker", "ready": False, "restartCount": 0, "image": "x", "imageID": "x"}
    words = {"containerStatuses": [{**container, "state": {"terminated": ended}}]}
    cluster.core.patch_namespaced_pod_status(name, namespace, {"status": words})
    cluster.set_status(job, status("Failed", completed=True, message="Job has reached the specified backoff limit"))

    assert launcher.life(attempt) is Life.DEAD
    with pytest.raises(LaunchError, match=r"came to nothing: .*exit code 1: cannot read s3://runs: InvalidAccessKeyId"):
        launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    assert attempt.supervisors.last() == 1
    assert launcher.start(attempt, BUNDLE, incarnation=2, secrets={})
    assert launcher.life(attempt) is Life.ALIVE


def test_evicted_worker_is_not_the_end(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt, launcher = attempt_in(namespace, tmp_path), launcher_of(cluster)
    launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    (job,) = cluster.jobs(namespace)
    cluster.set_status(job, status("Failed", message="1/2 workers are evicted"))  # while the launcher goes on

    assert launcher.life(attempt) is Life.ALIVE
    cluster.set_status(job, status("Failed", completed=True))
    assert launcher.life(attempt) is Life.DEAD


def test_kill_waits_until_the_last_pod_is_gone(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt, launcher = attempt_in(namespace, tmp_path), launcher_of(cluster)
    launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    (job,) = cluster.jobs(namespace)
    name = f"{job['metadata']['name']}-worker-0"
    # A pod on a node stays until its kubelet says that it is gone, which here is the test.
    cluster.core.create_namespaced_pod(namespace, pod_of(job, name, nodeName="node1"))
    with ThreadPoolExecutor(1) as pool:
        kill = pool.submit(launcher.kill, attempt, grace_s=2.5)
        assert wait_until(lambda: _deletion(cluster, namespace, name) is not None, 60)
        assert _deletion(cluster, namespace, name) == 3  # not the pod's own hour
        assert not kill.done()
        cluster.release(job)
        cluster.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
        kill.result(60)
    assert cluster.jobs(namespace) == []
    assert launcher.life(attempt) is Life.NEVER


def test_kill_tells_what_a_silent_node_keeps(
    cluster: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxdist.launch.kubernetes._KILL_S", 1.0)
    attempt, launcher = attempt_in(namespace, tmp_path), launcher_of(cluster)
    launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    (job,) = cluster.jobs(namespace)
    name = f"{job['metadata']['name']}-worker-0"
    cluster.core.create_namespaced_pod(namespace, pod_of(job, name, nodeName="node1"))
    with pytest.raises(LaunchError, match=f"these are still there: .*pod {name} on node node1"):
        launcher.kill(attempt, grace_s=0)


def test_preflight_of_a_good_cluster_finds_no_problem(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    found = findings(cluster, attempt_in(namespace, tmp_path))
    assert [(one.check, one.problem) for one in found] == [
        ("server", ""), ("mpijob", ""), ("rights", ""), ("admission", ""), ("quota", ""),
    ]  # fmt: skip
    assert cluster.jobs(namespace) == []


def test_preflight_compares_the_job_with_the_quota(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    hard = {"pods": "10", "requests.nvidia.com/gpu": "4", "limits.memory": "16Gi"}
    used = {"pods": "8", "requests.nvidia.com/gpu": "0", "limits.memory": "0"}
    cluster.core.create_namespaced_resource_quota(namespace, {"metadata": {"name": "small"}, "spec": {"hard": hard}})
    cluster.core.patch_namespaced_resource_quota_status("small", namespace, {"status": {"hard": hard, "used": used}})
    attempt = attempt_in(namespace, tmp_path, gpus_per_worker=4, memory_per_worker="1Gi")

    (problem,) = [one.problem for one in findings(cluster, attempt) if one.check == "quota"]
    assert problem == (
        "pods: the job takes 3, of quota small 2 of 10 are left; "
        "requests.nvidia.com/gpu: the job takes 8, quota small allows 4"
    )


def test_client_cancels_a_job_that_still_waits(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path, queue="gpus")
    client = JobClient(attempt.job.runs, launcher_of(cluster))
    client.launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    (job,) = cluster.jobs(namespace)
    with ThreadPoolExecutor(1) as pool:
        cancel = pool.submit(client.cancel, attempt, by="user", reason="no longer wanted", wait_s=0.5)
        assert wait_until(lambda: "deletionTimestamp" in cluster.jobs(namespace)[0]["metadata"], 60)
        cluster.release(job)
        assert cancel.result(60).state is JobState.CANCELLED
    assert cluster.jobs(namespace) == []


def test_job_whose_time_is_up_in_the_queue_is_ended(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path, limits={"deadline_s": 0.1}, queue="gpus")
    client = JobClient(attempt.job.runs, launcher_of(cluster))
    client.launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    (job,) = cluster.jobs(namespace)
    assert wait_until(lambda: time.time() > attempt.claim.submitted_at + 0.1, 60)
    with ThreadPoolExecutor(1) as pool:
        revive = pool.submit(client.revive, attempt)
        assert wait_until(lambda: "deletionTimestamp" in cluster.jobs(namespace)[0]["metadata"], 60)
        cluster.release(job)
        assert revive.result(60)
    result = attempt.result()
    assert result is not None
    assert result.state is JobState.DEADLINE


def test_job_whose_result_was_taken_is_forgotten(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    attempt = attempt_in(namespace, tmp_path)
    client = JobClient(attempt.job.runs, launcher_of(cluster))
    client.launcher.start(attempt, BUNDLE, incarnation=1, secrets={})
    client.forget(attempt)
    (job,) = cluster.jobs(namespace)
    assert "deletionTimestamp" not in job["metadata"]  # it is not over
    attempt.finish(Result(JobState.SUCCEEDED, time.time()))
    client.forget(attempt)
    assert "deletionTimestamp" in cluster.jobs(namespace)[0]["metadata"]
    JobClient(attempt.job.runs, launcher_of(cluster, STRANGER)).forget(attempt)  # who may not, need not


def test_refusal_is_told_before_anything_is_claimed(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    job = attempt_in(namespace, tmp_path).claim.parsed()
    launcher_of(cluster).check(job)
    with pytest.raises(LaunchError, match="cannot create resource"):
        launcher_of(cluster, STRANGER).check(job)
    assert cluster.jobs(namespace) == []


def findings(cluster: Cluster, attempt: Attempt, user: str = MXDIST) -> list[Any]:
    launcher = launcher_of(cluster, user)
    return launcher.findings(attempt.claim.parsed(), attempt.claim.job_key, runs_uri="s3://runs", has_keys=True)


def _deletion(cluster: Cluster, namespace: str, name: str) -> int | None:
    seconds: int | None = cluster.core.read_namespaced_pod(name, namespace).metadata.deletion_grace_period_seconds
    return seconds
