"""The champion changes by compare-and-swap; MLflow's alias follows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mxdist.errors import RegistryError, TrackingError
from mxdist.store import Store
from mxdist.tracking.client import Client
from mxdist.tracking.gate import Rule, Scores
from mxdist.tracking.registry import Candidate, Registry
from stack.mlflow import Mlflow
from support.mlflow_proxy import MlflowProxy

RULE = Rule("accuracy")


def candidate(
    version: int, accuracy: float, *, data: str = "test-1", as_of: str | None = None, trained_on: str = ""
) -> Candidate:
    scores = Scores({"accuracy": accuracy}, data, as_of, trained_on)
    return Candidate(str(version), scores, run_id=f"run{version}", model_uri=f"/m/{version}")


@pytest.fixture
def name(mlflow_server: Mlflow, tmp_path: Any) -> str:
    """A registered model with nine versions."""
    client, name = Client(mlflow_server.url), f"digits {uuid.uuid4().hex[:8]}"
    run = client.call("create_run", "0")
    client.call("create_registered_model", name)
    for _ in range(9):
        source = f"{run.info.artifact_uri}/model"
        client.call("create_model_version", name, source, run_id=run.info.run_id, await_creation_for=0)
    return name


@pytest.fixture
def registry(runs: Store, proxy: MlflowProxy) -> Registry:
    return Registry(runs, proxy.url)


@pytest.fixture
def alias(mlflow_server: Mlflow, name: str) -> Callable[[], str | None]:
    """Return a function that says where the alias is."""
    client = Client(mlflow_server.url)

    def read() -> str | None:
        found = client.call("get_registered_model", name).aliases.get("champion")
        return None if found is None else str(found)

    return read


def tag(proxy: MlflowProxy, name: str, version: str) -> str:
    return str(Client(proxy.url).call("get_model_version", name, version).tags.get("mxdist.gate"))


def test_the_first_then_a_better_one(registry: Registry, name: str, alias: Any, proxy: MlflowProxy) -> None:
    assert registry.champion(name) is None
    first = registry.promote(name, candidate(1, 0.9, as_of="2026-01-01"), None, RULE, by="retrain")
    assert (first.promoted, first.champion, first.previous, alias()) == (True, "1", None, "1")
    second = registry.promote(name, candidate(2, 0.95, as_of="2026-02-01"), candidate(1, 0.9), RULE)
    assert (second.promoted, second.champion, second.previous, alias()) == (True, "2", "1", "2")
    champion = registry.champion(name)
    assert champion is not None
    assert (champion.version, champion.run_id, champion.model_uri) == ("2", "run2", "/m/2")
    assert (champion.metrics, champion.dataset_version, champion.as_of) == ({"accuracy": 0.95}, "test-1", "2026-02-01")
    assert [(record.version, record.by) for record in registry.history(name)] == [("1", "retrain"), ("2", "mxdist")]
    assert tag(proxy, name, "2") == "promoted: accuracy 0.95 beats the champion's 0.9"


@pytest.mark.parametrize(
    ("challenger", "reason"),
    [
        pytest.param(candidate(2, 0.8, as_of="2026-02-01"), "0.8 does not beat the champion's 0.9", id="worse"),
        pytest.param(candidate(2, 0.9, as_of="2026-02-01"), "0.9 does not beat", id="equal"),
        pytest.param(candidate(2, float("nan"), as_of="2026-02-01"), "accuracy is nan", id="nan"),
        pytest.param(candidate(2, 0.95, as_of="2025-12-01"), "older data", id="late-run-over-older-data"),
        pytest.param(candidate(2, 0.95, data="test-2", as_of="2026-02-01"), "different data", id="other-test-set"),
        pytest.param(Candidate("2", Scores({"loss": 1.0}, "test-1", "2026-02-01")), "has no accuracy", id="absent"),
    ],
)
def test_refusals_change_nothing(
    registry: Registry, name: str, alias: Any, proxy: MlflowProxy, challenger: Candidate, reason: str
) -> None:
    registry.promote(name, candidate(1, 0.9, as_of="2026-01-01"), None, RULE)
    before = registry.champion(name)
    answer = registry.promote(name, challenger, candidate(1, 0.9), RULE)
    assert (answer.promoted, answer.champion) == (False, "1")
    assert reason in answer.reason
    assert (registry.champion(name), alias()) == (before, "1")
    assert reason in tag(proxy, name, "2")


def test_data_of_the_champion_are_of_its_age_whatever_run_staged_them(registry: Registry, name: str) -> None:
    first = candidate(1, 0.8, as_of="2026-03-11", trained_on="v1")
    registry.promote(name, first, None, RULE)
    late = candidate(2, 0.9, as_of="2026-03-09", trained_on="v1")
    assert registry.promote(name, late, candidate(1, 0.8), RULE).promoted
    record = registry.champion(name)
    assert record is not None
    assert (record.as_of, record.trained_on) == ("2026-03-11", "v1")
    backfill = registry.promote(name, candidate(3, 0.95, as_of="2026-03-10", trained_on="v0"), candidate(2, 0.9), RULE)
    assert "older data" in backfill.reason


def test_force_is_recorded(registry: Registry, name: str, alias: Any) -> None:
    registry.promote(name, candidate(1, 0.9), None, RULE)
    answer = registry.promote(name, candidate(2, 0.1), candidate(1, 0.9), Rule("accuracy", force=True), by="ann")
    assert (answer.promoted, answer.forced, alias()) == (True, True, "2")
    record = registry.champion(name)
    assert record is not None
    assert (record.forced, record.by) == (True, "ann")
    assert "forced, although accuracy 0.1" in record.reason


def test_of_many_at_once_exactly_one_wins(
    runs: Store, meeting: Callable[[str, int], Store], mlflow_server: Mlflow, name: str, alias: Any
) -> None:
    Registry(runs, mlflow_server.url).promote(name, candidate(1, 0.5), None, RULE)
    store = meeting("/0000000002.json", 6)  # all six have been found better before any is written down

    def promote(version: int) -> Any:
        return Registry(store, mlflow_server.url).promote(name, candidate(version, 0.9), candidate(1, 0.5), RULE)

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(promote, range(2, 8)))
    (winner,) = [answer for answer in answers if answer.promoted]
    losers = [answer for answer in answers if not answer.promoted]
    assert {answer.reason for answer in losers} == {"another promotion was faster; evaluate again"}
    champion = Registry(runs, mlflow_server.url).champion(name)
    assert champion is not None
    assert champion.version == winner.champion == alias()
    assert len(Registry(runs, mlflow_server.url).history(name)) == 2


def test_an_evaluation_against_a_former_champion_is_refused(registry: Registry, name: str) -> None:
    registry.promote(name, candidate(1, 0.5), None, RULE)
    registry.promote(name, candidate(2, 0.6), candidate(1, 0.5), RULE)
    stale = registry.promote(name, candidate(3, 0.9), candidate(1, 0.5), RULE)
    assert not stale.promoted
    assert "changed since the evaluation (from version 1 to 2)" in stale.reason
    unseen = registry.promote(name, candidate(3, 0.9), None, RULE)
    assert not unseen.promoted
    assert "version 2 became champion" in unseen.reason


def test_promoting_again_changes_nothing(registry: Registry, name: str, alias: Any) -> None:
    registry.promote(name, candidate(1, 0.5), None, RULE)
    again = registry.promote(name, candidate(1, 0.5), None, RULE)
    assert (again.promoted, again.champion, alias()) == (True, "1", "1")
    assert len(registry.history(name)) == 1


@pytest.mark.parametrize("mood", ["hang", "500"])
def test_mlflow_down_at_promote_publishes_nothing(
    registry: Registry, name: str, alias: Any, proxy: MlflowProxy, monkeypatch: pytest.MonkeyPatch, mood: str
) -> None:
    monkeypatch.setattr("mxdist.tracking.client.CALL_TIMEOUT_S", 1)
    proxy.always(mood)
    with pytest.raises(TrackingError, match="did not answer") as caught:
        registry.promote(name, candidate(1, 0.5), None, RULE)
    assert caught.value.retryable
    assert (registry.champion(name), alias()) == (None, None)
    proxy.always("pass")
    assert registry.promote(name, candidate(1, 0.5), None, RULE).promoted
    assert alias() == "1"


@pytest.mark.parametrize("finish", ["promote", "project"])
def test_mlflow_lost_between_record_and_alias_is_mended_by_the_next_call(
    registry: Registry, name: str, alias: Any, proxy: MlflowProxy, finish: str
) -> None:
    registry.promote(name, candidate(1, 0.5), None, RULE)
    proxy.mood = lambda method, path: "500" if path.endswith("/alias") and method == "POST" else "pass"
    with pytest.raises(TrackingError, match="recorded as champion, but MLflow's alias was not moved") as caught:
        registry.promote(name, candidate(2, 0.6), candidate(1, 0.5), RULE)
    assert caught.value.retryable
    assert alias() == "1"
    assert registry.drift(name) == ""
    proxy.always("pass")
    if finish == "promote":
        assert registry.promote(name, candidate(2, 0.6), candidate(1, 0.5), RULE).promoted
    else:
        registry.project(name)
    assert alias() == "2"
    assert len(registry.history(name)) == 2


def test_an_alias_moved_by_hand_is_reported_and_left(
    registry: Registry, name: str, alias: Any, mlflow_server: Mlflow
) -> None:
    client = Client(mlflow_server.url)
    registry.promote(name, candidate(1, 0.5), None, RULE)
    client.call("set_registered_model_alias", name, "champion", "7")
    assert "at version 7, by hand: version 1 was promoted" in registry.drift(name)
    refused = registry.promote(name, candidate(2, 0.4), candidate(1, 0.5), RULE)
    assert (refused.promoted, alias()) == (False, "7")
    assert "by hand" in refused.drift
    assert "by hand" in client.call("get_registered_model", name).tags["mxdist.alias_drift"]
    assert "by hand" in registry.promote(name, candidate(1, 0.5), None, RULE).drift
    assert alias() == "7"
    assert registry.promote(name, candidate(3, 0.9), candidate(1, 0.5), RULE).promoted
    assert alias() == "3"
    client.call("delete_registered_model_alias", name, "champion")
    assert "is gone, by hand" in registry.drift(name)


def test_an_alias_without_a_record_is_not_taken_over_silently(
    registry: Registry, name: str, alias: Any, mlflow_server: Mlflow
) -> None:
    Client(mlflow_server.url).call("set_registered_model_alias", name, "champion", "4")
    refused = registry.promote(name, candidate(1, 0.9), None, RULE)
    assert (refused.promoted, alias()) == (False, "4")
    assert "version 4 has the alias" in refused.reason
    assert registry.promote(name, candidate(1, 0.9), None, Rule("accuracy", force=True)).promoted
    assert alias() == "1"


def test_a_version_or_model_that_is_not_there(registry: Registry, name: str) -> None:
    with pytest.raises(RegistryError, match="no version 77"):
        registry.promote(name, candidate(77, 0.9), None, RULE)
    with pytest.raises(RegistryError, match="no registered model 'nobody'"):
        registry.promote("nobody", candidate(1, 0.9), None, RULE)
    assert registry.champion(name) is None
