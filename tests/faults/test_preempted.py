"""A preempted training goes on: Airflow, the run store and MLflow say the same."""

from __future__ import annotations

import os
import signal

from faults.site import RANKS, Site, Trained, end_of

HELD = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]


def test_a_preempted_training_goes_on_in_the_next_try(site: Site, undisturbed: Trained) -> None:
    run = site.train("preempted", hold=HELD)
    for barrier in HELD:
        run.reached(barrier)
    run.in_state("deferred")
    os.kill(run.supervisor(), signal.SIGTERM)
    (first,) = run.attempts()
    assert end_of(first).state.value == "PREEMPTED"
    assert [record.status for record in run.records()] == ["RUNNING"], "it goes on"
    run.release()
    assert run.ended()["state"] == "success"
    assert run.task()["try_number"] == 2
    second = run.attempts()[1]
    assert second.claim.origin == first.number
    assert end_of(second).model_digest == undisturbed.model_digest
    run.recorded_as("FINISHED")
    assert run.losses() == undisturbed.losses
    run.gone()
