"""A waiting DAG is deleted while no triggerer lives, so nobody is told: the reconcile DAG finds its job and ends it."""

from __future__ import annotations

from faults.site import ABANDONED_DAG_ID, RANKS, Site, kept_running

HELD = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]


def test_job_of_a_deleted_dag_is_ended(site: Site) -> None:
    wanted = site.train("still-wanted", hold=HELD)
    run = site.train("abandoned", hold=HELD, dag_id=ABANDONED_DAG_ID)
    for one in (wanted, run):
        for barrier in HELD:
            one.reached(barrier)
        one.watched()
    triggerer = site.stack.airflow["triggerer"]
    with kept_running(site.stack.airflow["scheduler"]):
        triggerer.kill()
        run.delete()
        assert run.deleted()
        triggerer.start()
        wanted.watched()
        attempt = run.attempt()
        assert attempt.cancel_intent() is None, "Airflow has told nobody"

        said = site.reconcile()
    result = run.result()
    run.gone()
    assert result.state.value == "CANCELLED"
    intent = attempt.cancel_intent()
    assert intent is not None
    assert (intent.by, intent.reason) == ("reconciler", "its DAG run was deleted")
    assert [line for line in said["done"] if run.job_key in line] == [
        f"{run.job_key} attempt 1: its DAG run was deleted; ended as CANCELLED"
    ]
    run.recorded_as("KILLED")
    assert run.parents() == ["KILLED"]

    assert wanted.attempt().cancel_intent() is None
    assert wanted.parents() == ["RUNNING"]
    wanted.release()
    assert wanted.ended()["state"] == "success"
    wanted.gone()
