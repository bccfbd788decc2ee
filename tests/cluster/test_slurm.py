"""Whole jobs on a real Slurm over three nodes: trained, queued, cancelled, requeued, preempted, their nodes killed."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster.law import BOUND, FLOAT32_BOUND, Law, make_law

from mxdist.errors import LaunchError
from mxdist.launch import JobClient, Life
from mxdist.launch.bundle import collect
from mxdist.launch.client import log_lines
from mxdist.launch.hosts import HostPlan
from mxdist.launch.slurm import SlurmLauncher
from mxdist.launch.slurm_script import job_name
from mxdist.spec import JobState, TrainingJob, parse_job
from mxdist.spec.cluster import Storage
from mxdist.ssh import SshAccess
from mxdist.store import Attempt, Credentials, JobRun, Result, Store, open_store
from mxdist.tracking import models
from stack.processes import wait_until
from stack.seaweed import Seaweed
from support.node import PYTHON, Node
from support.slurm import WORKDIR, Slurm

GENEROUS_S = 300.0
CANARY = "canary-5d20a7"

PATIENT = """
    import sys, time
    import mxnet as mx
    import horovod.mxnet as hvd
    from mxdist.runtime.worker import Worker
    worker = Worker()
    hvd.init()
    step = 0
    while not worker.should_stop():
        hvd.allreduce(mx.nd.ones(4), name=f"step{step}").wait_to_read()
        step += 1
        if step == 1:
            print("training", hvd.size(), flush=True)
        time.sleep(0.05)
    sys.exit(0)
"""


@dataclass
class Site:
    """A Slurm over three nodes, an S3 server that they reach, and a client on the control side."""

    slurm: Slurm
    seaweed: Seaweed
    runs: Store
    folder: Path
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        return self.slurm.workers

    @property
    def launcher(self) -> SlurmLauncher:
        return SlurmLauncher(python=PYTHON, workdir=WORKDIR)

    @property
    def client(self) -> JobClient:
        return JobClient(self.runs, self.launcher)

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
        hosts: int,
        parallelism: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        **slurm: Any,
    ) -> TrainingJob:
        job = parse_job({
            **fields,
            "cluster": {"kind": "slurm", "nodes": hosts, "slots": 1, "slurm": {"exclusive": True, **slurm}},
            "parallelism": {"world_size": hosts, **(parallelism or {})},
            "storage": {"endpoint_url": self.seaweed.endpoint_url},
            "limits": {"start_timeout_s": 200, "link_timeout_s": 10, **(limits or {})},
        })  # fmt: skip
        assert isinstance(job, TrainingJob)
        return job

    def script(self, text: str, *, hosts: int, **options: Any) -> TrainingJob:
        path = self.folder / "job.py"
        path.write_text(textwrap.dedent(text))
        return self.job({"name": "script", "script": {"path": str(path)}}, hosts=hosts, **options)

    def submit(self, job: TrainingJob, key: str = "job") -> Attempt:
        attempt = self.client.submit(job, key, secrets=self.secrets()).attempt
        self.attempts.append(attempt)
        return attempt

    def result(self, attempt: Attempt) -> Result:
        assert wait_until(lambda: attempt.result() is not None, GENEROUS_S, poll_s=0.2), self.told(attempt)
        result = attempt.result()
        assert result is not None
        return result

    def training(self, attempt: Attempt, incarnation: int = 1) -> None:
        """Wait until that supervisor has the script in its world."""

        def there() -> bool:
            return (
                attempt.supervisors.last() >= incarnation
                and sum("training" in x for x in log_of(attempt)) >= incarnation
            )

        assert wait_until(there, GENEROUS_S, poll_s=0.2), self.told(attempt)

    def steps(self, attempt: Attempt, least: int) -> None:
        """Wait until the loop has done so many steps."""
        assert wait_until(lambda: attempt.read_state().step >= least, GENEROUS_S, poll_s=0.1), self.told(attempt)

    def first(self, attempt: Attempt) -> Node:
        """Return the node of the newest supervisor."""
        *_, (_, document) = attempt.supervisors.read()
        return next(node for node in self.nodes if node.name == document["host"])

    def hurry(self, number: str) -> None:
        """Let a job that went back into the queue start at once; Slurm itself lets it wait for two minutes."""
        assert wait_until(lambda: self.slurm.states().get(number) == "PENDING", 120, poll_s=0.5), self.slurm.states()
        self.slurm.run("scontrol", "update", f"jobid={number}", "starttime=now")

    def told(self, attempt: Attempt) -> str:
        outputs = [
            path.read_text()[-3000:]
            for node in self.nodes
            if node.alive()
            for path in (node.root / "tmp").glob("*.out")
        ]
        return "\n".join([*log_of(attempt), *outputs, str(self.slurm.jobs())])

    def idle(self) -> None:
        """Wait until no node runs anything of any job."""
        assert wait_until(lambda: self.left() == [], 60), self.left()

    def left(self) -> list[str]:
        found = [(node, process) for node in self.nodes for process in node.processes()]
        return [f"{node.name} {one.command}" for node, one in found if "MXDIST_TOKEN" in one.environment]


def log_of(attempt: Attempt) -> list[str]:
    return [text for _, lines in log_lines(attempt) for _, text in lines]


@pytest.fixture
def site(slurm: Slurm, cluster_seaweed: Seaweed, cluster_bucket: str, tmp_path: Path) -> Site:
    credentials = Credentials(cluster_seaweed.access_key, cluster_seaweed.secret_key)
    runs = open_store(f"s3://{cluster_bucket}/runs", endpoint_url=cluster_seaweed.endpoint_url, credentials=credentials)
    return Site(slurm, cluster_seaweed, runs, tmp_path)


@pytest.fixture
def law(site: Site, tmp_path: Path) -> Law:
    folder = tmp_path / "law"
    folder.mkdir()
    credentials = Credentials(site.seaweed.access_key, site.seaweed.secret_key)
    return make_law(folder, site.runs, storage=Storage(endpoint_url=site.seaweed.endpoint_url), credentials=credentials)


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_world_over_two_nodes_has_the_weights_of_one_process(site: Site, law: Law, controller: str) -> None:
    attempt = site.submit(site.job(law.fields, hosts=2, parallelism={"controller": controller}))
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(attempt))
    assert law.off(attempt, result) < BOUND
    assert len({rank["host"] for rank in attempt.read_state().ranks}) == 2
    site.idle()
    assert wait_until(lambda: site.launcher.life(attempt) is Life.DEAD, 60)


@pytest.mark.long
def test_a_world_over_three_nodes_has_the_weights_of_one_process(site: Site, law: Law) -> None:
    fields = {**law.fields, "batch_size": 9}  # each node's share must be whole
    attempt = site.submit(site.job(fields, hosts=3))
    assert site.result(attempt).state is JobState.SUCCEEDED, site.told(attempt)
    alone = site.submit(site.job(fields, hosts=1), "alone")
    assert site.result(alone).state is JobState.SUCCEEDED, site.told(alone)

    assert len({rank["host"] for rank in attempt.read_state().ranks}) == 3
    found, expected = weights(attempt, site.folder / "found"), weights(alone, site.folder / "alone")
    assert max(float(np.abs(found[name] - expected[name]).max()) for name in expected) < BOUND
    site.idle()


def test_parameter_servers_over_nodes_have_the_weights_of_one_process(site: Site, law: Law) -> None:
    servers = {"strategy": "parameter_server", "servers": 2}
    fields = {**law.fields, "dtype": "float32"}  # what the servers compute in
    attempt = site.submit(site.job(fields, hosts=2, parallelism=servers))
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(attempt))
    assert law.off(attempt, result) < FLOAT32_BOUND
    site.idle()


def test_secrets_stand_in_no_command_line_and_in_no_script(site: Site) -> None:
    attempt = site.submit(site.script(PATIENT, hosts=2))
    site.training(attempt)
    commands = [" ".join(one.command) for node in site.slurm.nodes for one in node.processes(services=True)]
    assert any("srun --overlap" in command for command in commands)
    values = [CANARY, site.seaweed.secret_key]
    assert not [command for command in commands for value in values if value in command]
    (number,) = [one.number for one in site.launcher._living(attempt)]
    script = site.slurm.run("scontrol", "write", "batch_script", number, "-")
    shown = site.slurm.run("scontrol", "show", "job", "--details", number)
    assert "MLFLOW_TRACKING_TOKEN" in script
    assert not [value for value in values if value in script + shown]
    ranks = [one for node in site.nodes for one in node.processes() if "job.py" in " ".join(one.command)]
    assert {one.environment.get("MLFLOW_TRACKING_TOKEN") for one in ranks} == {CANARY}
    site.client.cancel(attempt, by="user", reason="test")
    site.idle()


def test_cancel_ends_everything_and_leaves_the_queue_empty(site: Site) -> None:
    attempt = site.submit(site.script(PATIENT, hosts=3))
    site.training(attempt)
    assert site.launcher.life(attempt) is Life.ALIVE
    result = site.client.cancel(attempt, by="user", reason="enough")

    assert result.state is JobState.CANCELLED
    assert site.launcher._living(attempt) == []
    assert site.left() == []


@pytest.mark.long
def test_a_job_in_the_queue_is_alive_and_can_be_cancelled(site: Site) -> None:
    first = site.submit(site.script(PATIENT, hosts=3))
    second = site.submit(site.script(PATIENT, hosts=3), "waiting")

    assert (site.launcher.life(second), second.supervisors.last()) == (Life.ALIVE, 0)
    again = site.client.submit(site.script(PATIENT, hosts=3), "waiting", secrets=site.secrets())
    assert (again.how, again.attempt.number) == ("reattached", second.number)
    assert len(site.launcher._living(second)) == 1
    assert site.client.cancel(second, by="user", reason="enough").state is JobState.CANCELLED
    assert site.launcher._living(second) == []
    site.client.cancel(first, by="user", reason="test")


@pytest.mark.long
def test_a_second_job_of_the_same_name_finds_the_place_taken(site: Site) -> None:
    """Whoever submits without having seen the first: both names are equal, and Slurm takes both."""
    job = site.script(PATIENT, hosts=1)
    attempt = site.submit(job)
    site.training(attempt)
    launcher = site.launcher
    name = job_name("job", attempt.number, 1, attempt.claim.token)
    script = launcher._script(attempt, collect(job), name, 1, site.secrets())
    second = launcher._submit(script.replace("#SBATCH --dependency=singleton\n", ""), name, site.secrets())

    assert wait_until(lambda: site.slurm.states().get(second) == "COMPLETED", 120, poll_s=0.2), site.told(attempt)
    assert attempt.supervisors.last() == 1
    assert launcher.life(attempt) is Life.ALIVE
    site.client.cancel(attempt, by="user", reason="test")


def test_a_killed_node_leads_to_a_resume_and_one_end(site: Site, law: Law) -> None:
    job = site.job(long(law), hosts=2)
    attempt = site.submit(job)
    site.steps(attempt, 20)
    other = next(node for node in used(site, attempt) if node is not site.first(attempt))
    other.kill()
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(attempt))
    assert result.restarts >= 1
    assert_as_if_nothing_had_happened(site, law, attempt, result)
    site.idle()


@pytest.mark.long
def test_a_killed_first_node_leads_to_a_resume_elsewhere(site: Site, law: Law) -> None:
    attempt = site.submit(site.job(long(law), hosts=2))
    site.steps(attempt, 20)
    (number,) = [one.number for one in site.launcher._living(attempt)]
    site.first(attempt).kill()
    site.hurry(number)
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(attempt))
    assert attempt.supervisors.last() == 2
    assert_as_if_nothing_had_happened(site, law, attempt, result)
    site.idle()


def test_a_requeued_job_goes_on_as_the_next_supervisor(site: Site, law: Law) -> None:
    attempt = site.submit(site.job(long(law), hosts=2))
    site.steps(attempt, 20)
    (number,) = [one.number for one in site.launcher._living(attempt)]
    site.slurm.run("scontrol", "requeue", number)
    site.hurry(number)
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(attempt))
    assert attempt.supervisors.last() == 2
    assert_as_if_nothing_had_happened(site, law, attempt, result)
    site.idle()


@pytest.mark.long
def test_a_preempted_job_saves_and_comes_back(site: Site, law: Law) -> None:
    attempt = site.submit(site.job(long(law, _FOR_THE_SCHEDULER), hosts=2))
    site.steps(attempt, 20)
    (number,) = [one.number for one in site.launcher._living(attempt)]
    site.slurm.run("sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    site.hurry(number)
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(attempt))
    assert attempt.supervisors.last() == 2
    assert any("Slurm will start the job again" in line for line in log_of(attempt))
    assert_as_if_nothing_had_happened(site, law, attempt, result)
    site.idle()


@pytest.mark.long
def test_scancel_gives_the_ranks_time_to_save(site: Site, law: Law) -> None:
    """As at the end of the time limit: TERM first, KillWait later KILL; the next try goes on from what was saved."""
    job = site.job(long(law, _FOR_THE_SCHEDULER), hosts=2)
    attempt = site.submit(job)
    site.steps(attempt, 20)
    (number,) = [one.number for one in site.launcher._living(attempt)]
    site.slurm.run("scancel", number)
    result = site.result(attempt)
    assert result.state is JobState.PREEMPTED, (result.cause, site.told(attempt))
    site.idle()

    following = site.submit(job)
    assert following.number == attempt.number + 1
    result = site.result(following)
    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(following))
    assert_as_if_nothing_had_happened(site, law, following, result)
    site.idle()


@pytest.mark.long
def test_a_lost_supervisor_is_followed_by_the_next_job(site: Site, law: Law) -> None:
    """Not requeued, so it is for who watches to start the next one."""
    attempt = site.submit(site.job(long(law), hosts=2, requeue=False))
    site.steps(attempt, 20)
    *_, (_, document) = attempt.supervisors.read()
    site.first(attempt).exec(["kill", "-KILL", str(document["pid"])])
    assert wait_until(lambda: site.launcher.life(attempt) is Life.DEAD, 120, poll_s=0.5)
    site.idle()
    assert site.client.revive(attempt, site.secrets())
    result = site.result(attempt)

    assert result.state is JobState.SUCCEEDED, (result.cause, site.told(attempt))
    assert attempt.supervisors.last() == 2
    assert_as_if_nothing_had_happened(site, law, attempt, result)


def test_what_slurm_refuses_is_told_with_the_field(site: Site) -> None:
    with pytest.raises(LaunchError, match=r"(?s)invalid partition.*cluster.slurm.partition"):
        site.submit(site.script(PATIENT, hosts=1, partition="none-such"))
    with pytest.raises(LaunchError, match=r"(?s)sbatch on this host refused the job.*cluster.slurm.constraint"):
        site.submit(site.script(PATIENT, hosts=1, constraint="fast&new"), "other")


@pytest.mark.long
def test_a_job_that_ends_before_its_supervisor_is_told(site: Site) -> None:
    job = site.script(PATIENT, hosts=1)
    launcher = SlurmLauncher(python="/opt/none/bin/python", workdir=WORKDIR)
    with pytest.raises(LaunchError, match=r"(?s)ended .* before its supervisor had started.*/tmp/.*\.out"):
        JobClient(site.runs, launcher).submit(job, "job", secrets=site.secrets())
    assert JobRun(site.runs, "job").attempt(1).result() is None


@pytest.mark.long
def test_jobs_go_through_a_head_node_over_ssh(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control side has no Slurm then: all commands run there, and what is secret goes through their input."""
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    nodes = site.slurm.nodes
    access = SshAccess(user="root", key=nodes.key.read_text(), known_hosts=tuple(nodes.known_hosts))
    head = HostPlan(site.slurm.head.address, 1)
    client = JobClient(site.runs, SlurmLauncher((head, access), python=PYTHON, workdir=WORKDIR))
    attempt = client.submit(site.script(PATIENT, hosts=2), "job", secrets=site.secrets()).attempt
    site.training(attempt)
    assert client.launcher.life(attempt) is Life.ALIVE
    assert client.cancel(attempt, by="user", reason="test").state is JobState.CANCELLED
    site.idle()


def long(law: Law, epochs: int = 30) -> dict[str, Any]:
    """Return the fields of a training that is long enough to be disturbed, and saves often."""
    return {**law.fields, "epochs": epochs, "checkpoints": {"every_steps": 5}}


_STEPS_OF_AN_EPOCH = 10
_FOR_THE_SCHEDULER = 90
"""Epochs that go on until Slurm comes round to a preemption, however fast the machine trains."""
_undisturbed: dict[int, dict[str, np.ndarray]] = {}
"""By the number of epochs."""


def assert_as_if_nothing_had_happened(site: Site, law: Law, attempt: Attempt, result: Result) -> None:
    """Compare the weights with those of one process on one node that nothing disturbs."""
    epochs = attempt.claim.job["epochs"]
    assert result.steps == epochs * _STEPS_OF_AN_EPOCH
    if epochs not in _undisturbed:
        alone = site.submit(site.job(long(law, epochs), hosts=1), "alone")
        assert site.result(alone).state is JobState.SUCCEEDED, site.told(alone)
        _undisturbed[epochs] = weights(alone, site.folder / "alone")
    found, expected = weights(attempt, site.folder / "found"), _undisturbed[epochs]
    assert found.keys() == expected.keys()
    assert max(float(np.abs(found[name] - expected[name]).max()) for name in found) < BOUND


def weights(attempt: Attempt, folder: Path) -> dict[str, np.ndarray]:
    models.fetch(attempt.store.child("model"), folder)
    (path,) = folder.rglob("params.npz")
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def used(site: Site, attempt: Attempt) -> list[Node]:
    names = {rank["host"] for rank in attempt.read_state().ranks}
    return [node for node in site.nodes if node.name in names]
