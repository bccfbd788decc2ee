"""Who is champion. The truth is a record per model in the run store, changed by compare-and-swap only.

MLflow's alias is set without any condition, so two writers can both believe that they won; the alias here is only the
record's projection. An alias that somebody moved by hand is reported, and left as it is until the next promotion.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self
from urllib.parse import quote, unquote

from mxdist.errors import MxdistError, NotFound, RegistryError, TrackingError
from mxdist.store import Chunks, Register, Store, Versioned
from mxdist.tracking.client import Client, Login
from mxdist.tracking.gate import Decision, Rule, Scores, decide, latest, same_training_data

log = logging.getLogger(__name__)

ALIAS = "champion"
_ROOT = "promotions"


@dataclass(frozen=True)
class Candidate:
    """A model version and how it scored.

    :param version: its number in MLflow's registry.
    :param model_uri: its exported files in the run store.
    """

    version: str
    scores: Scores
    run_id: str | None = None
    model_uri: str | None = None
    model_digest: str | None = None


@dataclass(frozen=True)
class Champion:
    """A promotion record.

    :param dataset_version: the evaluation set that ``metrics`` were taken on.
    :param as_of: the end of the data interval that the model was trained on.
    :param trained_on: the dataset version that it was trained on; '' if nobody knows.
    """

    version: str
    run_id: str | None
    metrics: dict[str, float]
    dataset_version: str
    as_of: str | None
    by: str
    at: float
    reason: str
    forced: bool = False
    model_uri: str | None = None
    model_digest: str | None = None
    trained_on: str = ""

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Self:
        """Return the record in a document of any version of mxdist."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})


@dataclass(frozen=True)
class Promotion:
    """What came of an attempt to promote.

    :param champion: the champion's version afterwards.
    :param previous: the champion's version before.
    :param drift: what somebody changed by hand in MLflow, or ''.
    """

    promoted: bool
    reason: str
    champion: str | None
    previous: str | None = None
    numbers: Mapping[str, float | str | None] = field(default_factory=dict)
    forced: bool = False
    drift: str = ""


class Registry:
    """The promotion records under a runs root, and their projection into MLflow.

    :param runs: the store of all jobs.
    :param uri: the MLflow server.
    """

    def __init__(self, runs: Store, uri: str, *, login: Login | None = None, alias: str = ALIAS) -> None:
        self._runs = runs
        self._client = Client(uri, login)
        self._alias = alias

    def champion(self, name: str) -> Champion | None:
        """Return the record that counts, or None. Asks the run store alone."""
        return _loaded(self._register(name).read())

    def history(self, name: str) -> list[Champion]:
        """Return all records, oldest first."""
        return [Champion.load(value["value"]) for _, value in Chunks(self._runs, _prefix(name)).read()]

    def promote(
        self, name: str, challenger: Candidate, champion: Candidate | None, rule: Rule, *, by: str = "mxdist"
    ) -> Promotion:
        """Make the challenger the champion if it may be; calling it again changes nothing.

        :param champion: whom the challenger was compared with; None if there was no champion then.
        :param by: who asks, for the record.
        :raises RegistryError: MLflow knows no such model or version.
        :raises TrackingError: MLflow cannot be reached. Before the record is written nothing has changed; after it,
            the next call (of this or of ``project``) moves the alias.
        """
        aliased = self._aliased(name)
        self._check_version(name, challenger.version)
        seen = self._register(name).read()
        record = _loaded(seen)
        drift = self._report(name, seen, aliased)
        before = record.version if record else None
        if record and record.version == challenger.version:
            self._project_pending(name, seen)
            return Promotion(True, f"version {before} is the champion already", before, before, drift=drift)
        decision = self._decide(challenger, champion, record, aliased, rule)
        if not decision.promote:
            return self._refused(name, challenger, before, decision, drift)
        if self._register(name).swap(seen, asdict(_record(challenger, record, decision, by))) is None:
            raced = replace(decision, promote=False, reason="another promotion was faster; evaluate again")
            return self._refused(name, challenger, before, raced, drift)
        self._project_new(name, challenger.version)
        self._tag(name, challenger.version, f"promoted: {decision.reason}")
        return Promotion(True, decision.reason, challenger.version, before, decision.numbers, decision.forced, drift)

    def names(self) -> list[str]:
        """Return every model that has a promotion record. Asks the run store alone."""
        found = (entry.key.split("/")[1] for entry in self._runs.list(f"{_ROOT}/"))
        return [unquote(name) for name in dict.fromkeys(found)]

    def project(self, name: str) -> bool:
        """Move the alias to the champion, if a promotion could not do so; return whether that was so.

        :raises TrackingError: MLflow cannot be reached.
        """
        return self._project_pending(name, self._register(name).read())

    def drift(self, name: str) -> str:
        """Return what somebody changed by hand in MLflow, or ''."""
        return self._drift_of(name, self._register(name).read(), self._aliased(name))

    def _decide(
        self,
        challenger: Candidate,
        champion: Candidate | None,
        record: Champion | None,
        aliased: str | None,
        rule: Rule,
    ) -> Decision:
        # What the champion was trained on is what the record says. A champion that was not scored has no metric.
        scored = champion.scores if champion else Scores()
        theirs = replace(scored, as_of=record.as_of, trained_on=record.trained_on) if record else None
        compared, now = champion.version if champion else None, record.version if record else None
        decision = decide(challenger.scores, theirs, rule)
        if rule.force:
            return decision
        if compared is not None and compared != now:
            reason = f"the champion changed since the evaluation (from version {compared} to {now}); evaluate again"
            return replace(decision, promote=False, reason=reason)
        if compared is None and record is not None:
            reason = f"version {now} became champion since the evaluation; evaluate again"
            return replace(decision, promote=False, reason=reason)
        if record is None and aliased is not None:
            reason = f"version {aliased} has the alias {self._alias!r}, but no record says why; force it to take over"
            return replace(decision, promote=False, reason=reason)
        return decision

    def _refused(
        self, name: str, challenger: Candidate, before: str | None, decision: Decision, drift: str
    ) -> Promotion:
        self._tag(name, challenger.version, f"refused: {decision.reason}")
        now = self.champion(name)
        return Promotion(False, decision.reason, now.version if now else None, before, decision.numbers, drift=drift)

    def _project_pending(self, name: str, seen: Versioned) -> bool:
        pending = bool(seen.number) and self._projected(name)["number"] < seen.number
        if pending:
            self._project(name)
        return pending

    def _project_new(self, name: str, version: str) -> None:
        try:
            self._project(name)
        except TrackingError as error:
            raise TrackingError(
                f"version {version} of {name} is recorded as champion, but MLflow's alias was not moved: "
                f"{error.message}",
                hint="Promote it again: nothing is decided anew, only the alias is moved.",
            ) from error

    def _project(self, name: str) -> None:
        register = self._register(name)
        while True:
            seen = register.read()
            version = str(seen.value["version"])
            self._client.call("set_registered_model_alias", name, self._alias, version)
            self._runs.write_json(f"{_prefix(name)}/projected", {"number": seen.number, "version": version})
            if register.read().number == seen.number:  # else we may have overwritten a newer projection: mend it
                return

    def _projected(self, name: str) -> dict[str, Any]:
        try:
            document: dict[str, Any] = self._runs.read_json(f"{_prefix(name)}/projected")
        except NotFound:
            return {"number": 0, "version": None}
        return document

    def _report(self, name: str, seen: Versioned, aliased: str | None) -> str:
        text = self._drift_of(name, seen, aliased)
        if text:
            log.warning("%s: %s", name, text)
            self._best_effort("set_registered_model_tag", name, "mxdist.alias_drift", text)
        return text

    def _drift_of(self, name: str, seen: Versioned, aliased: str | None) -> str:
        record, projected = _loaded(seen), self._projected(name)
        if record is None:
            return (
                f"the alias {self._alias!r} is at version {aliased}, but there is no promotion record"
                if aliased
                else ""
            )
        if aliased == record.version or (projected["number"] < seen.number and aliased == projected["version"]):
            return ""
        where = f"at version {aliased}" if aliased else "gone"
        return f"the alias {self._alias!r} is {where}, by hand: version {record.version} was promoted"

    def _tag(self, name: str, version: str, text: str) -> None:
        self._best_effort("set_model_version_tag", name, version, "mxdist.gate", text[:4900])

    def _best_effort(self, function: str, *args: str) -> None:
        try:
            self._client.call(function, *args)
        except MxdistError as error:
            log.warning("%s", error)

    def _aliased(self, name: str) -> str | None:
        model = self._client.find("get_registered_model", name)
        if model is None:
            raise RegistryError(
                f"MLflow at {self._client.uri} has no registered model {name!r}.", hint="Was it registered?"
            )
        version = model.aliases.get(self._alias)
        return None if version is None else str(version)

    def _check_version(self, name: str, version: str) -> None:
        if self._client.find("get_model_version", name, version) is None:
            raise RegistryError(f"MLflow at {self._client.uri} has no version {version} of {name!r}.")

    def _register(self, name: str) -> Register:
        return Register(self._runs, _prefix(name))


def _prefix(name: str) -> str:
    return f"{_ROOT}/{quote(name, safe='')}"


def _loaded(seen: Versioned) -> Champion | None:
    return Champion.load(seen.value) if seen.value else None


def _record(challenger: Candidate, before: Champion | None, decision: Decision, by: str) -> Champion:
    scores = challenger.scores
    return Champion(
        version=challenger.version,
        run_id=challenger.run_id,
        metrics={key: value for key, value in scores.metrics.items() if value is not None and math.isfinite(value)},
        dataset_version=scores.dataset_version,
        as_of=_age(scores, before),
        by=by,
        at=time.time(),
        reason=decision.reason,
        forced=decision.forced,
        model_uri=challenger.model_uri,
        model_digest=challenger.model_digest,
        trained_on=scores.trained_on,
    )


def _age(scores: Scores, before: Champion | None) -> str | None:
    """Return how far the training data reach; never less than was said of the same data."""
    if before is None or not same_training_data(scores.trained_on, before.trained_on):
        return scores.as_of
    return latest(scores.as_of, before.as_of)
