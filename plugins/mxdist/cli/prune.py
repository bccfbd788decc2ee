"""``mxdist prune``: what jobs have left on this host."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from mxdist.launch.local import default_workdir
from mxdist.launch.scratch import Left, prune_datasets, prune_scratch

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def prune(options: argparse.Namespace) -> int:
    """Delete what jobs that are over have left on this host."""
    total = 0
    for left in _all(options):
        if left.kept:
            print(f"mxdist: {left.path} stays: {left.kept}", file=sys.stderr)
            continue
        total += left.size_bytes
        print(f"{left.path}: {left.size_bytes / 1e6:.1f} MB")
    print(f"{'would free' if options.dry_run else 'freed'} {total / 1e6:.1f} MB")
    return 0


def takes(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``prune``."""
    parser.add_argument("--scratch", action="store_true", help="scratch folders of attempts that have a result")
    parser.add_argument("--datasets", action="store_true", help="copies of datasets, while no job is under way")
    parser.add_argument("--older-than", type=_age_s, default="7d", metavar="AGE", help="such as 12h; default: 7d")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--workdir", metavar="FOLDER", help="scratch folder; default: $MXDIST_WORKDIR")


def _all(options: argparse.Namespace) -> Iterator[Left]:
    workdir = Path(options.workdir or default_workdir()).absolute()
    every = not (options.scratch or options.datasets)
    if options.datasets or every:
        yield from prune_datasets(workdir, older_than_s=options.older_than, dry_run=options.dry_run)
    if options.scratch or every:
        yield from prune_scratch(workdir, older_than_s=options.older_than, dry_run=options.dry_run)


def _age_s(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number and one of s, m, h, d: 12h, 7d")
    return float(found[1]) * _UNITS_S[found[2]]
