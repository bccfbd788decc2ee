"""``mxdist stage``: a dataset for a job file, without Airflow."""

from __future__ import annotations

import argparse
import json
import sys

from mxdist.cli.setting import absolute, default_data
from mxdist.data.stage import Staged
from mxdist.data.stage import stage as put
from mxdist.spec import Split, Storage


def stage(options: argparse.Namespace) -> int:
    """Stage a dataset as one immutable version; print what a job file says to use it."""
    staged = put(
        options.source,
        absolute(options.data or default_data()),
        options.name,
        split=options.split and Split.parse({**options.split, "seed": options.split_seed}),
        as_of=options.as_of,
        verify=options.verify,
        storage=Storage(endpoint_url=options.endpoint_url),
    )
    print(f"mxdist: {options.name}: {_counted(staged)}", file=sys.stderr)
    print(json.dumps(staged, indent=2) if options.json else _as_yaml(staged, options.endpoint_url), end="")
    return 0


def takes(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``stage``."""
    source = "a folder, mnist5k, cifar10:FOLDER or cifar10:s3://..., package.module:function or file.py:function"
    parser.add_argument("source", metavar="SOURCE", help=source)
    parser.add_argument("--name", required=True, help="the dataset's name in the store")
    parser.add_argument("--split", type=_shares, metavar="TRAIN,VALIDATION,TEST", help="divide, as in 0.7,0.15,0.15")
    parser.add_argument("--split-seed", type=int, default=0, metavar="N", help="another division; default: 0")
    parser.add_argument("--as-of", metavar="DATE", help="until when the data goes, ISO 8601; default: now")
    parser.add_argument(
        "--data", metavar="URI", help="where datasets are; default: $MXDIST_DATA_URI, else a private folder"
    )
    parser.add_argument("--endpoint-url", metavar="URL", help="S3 server other than AWS")
    parser.add_argument("--verify", action="store_true", help="read what is stored already, and mend what is damaged")
    parser.add_argument("--json", action="store_true", help="all that is known, as JSON")


def _shares(text: str) -> dict[str, float]:
    try:
        train, validation, test = (float(share) for share in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers, as in 0.7,0.15,0.15") from None
    return {"train": train, "validation": validation, "test": test}


def _counted(staged: Staged) -> str:
    rows = "" if staged["rows"] is None else f"{staged['rows']:,} rows in "
    sent = f"sent {staged['uploaded_files']} of them, {staged['uploaded_bytes'] / 1e6:.1f} MB"
    return f"{rows}{staged['files']} files, {staged['bytes'] / 1e6:.1f} MB; {sent}"


def _as_yaml(staged: Staged, endpoint_url: str | None) -> str:
    """Return the part of a job file that names this dataset."""
    import yaml

    part: dict[str, dict[str, str]] = {
        "dataset": {"manifest_uri": staged["manifest_uri"], "version": staged["version"]}
    }
    if endpoint_url:
        part["storage"] = {"endpoint_url": endpoint_url}
    return yaml.safe_dump(part, sort_keys=False, width=1000)
