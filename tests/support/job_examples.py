"""The example jobs, and the commands that their first lines tell to type."""

from __future__ import annotations

import re
from pathlib import Path

from support.places import REPOSITORY

FOLDER = REPOSITORY / "examples"
JOBS = sorted(FOLDER.glob("*.yaml"))
_COMMAND = re.compile(r"^#   mxdist (\S+(?: \S+)*)", re.M)  # what comes after two spaces is a remark


def commands(job: Path, name: str = "") -> list[list[str]]:
    """Return the arguments of each ``mxdist`` that the file tells to type.

    :param name: only those of this command, such as ``run``.
    """
    found = [text.split(" ") for text in _COMMAND.findall(job.read_text())]
    return [command for command in found if name in ("", command[0])]
