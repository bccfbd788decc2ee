"""A preflight: every host of a job is asked at once, by a probe that is sent to it, within a bounded time."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mxdist
from mxdist.launch.hosts import HostPlan
from mxdist.launch.patience import bounded
from mxdist.launch.preflight import Report
from mxdist.launch.summon import command
from mxdist.runtime.channel import Channel, Opener
from mxdist.runtime.probe import DEEP_S, MARK, REACH_S
from mxdist.store import Store

FIRST_S = 9.5
"""From the first packet to the report of a host."""

SECOND_S = REACH_S + 2.0
"""For the hosts to find out whom they reach."""

_LAST_WORDS_S = 0.5
_CLOSE_S = 1.5  # for the probes to end; what hangs is left to itself
_SENT = ("nics", "canaries", "probe")
_LOADER = """
import sys, types
for name in ("mxdist", "mxdist.runtime"):
    sys.modules[name] = types.ModuleType(name)
for name, text in MODULES:
    module = types.ModuleType("mxdist.runtime." + name)
    sys.modules[module.__name__] = module
    exec(compile(text, name + ".py", "exec"), module.__dict__)
module.main_and_exit()
"""


def program() -> str:
    """Return the probe as one Python text that needs nothing of mxdist where it runs."""
    folder = Path(mxdist.__file__).parent / "runtime"
    modules = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in _SENT]
    return f"MODULES = {modules!r}\n{_LOADER}"


def look(
    hosts: Sequence[HostPlan],
    opener: Opener,
    python: str,
    request: Mapping[str, Any],
    *,
    first: Mapping[str, Any] | None = None,
) -> dict[str, Report]:
    """Return what is to be said of every host, whatever hangs.

    :param python: of the node environment.
    :param request: what all are asked.
    :param first: what the first host is asked in addition.
    """
    more = [first or {}, *({} for _ in hosts[1:])]
    talks = [
        _Talk(host, opener, python, {**request, **own, "host": host.name})
        for host, own in zip(hosts, more, strict=True)
    ]
    limit_s = DEEP_S + FIRST_S if request.get("deep") else FIRST_S
    _wait([talk.reported for talk in talks], limit_s)
    peers = [peer for talk in talks if (peer := talk.peer()) is not None]
    for talk in talks:
        talk.go_on(peers)
    _wait([talk.ended for talk in talks if talk.reported.is_set()], SECOND_S)
    reports = {talk.host.name: talk.report(limit_s) for talk in talks}
    closing = [threading.Thread(target=talk.close, daemon=True) for talk in talks]
    for thread in closing:
        thread.start()
    give_up = time.monotonic() + _CLOSE_S
    for thread in closing:
        thread.join(max(0.0, give_up - time.monotonic()))
    return reports


def _wait(events: Sequence[threading.Event], limit_s: float) -> None:
    give_up = time.monotonic() + limit_s
    for event in events:
        event.wait(max(0.0, give_up - time.monotonic()))


class _Talk:
    """The conversation with the probe on one host, in a thread that may hang without harm."""

    def __init__(self, host: HostPlan, opener: Opener, python: str, request: Mapping[str, Any]) -> None:
        self.host = host
        self.reported, self.ended = threading.Event(), threading.Event()
        self._opener, self._python, self._request = opener, python, request
        self._peers: list[dict[str, Any]] = []
        self._go_on = threading.Event()
        self._channel: Channel | None = None
        self._report = Report()
        threading.Thread(target=self._run, name=f"probe-{host.name}", daemon=True).start()

    def peer(self) -> dict[str, Any] | None:
        """Return where the other hosts find this one; None if it has not answered."""
        found = self._report.found
        if not self.reported.is_set() or not found:
            return None
        return {"host": self.host.name, "word": found["word"], "ports": found["ports"]}

    def go_on(self, peers: list[dict[str, Any]]) -> None:
        """Let it ask whom the host reaches."""
        self._peers = peers
        self._go_on.set()

    def report(self, limit_s: float) -> Report:
        """Return what is known by now."""
        if not self.reported.is_set():
            return Report(error=f"no answer in {limit_s:g} s")
        return self._report

    def close(self) -> None:
        """End what runs for it."""
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        try:
            self._talk()
        except Exception as error:  # whatever it is, it is what is known of this host
            if not self.reported.is_set():
                self._report = Report(error=str(error) or type(error).__name__)
        finally:
            self.reported.set()
            self.ended.set()

    def _talk(self) -> None:
        self._channel = self._opener.open(self.host, command(self._python))
        self._converse(self._channel, self._channel.lines())

    def _converse(self, channel: Channel, lines: Iterator[bytes]) -> None:
        text = program().encode()
        with suppress(OSError):  # what has ended has left its last words
            channel.send(f"{len(text)}\n".encode() + text + f"{json.dumps(self._request)}\n".encode())
        self._report = Report(found=self._next(lines))
        self.reported.set()
        self._go_on.wait(DEEP_S + FIRST_S)
        sent = time.time()
        channel.send(f"{json.dumps({'peers': self._peers})}\n".encode())
        clock = float(self._next(lines)["clock"])
        heard = time.time()
        self._report = replace(self._report, skew_s=clock - (sent + heard) / 2, doubt_s=(heard - sent) / 2)
        reached = self._next(lines)["reached"]
        self._report = replace(self._report, reached=reached)

    def _next(self, lines: Iterator[bytes]) -> dict[str, Any]:
        """Return what the probe says next.

        :raises ValueError: it says nothing any more; the message holds its last words.
        """
        said = b""
        for line in lines:
            if line.startswith(MARK.encode()):
                found: dict[str, Any] = json.loads(line[len(MARK) :])
                return found
            said = line
        words, code = self._last_words(said)
        if code == 127 or "No such file" in words or "not found" in words:
            raise ValueError(f"there is no Python at {self._python} ({words}); set cluster.python")
        how = "the probe ended" if code is None else f"the probe ended with exit code {code}"
        raise ValueError(f"{how}: {words or 'silently'}")

    def _last_words(self, said: bytes) -> tuple[str, int | None]:
        """Return the last line of what it wrote, and its exit code: each comes by another way than its end."""
        assert self._channel is not None  # noqa: S101  # for the type checker
        give_up = time.monotonic() + _LAST_WORDS_S
        while not (words := self._channel.complaint()) or self._channel.returncode is None:
            if time.monotonic() > give_up:
                break
            time.sleep(0.02)
        return (words or said.decode(errors="replace")).strip().rpartition("\n")[2], self._channel.returncode


@dataclass(frozen=True)
class Canary:
    """What the submitter wrote into the run store, for the hosts to find it there.

    :param nonce: names this preflight there.
    :param token: what it wrote; None: it could not.
    """

    nonce: str
    token: str | None = None
    error: str = ""
    took_s: float = 0.0


@contextmanager
def canary(runs: Store) -> Iterator[Canary]:
    """Write a canary into the run store, and remove it in the end."""
    nonce, token, begin = uuid.uuid4().hex, uuid.uuid4().hex, time.monotonic()
    key = f"_preflight/{nonce}"

    def write() -> Canary:
        runs.write(key, token.encode())
        if runs.read(key) != token.encode():
            return Canary(nonce, error=f"{runs.uri} gave back other bytes than were written")
        return Canary(nonce, token, took_s=time.monotonic() - begin)

    written = bounded(write, lambda error: Canary(nonce, error=error))
    try:
        yield written
    finally:
        if written.token:
            bounded(lambda: runs.delete([key]), lambda _: None)
