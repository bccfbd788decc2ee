"""Documents of any shape: a job, or a list of problems; never another error."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxdist.data.manifest import FORMAT, File, Manifest, version_of
from mxdist.errors import DataError, SpecError
from mxdist.spec import EvaluationJob, TrainingJob, parse_job

DATASET = {"manifest_uri": "s3://data/m/manifests/1.json", "version": "ab" * 32}
NAMES = sorted({*TrainingJob.model_fields, *EvaluationJob.model_fields} - {"kind"})
INNER = sorted(
    {
        inner
        for model in (TrainingJob, EvaluationJob)
        for field in model.model_fields.values()
        for inner in getattr(field.annotation, "model_fields", {})
    }
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(max_size=3), st.dates(),
    st.sampled_from([10**400, -(10**400), "9" * 5000, "nan", "\0", "\ud800", "true", "1e999", object()]),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(INNER), st.text(max_size=3), st.integers(), st.none()), inner, max_size=3
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=3), st.integers()), values, max_size=6),
    st.sampled_from(["training", "evaluation", "dance", None, 7, True]),
)
def test_a_document_is_a_job_or_has_problems(document: dict[Any, Any], kind: object) -> None:
    document["kind"] = kind
    whole = {"name": "x", "model": {"name": "lenet"}, "dataset": DATASET, **document}
    for one in (document, whole):
        with contextlib.suppress(SpecError):
            assert len(parse_job(one).digest()) == 64


@settings(max_examples=50, deadline=None)
@given(values)
def test_anything_at_all_is_refused_as_a_job(document: Any) -> None:
    with pytest.raises(SpecError):
        parse_job(document)


FILE = {"path": "a", "size": 1, "sha256": "0" * 64, "rows": 2, "split": None}
VERSION = version_of([File("a", 1, "0" * 64)])
MANIFEST = {"format": FORMAT, "name": "n", "version": VERSION, "as_of": "2026-12-01", "files": [FILE], "labels": [1]}


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        values,
        st.builds(lambda key, value: {**MANIFEST, key: value}, st.sampled_from(sorted(MANIFEST)), values),
        st.builds(
            lambda key, value: {**MANIFEST, "files": [{**FILE, key: value}]}, st.sampled_from(sorted(FILE)), values
        ),
    )
)
def test_a_manifest_is_one_or_is_refused(document: Any) -> None:
    with contextlib.suppress(DataError):
        manifest = Manifest.from_document(document, "here")
        manifest.to_document()
        assert manifest.size_bytes >= 0
        assert manifest.rows is None or manifest.rows >= 0


@pytest.mark.parametrize(
    "change",
    [{"labels": [float("inf")]}, {"labels": 7}, {"files": [{**FILE, "rows": -1}]}, {"files": [{**FILE, "rows": "2"}]},
     {"files": [{**FILE, "split": ["a"]}]}, {"files": [{**FILE, "size": True}]}, {"files": {}}, {"files": [[]]}],
)  # fmt: skip
def test_a_wrong_manifest_is_refused(change: dict[str, Any]) -> None:
    assert Manifest.from_document(MANIFEST, "here").version == VERSION
    with pytest.raises(DataError):
        Manifest.from_document({**MANIFEST, **change}, "here")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("epochs", True), ("seed", False), ("batch_size", True), ("parallelism.world_size", True),
        ("optimizer.learning_rate", True), ("optimizer.clip_norm", True), ("limits.deadline_s", True),
        ("optimizer.schedule.warmup_steps", False), ("dataset.labels.0", True), ("checkpoints.every_steps", True),
    ],
)  # fmt: skip
def test_true_is_no_number(path: str, value: Any) -> None:
    document: Any = {"name": "x", "model": {"recipe": "r.py", "params": {"on": True}}, "dataset": dict(DATASET)}
    *outer, last = path.split(".")
    place = document
    for name in outer if last != "0" else ():
        place = place.setdefault(name, {})
    if last == "0":
        document["dataset"]["labels"] = [value, 2]
    else:
        place[last] = value
    with pytest.raises(SpecError) as caught:
        parse_job(document)
    assert [problem.path for problem in caught.value.problems] == [path]
    assert f"(got '{str(value).lower()}')" in str(caught.value)


def test_numbers_as_text_are_still_numbers() -> None:
    document = {"name": "x", "model": {"name": "lenet"}, "dataset": {**DATASET, "labels": ["3", 4]}, "epochs": "2"}
    job = parse_job({**document, "shuffle": "true"})
    assert isinstance(job, TrainingJob)
    assert (job.epochs, job.shuffle, job.dataset and job.dataset.labels) == (2, True, (3, 4))
