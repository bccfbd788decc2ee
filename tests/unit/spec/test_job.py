"""A job file: what it refuses, how it says so, and what names it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from mxdist.errors import SpecError
from mxdist.spec import JobState, Split, Tracking, TrainingJob, job_schema, parse_job
from mxdist.spec.base import Spec
from mxdist.spec.cluster import Storage

DATASET = {"manifest_uri": "s3://data/mnist/manifests/1.json", "version": "ab" * 32}


def job(**changes: Any) -> dict[str, Any]:
    return {"name": "digits", "model": {"name": "lenet"}, "dataset": DATASET, **changes}


def problems(document: object) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_job(document)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_every_wrong_field_is_named_at_once() -> None:
    found = problems(
        {
            "name": "Not A Label",
            "modle": {},
            "model": {"name": "lent"},
            "dataset": {**DATASET, "labels": [1, 1]},
            "parallelism": {"world_size": 2, "strategy": "allreduce"},
            "optimizer": {"learning_rate": 0, "schedule": {"warmup": 3}},
            "limits": {"deadline_s": "soon"},
            "epochs": "0",
            "batch_size": 5,
        }
    )
    assert set(found) == {
        "name",
        "modle",
        "model.name",
        "dataset.labels",
        "optimizer.learning_rate",
        "optimizer.schedule.warmup",
        "limits.deadline_s",
        "epochs",
        "batch_size",
    }


@pytest.mark.parametrize(
    ("document", "path", "words"),
    [
        pytest.param(job(batchsize=64), "batchsize", "did you mean 'batch_size'", id="nearest-known-key"),
        pytest.param(job(optimizer={"learning_rat": 1}), "optimizer.learning_rat", "'learning_rate'", id="nested-key"),
        pytest.param(job(tracking={"zzz": 1}), "tracking.zzz", "known are", id="nothing-near"),
        pytest.param(
            job(parallelism={"world_size": 0}), "parallelism.world_size", "greater than or equal to 1", id="zero-ranks"
        ),
        pytest.param(job(cluster={"kind": "slurm", "hosts": ["a"]}), "cluster.hosts", "kind ssh", id="hosts-of-slurm"),
        pytest.param(job(batch_size=3, parallelism={"world_size": 2}), "batch_size", "use 2 or 4", id="indivisible"),
        pytest.param(job(batch_size=1, parallelism={"world_size": 2}), "batch_size", "use 2", id="fewer-than-ranks"),
        pytest.param(
            job(cluster={"slots": 1}, parallelism={"world_size": 2}), "parallelism", "the 1 slots", id="slots"
        ),
        pytest.param({"name": "a", "model": {"name": "lenet"}}, "dataset", "required", id="no-dataset"),
        pytest.param({"name": "a"}, "script", "either model or script", id="no-work"),
        pytest.param(job(script={"path": "x.py"}), "script", "either model or script", id="two-kinds-of-work"),
        pytest.param(job(model={}), "model.recipe", "either name or recipe", id="empty-model"),
        pytest.param(job(model={"name": "alexnet9"}), "model.name", "did you mean alexnet", id="unknown-model"),
        pytest.param(job(kind=["training"]), "kind", "unknown kind ['training']", id="kind-is-a-list"),
        pytest.param(job(kind="dance"), "kind", "known are training, evaluation", id="unknown-kind"),
        pytest.param(job(tracking={"uri": "http://me:secret@host"}), "tracking.uri", "password", id="password-in-uri"),
        pytest.param(job(optimizer={"learning_rate": "nan"}), "optimizer.learning_rate", "finite", id="nan"),
        pytest.param(
            {"name": "a", "script": {"path": "t.py", "env": {"A=B": "x"}}}, "script.env", "A=B", id="env-name"
        ),
        pytest.param(
            {"name": "a", "script": {"path": "t.py", "env": {"MXDIST_TOKEN": "x", "HOROVOD_RANK": "1", "OK": "1"}}},
            "script.env",
            "mxdist sets these itself, so they cannot be given here: HOROVOD_RANK, MXDIST_TOKEN",
            id="env-of-mxdist",
        ),
        pytest.param(
            {"name": "a", "script": {"path": "t.py", "env": {"A=B": "x", "MXDIST_TOKEN": "x"}}},
            "script.env",
            "here: MXDIST_TOKEN",
            id="env-wrong-in-two-ways",
        ),
        pytest.param(
            {"name": "a", "script": {"path": "t.py", "env": {"DMLC_ROLE": "server"}}},
            "script.env",
            "DMLC_ROLE",
            id="dmlc",
        ),
        pytest.param({"name": "a", "script": {"path": "t.py", "args": ["a\0"]}}, "script.args", "NUL", id="nul"),
        pytest.param("a string", "", "must be a mapping", id="not-a-mapping"),
        pytest.param(
            {
                "kind": "evaluation",
                "name": "e",
                "models": {"challenger": "s3://m"},
                "dataset": DATASET,
                "parallelism": {"world_size": 2},
            },
            "parallelism",
            "one process",
            id="evaluation-on-two-ranks",
        ),
        pytest.param(job(optimizer={"learning_rate": 1e-320}), "optimizer.learning_rate", "out of range", id="tiny"),
        pytest.param(job(optimizer={"weight_decay": 1e300}), "optimizer.weight_decay", "out of range", id="huge"),
    ],
)
def test_one_wrong_field_says_what_to_do(document: object, path: str, words: str) -> None:
    found = problems(document)
    assert words in found[path]
    assert len(found) == 1


@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "pipeline", "stages": 4, "micro_batches": 8},
        {"strategy": "parameter_server"},
        {"accumulate": 2},
        {"batch_norm": "frozen"},
        {"cycle_time_ms": 3},
    ],
)
def test_an_evaluation_has_no_layout(layout: dict[str, Any]) -> None:
    document = {"kind": "evaluation", "name": "e", "models": {"challenger": "s3://m"}, "dataset": DATASET}
    parse_job({**document, "parallelism": {"world_size": 1, "strategy": "allreduce"}})
    found = problems({**document, "parallelism": layout})
    assert found["parallelism"].startswith(", ".join(layout) + ": leave out")


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"world_size": 2, "batch_norm": "synchronised"}, ["batch_norm"]),
        ({"world_size": 2, "accumulate": 8}, ["accumulate"]),
        ({"compression": "fp16", "lossy": ["compression"]}, ["compression"]),
        ({"strategy": "devices", "devices": 2}, ["devices"]),
        (
            {"strategy": "pipeline", "stages": 2, "across": "processes", "world_size": 2, "balance": "time"},
            ["stages", "balance", "across"],
        ),
    ],
)
def test_a_script_takes_no_layout_of_the_loop(layout: dict[str, Any], named: list[str]) -> None:
    found = problems({"name": "a", "script": {"path": "t.py"}, "parallelism": layout})
    assert found["script"].startswith(", ".join(f"parallelism.{name}" for name in named) + ": read by mxdist's own")


@pytest.mark.parametrize(
    "layout",
    [
        {"world_size": 2, "controller": "mpi", "fusion_threshold_mb": 1, "cycle_time_ms": 2},
        {"strategy": "parameter_server", "servers": 2, "kvstore": "dist_device_sync"},
        {"strategy": "parameter_server", "kvstore": "dist_async", "lossy": ["dist_async"]},
    ],
)
def test_a_script_may_have_the_world_that_it_needs(layout: dict[str, Any]) -> None:
    assert parse_job({"name": "a", "script": {"path": "t.py"}, "parallelism": layout})


@pytest.mark.parametrize(("spec", "field"), [(Tracking, "uri"), (Storage, "endpoint_url")])
def test_a_password_is_refused_and_not_repeated_in_the_error(spec: type[Spec], field: str) -> None:
    assert spec.parse({field: "http://host:8333/a@b"})
    with pytest.raises(SpecError, match="carries a password") as caught:
        spec.parse({field: "http://me:hunter2@host"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(("spec", "field"), [(Tracking, "uri"), (Storage, "endpoint_url")])
@pytest.mark.parametrize(
    "address",
    [
        "me:hunter2@host:5000", "host:5000", "nonsense", "file:///mlruns", "ftp://host", "http://", "http:///path",
        "http://host/?token=hunter2", "http://host#hunter2", "http://a b", "//host",
    ],
)  # fmt: skip
def test_an_address_is_one_of_a_server_and_nothing_else(spec: type[Spec], field: str, address: str) -> None:
    with pytest.raises(SpecError, match=rf"{field}: (must be http://HOST|carries a password)") as caught:
        spec.parse({field: address})
    assert "hunter2" not in str(caught.value)
    assert spec.parse({field: address}, stored=True).to_document()[field] == address


@pytest.mark.parametrize(("name", "problem"), [("a/b", "has a / or a :"), ("a:b", "has a / or a :"), (" ", "is empty")])
def test_a_model_that_mlflow_would_not_register_is_refused_before_it_is_trained(name: str, problem: str) -> None:
    assert Tracking.parse({"registered_model": "Ziffern 5-9 (März)"})
    with pytest.raises(SpecError, match=f"registered_model.*{problem}"):
        Tracking.parse({"registered_model": name})


def test_stored_job_that_would_be_refused_today_can_still_be_read() -> None:
    document = job(tracking={"registered_model": "team/digits"})
    assert parse_job(document, stored=True).tracking.registered_model == "team/digits"
    with pytest.raises(SpecError, match="registered_model"):
        parse_job(document)


def test_text_from_a_form_is_cast() -> None:
    parsed = TrainingJob.parse(
        job(
            epochs="3",
            optimizer={"learning_rate": "0.1", "clip_norm": ""},
            limits={"deadline_s": "None"},
            shuffle="false",
        )
    )
    assert (parsed.epochs, parsed.optimizer.learning_rate) == (3, 0.1)
    assert parsed.optimizer.clip_norm is None
    assert parsed.limits.deadline_s is None
    assert parsed.shuffle is False


def test_a_spec_survives_json() -> None:
    parsed = parse_job(job(init={"model_uri": "s3://m", "head": "replace", "freeze": ["conv.*"]}))
    assert parse_job(json.loads(json.dumps(parsed.to_document()))) == parsed


def test_digest_is_that_of_the_canonical_json_in_any_process() -> None:
    code = (
        "import sys, json; from mxdist.spec import parse_job; print(parse_job(json.loads(sys.stdin.read())).digest())"
    )
    backwards = dict(reversed(list(job(epochs=3).items())))
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(document),
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for document, seed in ((job(epochs=3), "1"), (backwards, "2"))
    }
    assert digests == {parse_job(job(epochs="3")).digest()}
    assert parse_job(job(epochs=4)).digest() not in digests


def test_a_digest_never_changes_between_versions() -> None:
    # The canonical JSON is written out here by hand: {"seed":0,"test":0.15,"train":0.7,"validation":0.15}
    assert Split().digest() == "3f488241eddbc7c3bef3a1eebd0dc4c764076186728837f2319cd4df124141db"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"parallelism": {"world_size": 2}}, True),
        ({"limits": {"deadline_s": 5}}, True),
        ({"tracking": {"experiment": "x"}}, True),
        ({"seed": 1}, False),
        ({"optimizer": {"learning_rate": 0.1}}, False),
        ({"batch_size": 32}, False),
    ],
)
def test_training_digest_covers_what_decides_the_weights(change: dict[str, Any], same: bool) -> None:
    before, after = TrainingJob.parse(job()), TrainingJob.parse(job(**change))
    assert (before.training_digest() == after.training_digest()) is same


def test_schema_names_every_field_with_a_description() -> None:
    schema = job_schema()
    for name, definition in schema["$defs"].items():  # type: ignore[attr-defined]
        if "properties" in definition and name in {"Optimizer", "Limits", "Tracking", "Cluster", "Parallelism"}:
            undescribed = [
                key
                for key, value in definition["properties"].items()
                if "description" not in value and "$ref" not in value
            ]
            assert undescribed in ([], ["schedule"])


def test_final_states() -> None:
    assert {state for state in JobState if state.final} == {"SUCCEEDED", "FAILED", "DEADLINE", "CANCELLED", "PREEMPTED"}
    assert {state for state in JobState if state.resumable} == {"FAILED", "DEADLINE", "PREEMPTED"}


def test_script_may_watch_horovod() -> None:
    env = {"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_TIMELINE": "/data/t.json", "OMP_NUM_THREADS": "3"}
    parsed = parse_job({"name": "a", "script": {"path": "t.py", "env": env}})

    assert isinstance(parsed, TrainingJob)
    assert parsed.script is not None
    assert parsed.script.env == env
