"""Two reconcilers at once, on two workers: a job that nobody wants ends once."""

from __future__ import annotations

from faults.site import ABANDONED_DAG_ID, RANKS, RECONCILE_DAG_ID, Site, kept_running, wait_for

HELD = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]
RUNS = ["reconcile-1", "reconcile-2"]


def test_two_at_once_end_a_job_once(site: Site) -> None:
    run = site.train("abandoned", hold=HELD, dag_id=ABANDONED_DAG_ID)
    for barrier in HELD:
        run.reached(barrier)
    run.watched()
    airflow = site.stack.airflow
    with kept_running(airflow["scheduler"], airflow["scheduler-2"]):
        airflow["triggerer"].kill()
        run.delete()
        assert run.deleted()
        airflow["triggerer"].start()
        attempt = run.attempt()
        assert attempt.cancel_intent() is None, "Airflow has told nobody"

        for run_id in RUNS:
            airflow.api.trigger(RECONCILE_DAG_ID, dag_run_id=run_id)
        states = {"success", "failed"}
        wait_for(lambda: all(airflow.api.run(RECONCILE_DAG_ID, one)["state"] in states for one in RUNS), "both")
    assert [airflow.api.run(RECONCILE_DAG_ID, one)["state"] for one in RUNS] == ["success", "success"]
    run.gone()
    intent = attempt.cancel_intent()
    assert intent is not None
    assert (intent.by, intent.reason) == ("reconciler", "its DAG run was deleted")
    assert run.result().state.value == "CANCELLED"
    assert attempt.supervisors.last() == 1
    run.recorded_as("KILLED")
    assert run.parents() == ["KILLED"]
