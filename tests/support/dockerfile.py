"""Read Dockerfiles and .dockerignore, as far as those of this checkout go."""

from __future__ import annotations

import fnmatch
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FILES = sorted((REPOSITORY / "docker").glob("*.Dockerfile"))


@dataclass(frozen=True)
class Step:
    """One instruction, its continuation lines joined."""

    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """What stands behind the instruction."""
        return [str(word) for word in json.loads(self.text)] if self.text.startswith("[") else self.text.split()


@dataclass
class Stage:
    """What one FROM begins."""

    base: str
    alias: str
    steps: list[Step] = field(default_factory=list)

    def named(self, name: str) -> list[Step]:
        """Return the steps of one kind."""
        return [step for step in self.steps if step.name == name]

    def runs(self) -> list[str]:
        """Return every command that RUN would give to the shell."""
        return [step.text for step in self.named("RUN")]


def stages(path: Path) -> list[Stage]:
    """Return the stages of a Dockerfile."""
    found: list[Stage] = []
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            found.append(Stage(base, alias))
        else:
            found[-1].steps.append(Step(name, rest.strip()))
    return found


def copied(stage: Stage) -> list[str]:
    """Return the paths that a stage copies from the checkout."""
    steps = [step.words for step in stage.named("COPY")]
    return [word for words in steps if not words[0].startswith("--from") for word in words[:-1]]


def ignored(path: str) -> bool:
    """Return whether .dockerignore keeps a path of the checkout from the builder: the last pattern that fits wins."""
    verdict = False
    for line in (REPOSITORY / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and _fits(path, line.removeprefix("!")):
            verdict = not line.startswith("!")
    return verdict


def _fits(path: str, pattern: str) -> bool:
    parts = path.split("/")
    folders = ["/".join(parts[: end + 1]) for end in range(len(parts))]  # what fits a folder fits all in it
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern[3:]) for part in parts)
    same_depth = [folder for folder in folders if folder.count("/") == pattern.count("/")]
    return any(fnmatch.fnmatchcase(folder, pattern) for folder in same_depth)
