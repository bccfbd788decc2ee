"""Job files: YAML or JSON, paths relative to the file, overrides, and every mistake told plainly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxdist.cli.jobfile import read_job
from mxdist.errors import SpecError
from mxdist.spec import TrainingJob

DATASET = {"manifest_uri": "s3://d/m.json", "version": "0" * 64}


def test_yaml_and_json_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nscript: {path: train.py}\nlimits: {deadline_s: 1e3}\n")
    document = {"name": "x", "script": {"path": "train.py"}, "limits": {"deadline_s": 1000}}
    (tmp_path / "job.json").write_text(json.dumps(document))

    assert read_job(tmp_path / "job.yaml") == read_job(tmp_path / "job.json")


def test_script_and_recipe_lie_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "script.yaml").write_text("name: x\nscript: {path: code/train.py}")
    recipe = {"name": "x", "model": {"recipe": "recipe.py"}, "dataset": DATASET}
    (tmp_path / "jobs" / "recipe.json").write_text(json.dumps(recipe))
    module = {**recipe, "model": {"recipe": "package.recipe"}}
    (tmp_path / "jobs" / "module.json").write_text(json.dumps(module))
    monkeypatch.chdir(tmp_path)
    jobs = [read_job(Path("jobs", name)) for name in ("script.yaml", "recipe.json", "module.json")]
    first, second, third = (job for job in jobs if isinstance(job, TrainingJob))

    assert first.script is not None
    assert first.script.path == str(tmp_path / "jobs/code/train.py")
    assert second.model is not None
    assert second.model.recipe == str(tmp_path / "jobs/recipe.py")
    assert third.model is not None
    assert third.model.recipe == "package.recipe"


def test_settings_override_the_file(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nscript: {path: train.py, args: [a]}")
    settings = ["parallelism.world_size=3", "script.args=[b, '1']", "limits.deadline_s=null", "seed=7"]
    job = read_job(tmp_path / "job.yaml", settings)

    assert isinstance(job, TrainingJob)
    assert job.script is not None
    assert (job.parallelism.world_size, job.script.args, job.seed) == (3, ("b", "1"), 7)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("name: x\nscrip: {path: a}", [], "scrip: unknown key; did you mean 'script'"),
        ("name: X Y\nscript: {path: a}\nepochs: 0", [], "3 problems|2 problems"),
        ("[1, 2]", [], "must be a mapping, not list"),
        ("name: [", [], "neither JSON nor YAML"),
        ("name: x\nscript: {path: a}", ["epochs"], "must be path=value"),
        ("name: x\nscript: {path: a}", ["name.x=1"], "name is not a mapping"),
        ("name: x\nscript: {path: a}", ["epochs=["], "the value is not YAML"),
        ("name: x\nscript: {path: a}", ["epochs=many"], "epochs: "),
        ("name: x\nscript: 7", [], "script: "),
        ("!!python/object/apply:os.system ['true']", [], "neither JSON nor YAML"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, text: str, settings: list[str], message: str) -> None:
    (tmp_path / "job.yaml").write_text(text)

    with pytest.raises(SpecError, match=message):
        read_job(tmp_path / "job.yaml", settings)


def test_missing_and_binary_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(SpecError, match="cannot be read"):
        read_job(tmp_path / "nothing.yaml")
    with pytest.raises(SpecError, match="neither JSON nor YAML"):
        read_job(tmp_path / "binary")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: x\nname: y\n", "'name' stands twice"),
        ('{"name": "x", "script": {"path": "a", "path": "b"}}', "'path' stands twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["twice", "twice-inside", "deep"],
)
def test_a_file_that_says_two_things_or_too_many_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError, match=told):
        read_job(tmp_path / "job.yaml")


@pytest.mark.parametrize("text", ["name: x\nname: y\n", "name: [\n"], ids=["twice", "open"])
def test_a_mistake_in_a_file_is_found_by_file_and_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(SpecError, match=f'in "{tmp_path}/job.yaml", line 2'):
        read_job(tmp_path / "job.yaml")


BOMB = "name: &a [x, x]\n" + "\n".join(f"k{n}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]" for n in range(24))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is empty; a job needs a name"),
        (b"# nothing yet\n---\n", "is empty; a job needs a name"),
        (b"name: x\nscript:\n\tpath: train.py\n", "indent with spaces, not with tabs"),
        (b"just words", "must be a mapping, not str"),
        (b"name: x\n---\nname: y\n", "neither JSON nor YAML"),
        (b"# " + b"x" * (4 << 20), "is larger than 4 MiB"),
        (BOMB.encode(), "name: input should be a valid string"),
        (b"name: x\nkind: [training]\n", "kind: must be training or evaluation"),
        (b"1: 2\nnull: 3\nname: x\n", "unknown key|should be strings"),
    ],
    ids=["empty", "comment", "tabs", "words", "two", "large", "bomb", "kind", "keys"],
)
def test_odd_files_are_told_in_one_message(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "job.yaml").write_bytes(data)
    with pytest.raises(SpecError, match=told) as caught:
        read_job(tmp_path / "job.yaml")
    assert len(str(caught.value)) < 10_000


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_job(tmp_path)


def test_a_file_of_another_system_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xef\xbb\xbfname: x\r\nscript:\r\n  path: train.py\r\n")
    assert read_job(tmp_path / "job.yaml").name == "x"


@pytest.mark.parametrize("path", ["~/train.py", "a b/../tr\u00e4in.py", "~nobody-of-that-name/train.py"])
def test_a_script_may_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "job.yaml").write_text(json.dumps({"name": "x", "script": {"path": path}}))
    job = read_job(tmp_path / "job.yaml")
    assert isinstance(job, TrainingJob)
    assert job.script is not None
    home = path.startswith("~/")
    assert job.script.path == str(tmp_path / "home" / "train.py" if home else tmp_path / path)


def test_dataset_from_a_file_goes_with_what_the_job_says(tmp_path: Path) -> None:
    text = "name: x\nmodel: {name: mlp}\ndataset: {version: old, labels: [4, 2]}\nstorage: {region: eu-west-1}\n"
    (tmp_path / "job.yaml").write_text(text)
    staged = {"dataset": DATASET, "storage": {"endpoint_url": "http://127.0.0.1:8333"}}
    (tmp_path / "data.json").write_text(json.dumps(staged))
    job = read_job(tmp_path / "job.yaml", ["dataset.labels=[1]"], dataset_from=tmp_path / "data.json")

    assert isinstance(job, TrainingJob)
    assert job.dataset is not None
    assert job.dataset.model_dump() == {**DATASET, "labels": (1,)}
    assert job.storage.model_dump() == {"endpoint_url": "http://127.0.0.1:8333", "region": "eu-west-1"}


def test_the_jobs_own_storage_wins(tmp_path: Path) -> None:
    text = "name: x\nmodel: {name: mlp}\nstorage: {endpoint_url: 'http://127.0.0.1:1'}\n"
    (tmp_path / "job.yaml").write_text(text)
    staged = {"dataset": DATASET, "storage": {"endpoint_url": "http://127.0.0.1:8333"}}
    (tmp_path / "data.json").write_text(json.dumps(staged))
    job = read_job(tmp_path / "job.yaml", dataset_from=tmp_path / "data.json")
    assert job.storage.endpoint_url == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "has no dataset"),
        ("[1]", "must be a mapping, not list"),
        ("dataset: [1]", "has no dataset"),
        ("dataset: {manifest_uri: a}", "has no dataset"),
        ("name: y\nscript: {path: a.py}", "has no dataset"),
    ],
)
def test_a_file_that_names_no_dataset_is_told(tmp_path: Path, text: str | None, message: str) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nmodel: {name: mlp}\n")
    if text is not None:
        (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(SpecError, match=message) as caught:
        read_job(tmp_path / "job.yaml", dataset_from=tmp_path / "data.yaml")
    assert "data.yaml" in str(caught.value)


def test_a_dataset_that_is_no_mapping_in_the_job_is_told(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: x\nmodel: {name: mlp}\ndataset: mnist\n")
    (tmp_path / "data.json").write_text(json.dumps({"dataset": DATASET}))
    with pytest.raises(SpecError, match=r"dataset: must be a mapping"):
        read_job(tmp_path / "job.yaml", dataset_from=tmp_path / "data.json")
