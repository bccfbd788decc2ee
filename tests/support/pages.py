"""The pages that people read, and the examples in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md"))])
_BLOCK = re.compile(r"^(?:<!-- example: (?P<name>[\w-]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Example:
    """One block of code on a page.

    :param name: by which a test asks for it, or ''.
    """

    page: str
    line: int
    language: str
    name: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, as a test's id."""
        return f"{self.page}:{self.line}"


def examples(language: str) -> list[Example]:
    """Return every block in this language, over all pages."""
    return [example for page in PAGES for example in _of(page) if example.language == language]


def example(name: str) -> str:
    """Return the text of the one example with this name."""
    (found,) = [one for page in PAGES for one in _of(page) if one.name == name]
    return found.text


def _of(page: Path) -> Iterator[Example]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        name = page.relative_to(REPOSITORY).as_posix()
        yield Example(name, line, found["language"], found["name"] or "", found["text"])
