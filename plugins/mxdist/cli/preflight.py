"""``mxdist preflight``: is the place ready where a job shall run?"""

from __future__ import annotations

import argparse
import json

from mxdist.cli import setting
from mxdist.errors import PreflightError


def preflight(options: argparse.Namespace) -> int:
    """Look at every host of a job at once, and tell all problems in one table."""
    from mxdist.launch.check import check

    job = setting.job(options)
    client = setting.client(options, job)
    found = check(job, client.runs, setting.platforms(options), secrets=setting.secrets(), deep=options.deep)
    print(
        json.dumps(found.to_document(), indent=2) if options.json else found.describe(),
        end="\n" if options.json else "",
    )
    return PreflightError.exit_code if found.problems else 0


def takes(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``preflight``, beside those that name a job."""
    parser.add_argument("--deep", action="store_true", help="import MXNet on every host, and use every device")
    parser.add_argument("--json", action="store_true", help="as JSON")
