"""Four DAG runs train one registered model, all active at once: one trains at a time, the oldest data first."""

from __future__ import annotations

from itertools import pairwise

from faults.site import RANKS, REGISTERED_DAG_ID, Run, Site, wait_for

HELD = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]
FIRST, LATER = "march-2", ["march-4", "march-1", "march-3"]


def start(site: Site, run_id: str) -> Run:
    logical_date = f"2026-03-0{run_id[-1]}T00:00:00Z"
    conf = {"dataset": site.dataset}
    site.stack.airflow.api.trigger(REGISTERED_DAG_ID, conf, dag_run_id=run_id, logical_date=logical_date)
    return Run(site, run_id, REGISTERED_DAG_ID)


def waits(run: Run) -> bool:
    trigger = run.task().get("trigger")
    return trigger is not None and trigger["classpath"] == "mxdist.triggers.turn.TurnTrigger"


def test_one_at_a_time_and_in_order(site: Site) -> None:
    Run(site, FIRST, REGISTERED_DAG_ID).hold(*HELD)
    first = start(site, FIRST)
    for barrier in HELD:
        first.reached(barrier)
    later = [start(site, run_id) for run_id in LATER]
    for run in later:
        wait_for(lambda run=run: waits(run), f"{run.run_id} to wait for its turn")  # type: ignore[misc]
    assert [run.attempts() for run in later] == [[], [], []]
    first.release()
    runs = [first, *later]
    for run in runs:
        assert run.ended()["state"] == "success"
        run.gone()
    in_order = sorted(runs, key=lambda run: run.attempt().claim.submitted_at)
    assert [run.run_id for run in in_order] == ["march-2", "march-1", "march-3", "march-4"]
    for before, after in pairwise(in_order):
        assert before.result().ended_at <= after.attempt().claim.submitted_at
    assert [run.attempt().supervisors.last() for run in runs] == [1, 1, 1, 1]
