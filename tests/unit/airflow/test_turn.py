"""A training waits, or is skipped, while another DAG run trains for the same registered model."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException, TaskDeferred
from unit.airflow.world import Pretender, context_of, end

from mxdist.operators.train import DistributedTrainOperator
from mxdist.store import JobRun, open_store
from mxdist.tracking.turns import Turns
from mxdist.triggers import asking
from mxdist.triggers.turn import TurnTrigger

STAGED = {"manifest_uri": "s3://bucket/data/set/manifests/v.json", "version": "0" * 64}


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What Airflow says of DAG runs; it does not answer when it is asked about another."""
    found: dict[str, str | None] = {"first": "running", "second": "running"}
    monkeypatch.setattr(asking, "run_state", lambda dag_id, run_id: found[run_id])
    monkeypatch.setattr(asking, "task_state", lambda dag_id, run_id, task_id, map_index: "deferred")
    return found


def train(**fields: Any) -> DistributedTrainOperator:
    defaults: dict[str, Any] = {"task_id": "train", "model": "mlp", "dataset": STAGED, "registered_model": "digits"}
    return DistributedTrainOperator(**{**defaults, "mlflow_conn_id": None, **fields})


def run(operator: Any, run_id: str, *, at: str = "http://airflow") -> TaskDeferred:
    """Run the operator until it waits; return what for."""
    context = context_of(operator)
    context["ti"].run_id, context["ti"].log_url = run_id, f"{at}/dags/a_dag/runs/{run_id}"
    with pytest.raises(TaskDeferred) as caught:
        operator.execute(context)
    return caught.value


def submitted(runs_uri: str) -> int:
    return len(list(open_store(runs_uri).list("_jobs/")))


def test_second_run_waits_for_its_turn(platform: Pretender, states: dict[str, str | None], runs_uri: str) -> None:
    assert run(train(), "first").method_name == "execute_complete"
    waits = run(train(), "second")
    assert waits.method_name == "execute_in_turn"
    assert submitted(runs_uri) == 1, "nothing is submitted out of turn"
    states["first"] = "success"
    operator = train()
    context = context_of(operator)
    context["ti"].run_id = "second"
    context["ti"].log_url = "http://airflow/dags/a_dag/runs/second"
    with pytest.raises(TaskDeferred) as caught:
        operator.execute_in_turn(context, {"status": "free"})
    assert caught.value.method_name == "execute_complete"
    assert submitted(runs_uri) == 2


@pytest.mark.parametrize("state", ["success", "failed", None])
def test_turn_ends_with_the_run(platform: Pretender, states: dict[str, str | None], state: str | None) -> None:
    run(train(), "first")
    states["first"] = state
    assert run(train(), "second").method_name == "execute_complete"


def test_turn_goes_on_while_airflow_does_not_answer(platform: Pretender, states: dict[str, str | None]) -> None:
    run(train(), "first")
    del states["first"]
    assert run(train(), "second").method_name == "execute_in_turn"


def test_task_is_skipped_with_the_reason(platform: Pretender, states: dict[str, str | None]) -> None:
    run(train(), "first")
    with pytest.raises(AirflowSkipException, match=r"a_dag/first trains digits now"):
        run(train(out_of_turn="skip"), "second")


@pytest.mark.parametrize(
    "fields",
    [{"out_of_turn": "train"}, {"registered_model": None}, {"registered_model": "letters"}, {"turn_of": "letters"}],
    ids=str,
)
def test_what_needs_no_turn(platform: Pretender, states: dict[str, str | None], fields: dict[str, Any]) -> None:
    run(train(), "first")
    assert run(train(**fields), "second").method_name == "execute_complete"


def test_training_that_is_not_registered_takes_the_turn_of_the_last(
    platform: Pretender, states: dict[str, str | None]
) -> None:
    run(train(task_id="pretrain", registered_model=None, turn_of="digits"), "first")
    assert run(train(), "second").method_name == "execute_in_turn"
    assert run(train(), "first").method_name == "execute_complete"


def test_job_that_runs_needs_no_turn(platform: Pretender, states: dict[str, str | None]) -> None:
    """Airflow had said that its run was over; then somebody else took the turn."""
    run(train(), "first")
    states["first"] = "failed"
    run(train(), "second")
    states["first"] = "running"
    assert run(train(), "first").method_name == "execute_complete"


def test_another_airflow_has_the_turn_until_its_training_is_over(
    platform: Pretender, states: dict[str, str | None], runs_uri: str
) -> None:
    there = run(train(), "elsewhere", at="http://another")
    assert run(train(), "second").method_name == "execute_in_turn"
    assert there.trigger is not None
    arguments = there.trigger.serialize()[1]
    end(JobRun(open_store(runs_uri), arguments["job_key"]).attempt(1))
    assert run(train(), "second").method_name == "execute_complete"


def test_wrong_policy_is_refused(platform: Pretender, states: dict[str, str | None]) -> None:
    with pytest.raises(AirflowFailException, match="out_of_turn: must be wait, skip or train, not 'queue'"):
        run(train(out_of_turn="queue"), "first")


def test_trigger_fires_when_nobody_is_ahead(platform: Pretender, states: dict[str, str | None], runs_uri: str) -> None:
    run(train(), "first")
    waits = run(train(poll_s=0.01), "second").trigger
    assert isinstance(waits, TurnTrigger)
    path, arguments = waits.serialize()
    assert path == "mxdist.triggers.turn.TurnTrigger"
    assert json.loads(json.dumps(arguments)) == arguments
    trigger = TurnTrigger(**arguments)
    assert trigger.serialize() == waits.serialize()

    async def fires() -> dict[str, Any]:
        firing = asyncio.ensure_future(anext(trigger.run()))
        begun = time.monotonic()
        while not firing.done() and time.monotonic() < begun + 0.5:
            await asyncio.sleep(0.01)
        assert not firing.done()
        states["first"] = "success"
        event: dict[str, Any] = (await asyncio.wait_for(firing, 60)).payload
        return event

    assert asyncio.run(fires()) == {"status": "free"}
    holder = Turns(open_store(runs_uri), "digits").holder()
    assert holder is not None
    assert holder.run_id == "first", "the operator takes the turn, not the trigger"


def test_trigger_that_cannot_look_fails_the_task(platform: Pretender, states: dict[str, str | None]) -> None:
    operator = train()
    with pytest.raises(AirflowException, match="no such bucket"):
        operator.execute_in_turn(context_of(operator), {"status": "failed", "message": "no such bucket"})
