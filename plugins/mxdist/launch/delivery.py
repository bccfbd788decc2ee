"""How the code of a job gets to other hosts: as one object of the run store, named by its digest."""

from __future__ import annotations

import io
import zipfile

from mxdist.launch.bundle import Bundle
from mxdist.store import Store

_FIRST_DAY = (1980, 1, 1, 0, 0, 0)  # of zip files: equal bundles are equal bytes, whenever they are made


def publish(bundle: Bundle, runs: Store) -> dict[str, str]:
    """Put the bundle into the run store of all jobs, unless it is there; return what the hosts are told of it.

    :return: the document's ``code``: see ``mxdist.runtime.bootstrap``.
    """
    digest = bundle.digest
    key = f"_code/{digest}.zip"
    if not runs.exists(key):
        runs.create(key, as_zip(bundle))
    return {"how": "bundle", "uri": f"{runs.uri}/{key}", "digest": digest}


def as_zip(bundle: Bundle) -> bytes:
    """Return the files of a bundle as a zip file that depends on nothing but them."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as file:
        for path, data in sorted(bundle.files.items()):
            entry = zipfile.ZipInfo(path, _FIRST_DAY)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            file.writestr(entry, data)
    return target.getvalue()
