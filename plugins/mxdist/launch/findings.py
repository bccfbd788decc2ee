"""What a preflight found, as one table and a list of all problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SUBMITTER = "(submitter)"
"""The row of the host that asks."""


CLUSTER = "(cluster)"
"""The row of the cluster as a whole."""


@dataclass(frozen=True)
class Finding:
    """One cell of the table.

    :param told: a word or a number for the cell.
    :param problem: what is wrong, and what to do about it; "" if nothing is.
    """

    host: str
    check: str
    told: str
    problem: str = ""


@dataclass(frozen=True)
class Preflight:
    """All that was found, as a table for people or as plain values.

    :param head: what was looked at.
    """

    head: str
    findings: tuple[Finding, ...]
    matrix: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What is wrong; nothing: the job may start."""
        return tuple(finding for finding in self.findings if finding.problem)

    @property
    def hosts(self) -> int:
        """How many rows there are, beside the submitter's."""
        return len({finding.host for finding in self.findings if finding.host not in (SUBMITTER, CLUSTER)})

    def describe(self) -> str:
        """Return the table, then every problem."""
        lines = [self.head, "", *self._table()]
        if self.matrix:
            lines += ["", *self.matrix]
        count = len(self.problems)
        lines += ["", f"{count} problem{'s' if count != 1 else ''}" if count else "no problems"]
        lines += [f"  {one.host}: {one.check}: {one.problem}" for one in self.problems]
        return "\n".join(lines) + "\n"

    def to_document(self) -> dict[str, Any]:
        """Return plain JSON values."""
        rows: dict[str, dict[str, str]] = {}
        for one in self.findings:
            rows.setdefault(one.host, {})[one.check] = one.told
        problems = [{"host": one.host, "check": one.check, "problem": one.problem} for one in self.problems]
        return {"hosts": rows, "problems": problems}

    def _table(self) -> Iterator[str]:
        checks = list(dict.fromkeys(one.check for one in self.findings))
        hosts = list(dict.fromkeys(one.host for one in self.findings))
        cells = {(one.host, one.check): one.told for one in self.findings}
        rows = [["host", *checks], *([host, *(cells.get((host, check), "-") for check in checks)] for host in hosts)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
