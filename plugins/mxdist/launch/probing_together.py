"""The probes of many hosts behind one channel: ``srun`` starts them all, and gives all of them the same to read."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mxdist.errors import LaunchError
from mxdist.launch.preflight import Report
from mxdist.launch.probing import FIRST_S, SECOND_S, program
from mxdist.runtime.channel import Channel
from mxdist.runtime.probe import DEEP_S, MARK

Said = tuple[float, dict[str, Any]]
"""When something was heard, and what."""


def look_together(channel: Channel, count: int, request: Mapping[str, Any]) -> dict[str, Report]:
    """Return what the hosts say that answer in time, by the names that they give themselves.

    :param count: how many hosts there should be.
    :param request: what all are asked.
    :raises LaunchError: none has answered.
    """
    heard: queue.SimpleQueue[Said | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, heard), daemon=True).start()
    text = program().encode()
    _send(channel, f"{len(text)}\n".encode() + text + f"{json.dumps(request)}\n".encode())
    limit_s = DEEP_S + FIRST_S if request.get("deep") else FIRST_S
    reports: dict[str, Report] = {}
    for _, said in _hear(heard, limit_s, lambda: len(reports) == count):
        if "word" in said:
            reports[said["host"]] = Report(found=said)
    if not reports:
        words = channel.complaint().strip().rpartition("\n")[2]
        raise LaunchError(f"no host has answered in {limit_s:g} s{f': {words}' if words else ''}")
    peers = [{"host": host, "word": one.found["word"], "ports": one.found["ports"]} for host, one in reports.items()]
    sent = time.time()
    _send(channel, f"{json.dumps({'peers': peers, 'names': sorted(reports)})}\n".encode())
    for at, said in _hear(heard, SECOND_S, lambda: all(one.reached is not None for one in reports.values())):
        host = said["host"]
        if "clock" in said:
            middle = (sent + at) / 2
            reports[host] = replace(reports[host], skew_s=said["clock"] - middle, doubt_s=(at - sent) / 2)
        elif "reached" in said:
            reports[host] = replace(reports[host], reached=said["reached"], unresolved=tuple(said["unresolved"]))
    return reports


def _send(channel: Channel, data: bytes) -> None:
    try:
        channel.send(data)
    except OSError as error:
        channel.close()
        words = channel.complaint().strip().rpartition("\n")[2]
        raise LaunchError(f"the hosts cannot be asked: {words or error}") from error


def _listen(channel: Channel, heard: queue.SimpleQueue[Said | None]) -> None:
    for line in channel.lines():
        if line.startswith(MARK.encode()):
            heard.put((time.time(), json.loads(line[len(MARK) :])))
    heard.put(None)


def _hear(heard: queue.SimpleQueue[Said | None], limit_s: float, enough: Callable[[], bool]) -> Any:
    """Yield what is heard until it is enough, nothing more can come, or the time is up."""
    give_up = time.monotonic() + limit_s
    while not enough():
        try:
            said = heard.get(timeout=max(0.01, give_up - time.monotonic()))
        except queue.Empty:
            return
        if said is None:
            return
        yield said
