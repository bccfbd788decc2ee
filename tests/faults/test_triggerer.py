"""The triggerer is killed while a task waits in it: the job does not notice, and another triggerer follows it."""

from __future__ import annotations

from faults.site import RANKS, Site, Trained, assert_trained_once

HELD = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]


def test_the_next_triggerer_follows_the_job(site: Site, undisturbed: Trained) -> None:
    run = site.train("triggerer-killed", hold=HELD)
    ranks = [run.reached(barrier) for barrier in HELD]
    run.in_state("deferred")
    triggerer = site.stack.airflow["triggerer"]
    triggerer.kill()
    assert not triggerer.alive()
    triggerer.start()
    assert [run.reached(barrier) for barrier in HELD] == ranks, "the same ranks go on"
    run.release()
    assert_trained_once(run, undisturbed)
    assert run.task()["try_number"] == 1
    assert run.result().restarts == 0
    assert run.attempt().supervisors.last() == 1
