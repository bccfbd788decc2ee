"""The triggerer is killed while a task waits in it: the job does not notice, and another triggerer follows it."""

from __future__ import annotations

import re
from itertools import pairwise

from faults.site import RANKS, Run, Site, Trained, assert_trained_once

from mxdist.launch.client import log_lines

_NUMBERED = re.compile(r"^ *(\d+) (.*)$", re.DOTALL)

HELD = [f"epoch-2-rank-{rank}" for rank in range(RANKS)]


def test_the_next_triggerer_follows_the_job(site: Site, undisturbed: Trained) -> None:
    run = site.train("triggerer-killed", hold=HELD)
    ranks = [run.reached(barrier) for barrier in HELD]
    run.in_state("deferred")
    triggerer = site.stack.airflow["triggerer"]
    triggerer.kill()
    assert not triggerer.alive()
    (record,) = run.records()
    assert run.link("MLflow run").endswith(f"/runs/{record.run_id}"), "while nobody watches the training"
    triggerer.start()
    assert [run.reached(barrier) for barrier in HELD] == ranks, "the same ranks go on"
    run.release()
    assert_trained_once(run, undisturbed)
    assert run.task()["try_number"] == 1
    assert run.result().restarts == 0
    assert run.attempt().supervisors.last() == 1
    assert_whole_log(run)


def assert_whole_log(run: Run) -> None:
    """Check that every line of the job stands in the task's log, in order; after the kill, those of a look may again.

    Times of day, which Airflow may put before a line, do not matter.
    """
    told = [line for _, chunk in log_lines(run.attempt()) for line in chunk]
    assert len(told) > RANKS
    found = [(int(m[1]), m[2]) for event in run.log() if (m := _NUMBERED.match(event))]
    assert list(dict.fromkeys(found)) == told
    assert sum(later <= earlier for (earlier, _), (later, _) in pairwise(found)) <= 1
