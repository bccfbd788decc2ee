"""A mistake in a user's script: told once, with its line, and not tried again for the retries that are left."""

from __future__ import annotations

from faults.site import Run, Site

TYPO = "AttributeError: 'Worker' object has no attribute 'log_metrcis'"
LINE = 'worker.log_metrcis({"loss": 0.5}, step=2)'


def test_a_typo_fails_the_task_at_once_and_everybody_says_so(site: Site) -> None:
    run = Run(site, "mistaken", "typo")
    site.stack.airflow.api.trigger(run.dag_id, {}, dag_run_id=run.run_id)
    task = run.ended()
    assert (task["state"], task["try_number"]) == ("failed", 1), "two retries are left, which could not help"
    result = run.result()
    assert (result.state.value, result.restarts) == ("FAILED", 0)
    assert result.cause is not None
    assert TYPO in result.cause.message, result.cause
    (record,) = run.recorded_as("FAILED")
    assert TYPO in record.tags["mxdist.cause"]
    assert run.losses() == [(1, 1.0)]
    log = "\n".join(run.log())
    assert LINE in log
    assert TYPO in log
    run.gone()
