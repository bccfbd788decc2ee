"""Whole MPIJobs on nodes: from the API server to the weights, cancelled, deleted, with a lost worker. Nothing stays."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster.law import BOUND, FLOAT32_BOUND, Law, make_law

from mxdist.launch import JobClient, Life
from mxdist.launch.client import log_lines
from mxdist.launch.kubernetes import KubernetesLauncher
from mxdist.spec import JobState, TrainingJob, parse_job
from mxdist.spec.cluster import Storage
from mxdist.store import Attempt, Credentials, Result, Store, open_store
from stack.processes import wait_until
from stack.seaweed import Seaweed
from support.kube import MXDIST, Cluster, documented_rules, running_cluster
from support.kube_operator import Operator, operating
from support.nodes import Nodes

GENEROUS_S = 300.0
CANARY = "canary-4c1d7e"

PATIENT = """
    import time
    import mxnet as mx
    import horovod.mxnet as hvd
    hvd.init()
    step = 0
    while True:
        hvd.allreduce(mx.nd.ones(4), name=f"step{step}").wait_to_read()
        step += 1
        if step == 1:
            print("training", hvd.size(), flush=True)
        time.sleep(0.05)
"""


@dataclass
class Site:
    """A cluster whose pods run on nodes, an S3 server that they reach, and a client with the documented rights."""

    cluster: Cluster
    operator: Operator
    namespace: str
    seaweed: Seaweed
    runs: Store
    folder: Path

    @property
    def client(self) -> JobClient:
        return JobClient(self.runs, KubernetesLauncher(kubeconfig=str(self.cluster.kubeconfig(MXDIST))))

    def secrets(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.seaweed.access_key,
            "AWS_SECRET_ACCESS_KEY": self.seaweed.secret_key,
            "MLFLOW_TRACKING_TOKEN": CANARY,
        }

    def job(
        self,
        fields: dict[str, Any],
        *,
        parallelism: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        **kubernetes: Any,
    ) -> TrainingJob:
        job = parse_job({
            **fields,
            "cluster": {
                "kind": "kubernetes", "nodes": 2,
                "kubernetes": {"namespace": self.namespace, "image": "registry.local/node:1", **kubernetes},
            },
            "parallelism": {"world_size": 2, **(parallelism or {})},
            "storage": {"endpoint_url": self.seaweed.endpoint_url},
            "limits": {"start_timeout_s": 200, "link_timeout_s": 10, **(limits or {})},
        })  # fmt: skip
        assert isinstance(job, TrainingJob)
        return job

    def script(self, text: str = PATIENT, *, limits: dict[str, Any] | None = None, **kubernetes: Any) -> TrainingJob:
        path = self.folder / "job.py"
        path.write_text(textwrap.dedent(text))
        given = {"grace_s": 2, "max_restarts": 0, **(limits or {})}
        return self.job({"name": "script", "script": {"path": str(path)}}, limits=given, **kubernetes)

    def submit(self, job: TrainingJob, key: str = "job") -> Attempt:
        return self.client.submit(job, key, secrets=self.secrets()).attempt

    def result(self, attempt: Attempt) -> Result:
        assert wait_until(lambda: attempt.result() is not None, GENEROUS_S, poll_s=0.2), self.story(attempt)
        result = attempt.result()
        assert result is not None
        return result

    def training(self, attempt: Attempt) -> None:
        """Wait until the script is in its world."""
        found = wait_until(lambda: "training" in "\n".join(log_of(attempt)), GENEROUS_S, poll_s=0.2)
        assert found, self.story(attempt)

    def story(self, attempt: Attempt) -> str:
        """Return what is known of an attempt, for a test that failed."""
        words = [f"{name}: {container.last_words()}" for name, container in self.operator.containers.items()]
        return "\n".join([*log_of(attempt), *words, *self.operator.errors[-1:]])

    def left(self, attempt: Attempt) -> list[str]:
        """Return the processes of an attempt on this machine, whatever node or container they are in."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"MXDIST_TOKEN={attempt.claim.token}".encode() in path.read_bytes():
                    found.append((path.parent / "cmdline").read_text())
            except OSError:
                continue
        return found


def log_of(attempt: Attempt) -> list[str]:
    return [text for _, lines in log_lines(attempt) for _, text in lines]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("kube")) as made:
        yield made


@pytest.fixture
def site(
    cluster: Cluster, nodes: Nodes, cluster_seaweed: Seaweed, cluster_bucket: str, tmp_path: Path
) -> Iterator[Site]:
    credentials = Credentials(cluster_seaweed.access_key, cluster_seaweed.secret_key)
    runs = open_store(f"s3://{cluster_bucket}/runs", endpoint_url=cluster_seaweed.endpoint_url, credentials=credentials)
    namespace = cluster.namespace()
    cluster.grant(namespace, documented_rules())
    with operating(cluster, nodes, namespace, tmp_path) as operator:
        yield Site(cluster, operator, namespace, cluster_seaweed, runs, tmp_path)


@pytest.fixture
def law(site: Site, tmp_path: Path) -> Law:
    folder = tmp_path / "law"
    folder.mkdir()
    credentials = Credentials(site.seaweed.access_key, site.seaweed.secret_key)
    return make_law(folder, site.runs, storage=Storage(endpoint_url=site.seaweed.endpoint_url), credentials=credentials)


def test_an_mpijob_lives_to_its_end_with_the_weights_of_one_process(site: Site, law: Law) -> None:
    with ThreadPoolExecutor(2) as pool:  # two schedulers at once
        asked = list(pool.map(lambda _: site.client.submit(site.job(law.fields), "job", secrets=site.secrets()), "ab"))
    assert {one.attempt.number for one in asked} == {1}
    attempt = asked[0].attempt
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.story(attempt))
    assert law.off(attempt, result) < BOUND
    (job,) = site.cluster.jobs(site.namespace)
    hosts = [rank["host"] for rank in attempt.read_state().ranks]
    service = f"{job['metadata']['name']}.{site.namespace}.svc"
    assert hosts == [f"{job['metadata']['name']}-worker-{number}.{service}" for number in (0, 1)]
    assert [one.phase for one in site.client.launcher.watch(attempt, timeout_s=60)][-1] == "succeeded"
    assert wait_until(lambda: site.left(attempt) == [], 60), site.left(attempt)
    assert site.client.launcher.life(attempt) is Life.DEAD

    site.client.launcher.kill(attempt, grace_s=1)
    assert site.cluster.jobs(site.namespace) == []
    assert site.cluster.core.list_namespaced_secret(site.namespace).items == []
    assert site.cluster.core.list_namespaced_pod(site.namespace).items == []


def test_a_cancel_leaves_nothing_in_any_pod(site: Site) -> None:
    attempt = site.submit(site.script())
    site.training(attempt)
    assert site.left(attempt)
    result = site.client.cancel(attempt, by="user", reason="enough")

    assert result.state is JobState.CANCELLED
    assert site.left(attempt) == []
    assert site.cluster.jobs(site.namespace) == []


@pytest.mark.long
def test_a_job_that_somebody_deletes_is_preempted_and_leaves_nothing(site: Site) -> None:
    attempt = site.submit(site.script())
    site.training(attempt)
    (job,) = site.cluster.jobs(site.namespace)
    where = ("kubeflow.org", "v2beta1", site.namespace, "mpijobs", job["metadata"]["name"])
    site.cluster.custom.delete_namespaced_custom_object(*where, body={"propagationPolicy": "Foreground"})
    assert wait_until(lambda: site.cluster.jobs(site.namespace) == [], GENEROUS_S), site.story(attempt)

    assert site.left(attempt) == []
    assert site.client.launcher.life(attempt) is Life.DEAD
    assert site.result(attempt).state is JobState.PREEMPTED


def test_a_worker_that_dies_comes_back_and_the_world_with_it(site: Site) -> None:
    attempt = site.submit(site.script(limits={"max_restarts": 2}))
    site.training(attempt)
    worker = next(one for one in site.operator.containers.values() if "-worker-1" in one.log.name)
    worker.signal(9)

    assert wait_until(lambda: attempt.read_state().world == 2, GENEROUS_S), site.story(attempt)
    again = wait_until(lambda: log_of(attempt).count("[0] training 2") == 2, GENEROUS_S, poll_s=0.2)
    assert again, site.story(attempt)
    assert "worker-1" in "\n".join(log_of(attempt))
    site.client.cancel(attempt, by="user", reason="enough")
    assert site.left(attempt) == []


@pytest.mark.parametrize(
    ("parallelism", "dtype", "bound"),
    [
        ({"controller": "mpi"}, "float64", BOUND),
        ({"strategy": "parameter_server", "servers": 2}, "float32", FLOAT32_BOUND),
    ],
    ids=["mpi", "parameter servers"],
)
def test_other_worlds_of_pods_have_the_weights_of_one_process(
    site: Site, law: Law, parallelism: dict[str, Any], dtype: str, bound: float
) -> None:
    attempt = site.submit(site.job({**law.fields, "dtype": dtype}, parallelism=parallelism))
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.story(attempt))
    assert law.off(attempt, result) < bound
    assert wait_until(lambda: site.left(attempt) == [], 60), site.left(attempt)


def test_a_worker_that_shows_another_key_is_given_nothing(site: Site) -> None:
    site.operator.impostors.add("-worker-1")
    attempt = site.submit(site.script())
    result = site.result(attempt)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert "worker-1" in result.cause.message
    assert "host key" in result.cause.message
    assert "training" not in "\n".join(log_of(attempt))
    assert wait_until(lambda: site.left(attempt) == [], 60), site.left(attempt)


@pytest.mark.long
def test_a_killed_supervisor_is_followed_by_another_mpijob(site: Site) -> None:
    attempt = site.submit(site.script(limits={"max_restarts": 2}))
    site.training(attempt)
    launcher = next(one for one in site.operator.containers.values() if "-launcher-" in one.log.name)
    launcher.signal(9)
    assert wait_until(lambda: site.client.launcher.life(attempt) is Life.DEAD, 60)
    assert site.client.revive(attempt, site.secrets())

    assert sorted(job["metadata"]["name"] for job in site.cluster.jobs(site.namespace)) == [
        f"mxdist-job-{attempt.number}-1", f"mxdist-job-{attempt.number}-2",
    ]  # fmt: skip
    again = wait_until(lambda: log_of(attempt).count("[0] training 2") == 2, GENEROUS_S, poll_s=0.2)
    assert again, site.story(attempt)
    site.client.cancel(attempt, by="user", reason="enough")
    assert site.left(attempt) == []


@pytest.mark.long
def test_a_suspended_job_starts_all_pods_at_once_and_waits_for_its_workers(site: Site) -> None:
    attempt = site.submit(site.script(queue="gpus"))
    (job,) = site.cluster.jobs(site.namespace)
    assert site.client.launcher.life(attempt) is Life.ALIVE
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert site.cluster.core.list_namespaced_pod(site.namespace).items == []
    where = ("kubeflow.org", "v2beta1", site.namespace, "mpijobs", job["metadata"]["name"])
    # Of a suspended job the operator makes the launcher at once: it has no workers that could not be ready.
    spec = {"runPolicy": {"suspend": False}, "launcherCreationPolicy": "AtStartup"}
    site.cluster.custom.patch_namespaced_custom_object(*where, {"spec": spec})

    site.training(attempt)
    site.client.cancel(attempt, by="user", reason="enough")
    assert site.left(attempt) == []


def test_keys_are_nowhere_but_in_the_secret(site: Site) -> None:
    attempt = site.submit(site.script())
    site.training(attempt)
    commands = [(path / "cmdline").read_bytes() for path in Path("/proc").glob("[0-9]*") if os.access(path, os.R_OK)]
    assert not any(CANARY.encode() in command for command in commands)
    assert CANARY not in repr(site.cluster.jobs(site.namespace))
    assert CANARY not in repr(site.cluster.core.list_namespaced_pod(site.namespace).to_dict())
    assert CANARY not in site.story(attempt)
    site.client.cancel(attempt, by="user", reason="enough")
    site.client.launcher.kill(attempt, grace_s=1)
    assert site.cluster.core.list_namespaced_secret(site.namespace).items == []
