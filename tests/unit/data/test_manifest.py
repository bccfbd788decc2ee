"""What every reader relies on: a version is its digest, documents come back, the import is light."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from unit.data.conftest import PLUGINS, Place

from mxdist.data.manifest import File, Manifest, load_manifest, version_of

DIGESTS = ["0" * 63 + str(number) for number in range(3)]
FILES = (File("a", 1, DIGESTS[0]), File("b/c", 2, DIGESTS[1], rows=7, split="b"))


def test_the_version_is_the_published_recipe() -> None:
    """printf '[["a",1,"00..0"],["b/c",2,"00..1"]]' | sha256sum"""
    text = f'[["a",1,"{DIGESTS[0]}"],["b/c",2,"{DIGESTS[1]}"]]'
    answer = subprocess.run(["sha256sum"], input=text.encode(), capture_output=True, check=True).stdout.decode()
    assert version_of(FILES) == answer.split()[0]


def test_the_version_knows_neither_order_nor_descriptions() -> None:
    bare = [dataclasses.replace(file, rows=None, split=None) for file in FILES]
    assert version_of(bare[::-1]) == version_of(FILES)


@pytest.mark.parametrize("change", [{"path": "x"}, {"size": 9}, {"sha256": DIGESTS[2]}])
def test_the_version_knows_path_size_and_content(change: dict[str, object]) -> None:
    changed = [dataclasses.replace(FILES[0], **change), FILES[1]]  # type: ignore[arg-type]
    assert version_of(changed) != version_of(FILES)


@pytest.mark.parametrize("labels", [None, (3, 5)])
def test_a_manifest_comes_back_from_its_document(labels: tuple[int, ...] | None) -> None:
    manifest = Manifest("n", version_of(FILES), "2026-12-01T00:00:00+00:00", FILES, labels)
    assert Manifest.from_document(manifest.to_document(), "here") == manifest


def test_old_data_that_are_current_again_have_the_later_date(place: Place, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"A")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_bytes(b"B")
    first = place.stage(tmp_path / "a", as_of="2026-03-01")
    place.stage(tmp_path / "b", as_of="2026-04-01")
    place.stage(tmp_path / "a", as_of="2026-05-01")
    dataset, manifest = load_manifest(
        first["manifest_uri"], first["version"], storage=place.storage, credentials=place.credentials
    )
    assert manifest.as_of == "2026-03-01T00:00:00+00:00"
    assert dataset.as_of(manifest) == "2026-05-01T00:00:00+00:00"


def test_the_import_is_light() -> None:
    """DAG files import these modules each time they are parsed."""
    program = (
        "import sys, mxdist.data.stage, mxdist.data.fetch, mxdist.data.prune, mxdist.data.split, mxdist.data.sources;"
        "print([name for name in ('numpy', 'boto3', 'mlflow', 'mlxtend', 'airflow', 'mxnet') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, env={"PYTHONPATH": str(PLUGINS)}, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
