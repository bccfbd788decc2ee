"""Whole jobs on nodes reached over ssh: trained, cancelled, cut off, killed, refused. Nothing of them stays."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster.law import BOUND, Law, make_law
from mlflow import MlflowClient

from mxdist.errors import LaunchError
from mxdist.launch import JobClient, Life
from mxdist.launch.bundle import collect
from mxdist.launch.client import log_lines
from mxdist.launch.ssh import SshLauncher
from mxdist.spec import JobState, Storage, TrainingJob, parse_job
from mxdist.ssh import SshAccess
from mxdist.store import Attempt, Credentials, JobRun, Result, Store, open_store
from stack.mlflow import Mlflow
from stack.processes import wait_until
from stack.seaweed import Seaweed
from support.node import PYTHON, Node
from support.nodes import Nodes

GENEROUS_S = 240.0
CANARY = "canary-0b9f4e"
WORKDIR = "/var/mxdist"
LINK_TIMEOUT_S = 10.0

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
    """Three nodes, an S3 server that they reach, and a client on the control side."""

    nodes: Nodes
    seaweed: Seaweed
    runs: Store
    folder: Path
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def access(self) -> SshAccess:
        return SshAccess(
            user="trainer",
            key=self.nodes.key.read_text(),
            known_hosts=tuple(self.nodes.known_hosts),
            connect_attempts=3,
        )

    def client(self, access: SshAccess | None = None) -> JobClient:
        return JobClient(self.runs, SshLauncher(access or self.access, python=PYTHON, workdir=WORKDIR))

    def secrets(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.seaweed.access_key,
            "AWS_SECRET_ACCESS_KEY": self.seaweed.secret_key,
            "MLFLOW_TRACKING_TOKEN": CANARY,
        }

    def script(self, text: str, *, hosts: int, limits: dict[str, Any] | None = None, **cluster: Any) -> TrainingJob:
        path = self.folder / "job.py"
        path.write_text(textwrap.dedent(text))
        given = {"grace_s": 2, "max_restarts": 0, "link_timeout_s": LINK_TIMEOUT_S, "start_timeout_s": 200}
        fields = {"name": "script", "script": {"path": str(path)}}
        return self.job(fields, ranks=hosts, limits={**given, **(limits or {})}, cluster=cluster)

    def job(
        self,
        fields: dict[str, Any],
        *,
        ranks: int,
        limits: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
    ) -> TrainingJob:
        """Return a job, one rank on each of the first hosts unless ``cluster`` says otherwise."""
        hosts = [f"{node.address}:1" for node in self.nodes][:ranks]
        job = parse_job({
            **fields,
            "cluster": {"kind": "ssh", "hosts": hosts, **(cluster or {})},
            "parallelism": {"world_size": ranks},
            "storage": {"endpoint_url": self.seaweed.endpoint_url},
            "limits": limits or {"start_timeout_s": 200},
        })  # fmt: skip
        assert isinstance(job, TrainingJob)
        return job

    def submit(self, job: TrainingJob, key: str = "job") -> Attempt:
        attempt = self.client().submit(job, key, secrets=self.secrets()).attempt
        self.attempts.append(attempt)
        return attempt

    def result(self, attempt: Attempt, timeout_s: float = GENEROUS_S) -> Result:
        assert wait_until(lambda: attempt.result() is not None, timeout_s, poll_s=0.2), log_of(attempt)
        result = attempt.result()
        assert result is not None
        return result

    def training(self, attempt: Attempt) -> None:
        """Wait until the script is in its world."""
        assert wait_until(lambda: "training" in "\n".join(log_of(attempt)), GENEROUS_S, poll_s=0.2), log_of(attempt)

    def left(self) -> list[str]:
        """Return what any node still runs of any job."""
        found = [(node, process) for node in self.nodes for process in node.processes()]
        return [f"{node.name} {one.command}" for node, one in found if "MXDIST_TOKEN" in one.environment]


def log_of(attempt: Attempt) -> list[str]:
    return [text for _, lines in log_lines(attempt) for _, text in lines]


@pytest.fixture
def site(nodes: Nodes, cluster_seaweed: Seaweed, cluster_bucket: str, tmp_path: Path) -> Site:
    credentials = Credentials(cluster_seaweed.access_key, cluster_seaweed.secret_key)
    runs = open_store(f"s3://{cluster_bucket}/runs", endpoint_url=cluster_seaweed.endpoint_url, credentials=credentials)
    for node in nodes:
        node.exec(["sh", "-c", f"rm -rf {WORKDIR}; install -d -o trainer -m 700 {WORKDIR}"])
    return Site(nodes, cluster_seaweed, runs, tmp_path)


@pytest.fixture
def law(site: Site, tmp_path: Path) -> Law:
    folder = tmp_path / "law"
    folder.mkdir()
    credentials = Credentials(site.seaweed.access_key, site.seaweed.secret_key)
    storage = Storage(endpoint_url=site.seaweed.endpoint_url)
    return make_law(folder, site.runs, storage=storage, credentials=credentials)


@pytest.mark.parametrize("slots", [(1, 1), (2, 1, 1)], ids=["two", "three"])
def test_a_world_over_hosts_has_the_weights_of_one_process(site: Site, law: Law, slots: tuple[int, ...]) -> None:
    lines = [f"{node.address}:{count}" for node, count in zip(site.nodes, slots, strict=False)]
    attempt = site.submit(site.job(law.fields, ranks=sum(slots), cluster={"hosts": lines}))
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    assert law.off(attempt, result) < BOUND
    seats = [(rank["host"], rank["local_rank"]) for rank in attempt.read_state().ranks]
    taken = zip(site.nodes, slots, strict=False)
    assert seats == [(node.address, local) for node, count in taken for local in range(count)]
    assert wait_until(lambda: site.left() == [], 30), site.left()


def test_a_tracked_world_over_hosts_is_one_run_with_every_loss(site: Site, law: Law, cluster_mlflow: Mlflow) -> None:
    tracking = {"uri": cluster_mlflow.url, "experiment": "hosts"}
    attempt = site.submit(site.job({**law.fields, "tracking": tracking}, ranks=2))
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    assert result.tracking_complete, result.tracking_message
    assert law.off(attempt, result) < BOUND
    client = MlflowClient(cluster_mlflow.url)
    experiment = client.get_experiment_by_name("hosts")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (result.mlflow_run_id, "FINISHED")
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert sorted(point.step for point in losses) == list(range(1, int(result.steps or 0) + 1))


def test_a_second_submission_finds_the_first(site: Site) -> None:
    job = site.script(PATIENT, hosts=2)
    attempt = site.submit(job)
    site.training(attempt)
    again = site.client().submit(job, "job", secrets=site.secrets())

    assert (again.how, again.attempt.number) == ("reattached", attempt.number)
    assert site.client().launcher.life(attempt) is Life.ALIVE
    site.client().cancel(attempt, by="user", reason="test")
    assert site.client().launcher.life(attempt) is Life.DEAD


@pytest.mark.long
def test_a_start_that_is_repeated_starts_one_supervisor(site: Site) -> None:
    job = site.script(PATIENT, hosts=2)
    launcher, bundle = site.client().launcher, collect(job)
    attempt = JobRun(site.runs, "job").claim(job, after=0, code_digest=bundle.digest)
    assert launcher.life(attempt) is Life.NEVER
    started = [launcher.start(attempt, bundle, incarnation=1, secrets=site.secrets()) for _ in range(2)]

    assert started == [True, False]
    assert attempt.supervisors.last() == 1
    launcher.kill(attempt, grace_s=0)
    assert site.left() == []


def test_cancel_ends_everything_on_every_host(site: Site) -> None:
    attempt = site.submit(site.script(PATIENT, hosts=3))
    site.training(attempt)
    result = site.client().cancel(attempt, by="user", reason="enough")

    assert result.state is JobState.CANCELLED
    assert site.left() == []


@pytest.mark.long
def test_cancel_needs_no_supervisor(site: Site) -> None:
    """Stopped, it neither acts nor ends; every host is entered, and all that carries the token is killed."""
    attempt = site.submit(site.script(PATIENT, hosts=3, limits={"link_timeout_s": 200}))
    site.training(attempt)
    (document,) = [document for _, document in attempt.supervisors.read()]
    site.nodes[0].exec(["kill", "-STOP", str(document["pid"])])
    result = site.client().cancel(attempt, by="user", reason="enough", wait_s=1)

    assert result.state is JobState.CANCELLED
    assert site.left() == []


def test_no_secret_stands_on_a_command_line_or_where_it_does_not_belong(site: Site) -> None:
    attempt = site.submit(site.script(PATIENT, hosts=2))
    site.training(attempt)
    for node in site.nodes:
        running = node.processes(services=True)
        assert running
        for process in running:
            words = " ".join(process.command)
            assert CANARY not in words
            assert "PRIVATE KEY" not in words
            assert not [name for name in process.environment if name.startswith("MXDIST_SSH_")], words
        kept = node.exec(["grep", "-rlE", f"{CANARY}|PRIVATE KEY", WORKDIR, "/tmp", "/home/trainer"], check=False)
        assert kept.stdout == ""
        assert not (node.root / "home/trainer/.ssh/known_hosts").exists()
    site.client().cancel(attempt, by="user", reason="test")


def lost_host(site: Site, act: Callable[[Node], None], *, hosts: int = 3) -> tuple[Attempt, Result]:
    attempt = site.submit(site.script(PATIENT, hosts=hosts))
    site.training(attempt)
    act(site.nodes[1])
    return attempt, site.result(attempt)


def test_a_killed_node_is_named_and_the_rest_is_ended(site: Site) -> None:
    attempt, result = lost_host(site, Node.kill)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert result.cause.retryable
    assert site.nodes[1].address in result.cause.message
    assert wait_until(lambda: site.left() == [], 30), site.left()


def test_a_cut_link_ends_the_ranks_on_both_sides(site: Site) -> None:
    attempt, result = lost_host(site, Node.cut)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert site.nodes[1].address in result.cause.message
    assert wait_until(lambda: site.left() == [], 60), site.left()  # on the cut node, by its own guard
    with pytest.raises(LaunchError, match="guard") as caught:
        site.client().launcher.kill(attempt, grace_s=0)
    assert site.nodes[1].address in caught.value.message
    assert site.nodes[2].address not in caught.value.message
    site.nodes[1].mend()
    site.client().launcher.kill(attempt, grace_s=0)


@pytest.mark.long
def test_training_goes_on_from_its_checkpoint_when_a_node_comes_back(site: Site, law: Law) -> None:
    fields = {**law.fields, "epochs": 60, "checkpoints": {"every_steps": 5}}
    limits = {"max_restarts": 1, "link_timeout_s": LINK_TIMEOUT_S, "grace_s": 2, "start_timeout_s": 200}
    attempt = site.submit(site.job(fields, ranks=2, limits=limits))
    assert wait_until(lambda: attempt.read_state().step >= 20, GENEROUS_S, poll_s=0.2), log_of(attempt)
    pids = [one.pid for one in site.nodes[1].processes() if "MXDIST_TOKEN" in one.environment]
    site.nodes[1].exec(["kill", "-KILL", *map(str, pids)])
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, log_of(attempt))
    assert result.restarts == 1
    assert wait_until(lambda: site.left() == [], 30), site.left()


def test_a_wrong_host_key_of_the_first_host_refuses_the_submission(site: Site) -> None:
    known = [line for line in site.nodes.known_hosts if site.nodes[0].address not in line]
    access = SshAccess(user="trainer", key=site.nodes.key.read_text(), known_hosts=tuple(known))
    with pytest.raises(LaunchError, match="its host key is not known") as caught:
        site.client(access).submit(site.script(PATIENT, hosts=2), "job", secrets=site.secrets())
    assert not caught.value.retryable
    assert site.left() == []


@pytest.mark.long
def test_a_wrong_host_key_and_a_refusal_further_on_are_told_in_one_cause(site: Site) -> None:
    changed = {site.nodes[1].address: site.nodes[2].host_key}
    known = tuple(f"{node.address} {changed.get(node.address, node.host_key)}" for node in site.nodes)
    site.nodes[2].stop_sshd()
    access = SshAccess(user="trainer", key=site.nodes.key.read_text(), known_hosts=known)
    job = site.script(PATIENT, hosts=3, ssh={"connect_attempts": 2})
    attempt = site.client(access).submit(job, "job", secrets=site.secrets()).attempt
    result = site.result(attempt)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert f"{site.nodes[1].address}: its host key has changed" in result.cause.message
    assert f"{site.nodes[2].address}: nothing listens at port 22" in result.cause.message
    assert not result.cause.retryable
    assert wait_until(lambda: site.left() == [], 30), site.left()


def test_a_full_disk_on_one_node_is_told(site: Site) -> None:
    site.nodes[1].fill_disk()
    attempt = site.submit(site.script(PATIENT, hosts=2, limits={"start_timeout_s": 20}))  # how long it is tried
    result = site.result(attempt)

    assert result.state is JobState.FAILED
    assert result.cause is not None
    assert site.nodes[1].address in result.cause.message
    assert "No space left" in result.cause.message
    assert wait_until(lambda: site.left() == [], 30), site.left()


@pytest.mark.long
def test_a_supervisor_that_dies_with_its_node_is_followed_by_the_next(site: Site) -> None:
    attempt = site.submit(site.script(PATIENT, hosts=2, limits={"max_restarts": 1}))
    site.training(attempt)
    site.nodes[0].kill()
    assert wait_until(lambda: site.left() == [], 60), site.left()  # the guard of the other node's agent
    site.nodes[0].start()
    site.nodes[0].exec(["install", "-d", "-o", "trainer", "-m", "700", WORKDIR])
    client = site.client()
    assert wait_until(lambda: client.launcher.life(attempt) is Life.DEAD, 120, poll_s=2.0)
    assert client.revive(attempt, site.secrets())
    before = time.time()
    assert wait_until(lambda: attempt.read_state().world == 2 and attempt.read_state().heartbeat > before, GENEROUS_S)
    client.cancel(attempt, by="user", reason="test")
    assert site.left() == []
