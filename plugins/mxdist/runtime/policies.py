"""What a job's own failure policies make of a failure.

Patterns are a user's regular expressions, and some take for ever on some logs. So they are searched in a process of its
own with a bound: the supervisor has ranks to end, beats to send and signals to hear.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from mxdist.runtime.blame import Exit, Failure
from mxdist.runtime.logs import clean
from mxdist.spec import FailurePolicy, Then

log = logging.getLogger("mxdist.supervisor")

_SEARCH_S = 5.0
_SEARCH = """
import json, re, sys
patterns, text = json.load(sys.stdin)
for number, pattern in enumerate(patterns):
    if re.search(pattern, text, re.MULTILINE):
        print(number, flush=True)
"""


def follow(policies: Sequence[FailurePolicy], first: Exit, failure: Failure) -> Failure:
    """Return a failure with what the first of the job's policies that fits wants to follow it.

    Policies are about a rank that failed on its own: not one that only lost a peer, not one that is blamed for the exit
    of another, and no server.
    """
    if first.rank is None or first.rank != failure.cause.rank or first.consequence:
        return failure
    found = _first(policies, first)
    if found is None:
        return failure
    message = f"{failure.cause.message} [the job's policy for {found}]"
    cause = replace(failure.cause, message=message, retryable=found.then is not Then.FAIL)
    restart = found.then in {Then.RESTART, Then.AVOID_HOST}
    return Failure(cause, restart, avoid=found.then is Then.AVOID_HOST, by_policy=True)


def _first(policies: Sequence[FailurePolicy], first: Exit) -> FailurePolicy | None:
    possible = [policy for policy in policies if policy.exit_code in {None, first.code}]
    patterns = [policy.pattern for policy in possible if policy.pattern is not None]
    text = "\n".join(clean(line) for line in first.log.split(b"\n"))
    found = _search(patterns, text) if patterns else set[str]()
    return next((policy for policy in possible if policy.pattern is None or policy.pattern in found), None)


def _search(patterns: Sequence[str], text: str) -> set[str]:
    """Return the patterns that are found in time; those behind one that takes too long are not looked for."""
    command = [sys.executable, "-I", "-S", "-c", _SEARCH]
    told = json.dumps([patterns, text])
    try:
        said = subprocess.run(
            command, input=told, capture_output=True, text=True, timeout=_SEARCH_S, check=False
        ).stdout
    except subprocess.TimeoutExpired as slow:
        said = (slow.stdout or b"").decode() if isinstance(slow.stdout, bytes) else (slow.stdout or "")
        log.warning("a failure's pattern was searched for %.0f s in vain: those from it on do not count", _SEARCH_S)
    except OSError as error:
        log.warning("no failure's pattern can be searched: %s", error)
        return set()
    return {patterns[int(number)] for number in said.split()}
