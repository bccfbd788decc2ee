"""The table of all trials that were ever made, from a file that grows by a line for each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matrix.cells import EVERY, SENSIBLE, Moment, Victim


def read(path: Path) -> list[dict[str, Any]]:
    """Return the verdicts in a file, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(verdicts: Iterable[dict[str, Any]]) -> str:
    """Return trials by victim and moment, violations after a slash, and what was violated."""
    verdicts = list(verdicts)
    tried = Counter((one["victim"], one["moment"]) for one in verdicts)
    bad = [one for one in verdicts if one["violations"]]
    wrong = Counter((one["victim"], one["moment"]) for one in bad)
    lines = [" " * 18 + " ".join(f"{moment.value:>14.14}" for moment in Moment)]
    for victim in Victim:
        cells = []
        for moment in Moment:
            key = (victim.value, moment.value)
            sensible = any((cell.victim, cell.moment) == (victim, moment) for cell in SENSIBLE)
            cells.append(f"{tried[key]}/{wrong[key]}" if sensible else "-")
        lines.append(f"{victim.value:<18}" + " ".join(f"{cell:>14}" for cell in cells))
    lines.append(f"{len(verdicts)} trials of {len(SENSIBLE)} cells ({len(EVERY) - len(SENSIBLE)} make no sense, see")
    lines.append(f"tests/matrix/cells.py), {len(bad)} with violations; {_ends(verdicts)}")
    for one in bad:
        cell = f"{one['victim']}, {one['moment']}, {one['fault']}"
        lines.append(f"  seed {one['seed']} ({cell}): {'; '.join(one['violations'])[:400]}")
    return "\n".join(lines)


def _ends(verdicts: Iterable[dict[str, Any]]) -> str:
    """Return how the tasks ended, and what it took."""
    verdicts = list(verdicts)
    ends = ", ".join(f"{count} {state}" for state, count in sorted(Counter(v["state"] for v in verdicts).items()))
    restarts = sum(one["restarts"] for one in verdicts)
    lost = max((steps for one in verdicts for steps in one["lost"]), default=0)
    return f"tasks: {ends or 'none'}; {restarts} restarts, at most {lost} steps trained again at one"
