"""Workers and a scheduler are killed on PostgreSQL with Celery: every job runs once, and the chain goes through."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest
from faults.site import RANKS, Run, Site, Trained, assert_trained_once, wait_for

from stack.airflow import Component
from stack.service import start_all
from support.postgres import Postgres

BARRIERS = ["submit-before-claim", "submit-claimed", "submit-started"]
CHAIN = "mnist_retrain"
JOBS = ("pretrain", "transfer", "finetune", "evaluate")
QUICK = {"pretrain_epochs": 2, "transfer_epochs": 1, "finetune_epochs": 2, "batch_size": 128}
EPOCH_ENDS = [f"epoch-1-rank-{rank}" for rank in range(RANKS)]


@dataclass(frozen=True)
class Killed:
    """What was killed, and when.

    :param chain: the jobs of the example DAG, by task.
    :param trainings: by the barrier at which their worker was killed.
    :param adopted: a training whose scheduler was killed while its worker submitted.
    """

    chain: dict[str, Run]
    trainings: dict[str, Run]
    adopted: Run


@pytest.fixture(scope="module")
def killed(site: Site, undisturbed: Trained, postgres: Postgres) -> Killed:
    """Kill both workers while four tasks submit; then the scheduler that had queued another, as it submits."""
    chain = {task: Run(site, "chain", CHAIN, task) for task in JOBS}
    chain["pretrain"].hold("submit-claimed")
    chain["transfer"].hold(*EPOCH_ENDS)
    site.stack.airflow.api.trigger(CHAIN, QUICK, dag_run_id="chain")
    trainings = {barrier: site.train(f"workers-killed-{barrier}", hold=[barrier]) for barrier in BARRIERS}
    chain["pretrain"].reached("submit-claimed")
    for barrier, run in trainings.items():
        run.reached(barrier)
    _kill_workers(site)
    for run in (chain["pretrain"], *trainings.values()):
        run.release()

    adopted = site.train("scheduler-killed", hold=["submit-claimed"])
    adopted.reached("submit-claimed")
    for barrier in EPOCH_ENDS:
        chain["transfer"].reached(barrier)
    owner, scheduler = _queued_by(postgres, adopted), _scheduler_of(site, adopted)
    scheduler.kill()
    assert not scheduler.alive()
    wait_for(lambda: _queued_by(postgres, adopted) != owner, "the other scheduler to adopt the task")
    adopted.release()
    chain["transfer"].release()
    return Killed(chain, trainings, adopted)


@pytest.mark.parametrize("barrier", BARRIERS)
def test_another_worker_finds_the_job(killed: Killed, undisturbed: Trained, barrier: str) -> None:
    run = killed.trainings[barrier]
    assert_trained_once(run, undisturbed)
    assert run.task()["try_number"] == 2
    assert run.attempt().supervisors.last() == 1


def test_another_scheduler_takes_the_task_over(killed: Killed, undisturbed: Trained) -> None:
    run = killed.adopted
    assert_trained_once(run, undisturbed)
    assert run.task()["try_number"] == 1
    assert run.attempt().supervisors.last() == 1


def test_the_chain_goes_through(killed: Killed, site: Site) -> None:
    api = site.stack.airflow.api
    wait_for(lambda: api.run(CHAIN, "chain")["state"] in {"success", "failed"}, "the end of the chain")
    tasks = api.tasks(CHAIN, "chain")
    assert {name: task["state"] for name, task in tasks.items()} == dict.fromkeys(tasks, "success")
    for run in killed.chain.values():
        assert run.result().state.value == "SUCCEEDED"
        assert run.attempt().supervisors.last() == 1
        assert [record.status for record in run.records()] == ["FINISHED"]
        run.gone()
    wait_for(lambda: killed.chain["pretrain"].parents() == ["FINISHED"], "the one parent run to be closed")
    promoted = api.xcom(CHAIN, "chain", "promote")
    assert (promoted["decision"], promoted["champion"]) == ("promoted", "1")
    assert _versions(site) == ["1"], "registered once"


def _kill_workers(site: Site) -> None:
    workers = [site.stack.airflow[f"worker-{number}"] for number in (1, 2)]
    for worker in workers:
        worker.kill()
        assert not worker.alive()
    start_all(workers)


def _scheduler_of(site: Site, run: Run) -> Component:
    """Return the scheduler that sent the run's task to Celery, by its own log."""
    candidates = [site.stack.airflow[name] for name in ("scheduler", "scheduler-2")]
    (found,) = [one for one in candidates if _sent(one, run)]
    return found


def _sent(scheduler: Component, run: Run) -> bool:
    lines = scheduler.log.read_text(errors="replace").splitlines()
    return any("Setting external_executor_id" in line and f" {run.run_id} " in line for line in lines)


def _queued_by(postgres: Postgres, run: Run) -> object:
    question = f"select queued_by_job_id from task_instance where run_id = '{run.run_id}'"
    ((job_id,),) = postgres.ask(question)
    return job_id


def _versions(site: Site) -> list[str]:
    """Return the versions of the model, by MLflow's own word."""
    query = f"{site.stack.mlflow.url}/api/2.0/mlflow/model-versions/search?filter=name%3D%27mnist_5_to_9%27"
    with urllib.request.urlopen(query, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return [str(version["version"]) for version in found.get("model_versions", [])]
