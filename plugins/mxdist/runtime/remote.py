"""A host where an agent works for the supervisor. What the agent tells is written where ranks here would write it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mxdist.errors import HostLost, LaunchError
from mxdist.runtime import nics
from mxdist.runtime.channel import Channel
from mxdist.runtime.crew import Order, Started
from mxdist.runtime.hosts import HostLink
from mxdist.runtime.place import Place, replace_file
from mxdist.runtime.wire import Silence, hear, order, pack, unpack

log = logging.getLogger("mxdist.supervisor")

ANSWER_S = 60.0
"""For an agent that is alive: starting processes, or writing to its disk, may take a while."""

_PING_S = 2.0
_LAST_WORDS_S = 1.0
_CHATTER_LINES = 5
_NAME = re.compile(r"^[a-z0-9][A-Za-z0-9._-]*$")


class AgentLink(HostLink):
    """One host with an agent.

    :param channel: to the agent, which has just been started.
    :param place: the attempt on the supervisor's own host.
    :param wake: called when there is news.
    :param link_timeout_s: how long nothing may come from the agent.
    """

    def __init__(
        self, name: str, channel: Channel, place: Place, wake: Callable[[], None], *, link_timeout_s: float
    ) -> None:
        self.name = name
        self._channel, self._place, self._wake, self._timeout_s = channel, place, wake, link_timeout_s
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Mapping[str, Any]]] = {}
        self._hello: Future[Mapping[str, Any]] = Future()
        self._ended: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._stopped: set[str] = set()
        self._pieces: dict[int, Path] = {}
        self._spoilt: dict[int, str] = {}
        self._chatter: list[str] = []
        self._heard = self._warned = False
        self._closing = threading.Event()
        self._lock = threading.Lock()
        for target in (self._listen, self._watch):
            threading.Thread(target=target, name=f"{target.__name__} {name}", daemon=True).start()

    def greet(self, timeout_s: float) -> Mapping[str, Any]:
        """Wait for the agent's first word; return what it says of its host.

        :raises HostLost: it said nothing, or ended.
        """
        try:
            return self._hello.result(timeout_s)
        except FutureTimeout:
            self._lose(f"its agent did not answer within {timeout_s:g} s")
        except HostLost:
            pass
        raise HostLost(self.name, self.lost)

    @property
    def pid(self) -> int | None:
        """The process on this host that carries the channel, while it lives."""
        return self._channel.pid if self._channel.returncode is None else None

    @property
    def code(self) -> Path:
        return Path(str(self._hello.result(0)["folder"])) / "code"

    def open_world(
        self, number: int, job: Mapping[str, Any], names: Sequence[str], *, journal: bytes | None = None
    ) -> None:
        self._place.world(number).mkdir(mode=0o700, exist_ok=True)
        self._stopped = set()
        seed = None if journal is None else pack(journal)
        self._ask("world", number=number, job=job, names=list(names), journal=seed)
        self._ended = queue.SimpleQueue()  # what is still in it ended with the last world

    def start(self, orders: Sequence[Order]) -> dict[str, Started]:
        answer = self._ask("start", orders=[asdict(one) for one in orders])
        return {name: Started(*found) for name, found in answer["started"].items()}

    def reap(self) -> dict[str, int]:
        found = {}
        while not self._ended.empty():
            name, code = self._ended.get()
            found[name] = code
        return found

    def stopped(self) -> set[str]:
        return self._stopped

    def write(self, name: str, data: bytes) -> None:
        self._ask("write", name=name, data=pack(data))

    def signal(self, number: int, *, spare: Collection[str]) -> None:
        self._ask("signal", number=int(number), spare=list(spare))

    def abort(self, names: Sequence[str]) -> None:
        self._ask("abort", names=list(names))

    def end(self, *, grace_s: float) -> None:
        self._ask("end", timeout_s=grace_s + ANSWER_S, grace_s=grace_s)

    def collect(self, name: str) -> None:
        root = self._place.folder / name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        number = next(self._ids)
        self._pieces[number] = root
        try:
            self._ask("fetch", ident=number, timeout_s=float("inf"), name=name)
        finally:
            del self._pieces[number]
            spoilt = self._spoilt.pop(number, None)
        if spoilt is not None:
            raise LaunchError(f"{name} of {self.name} cannot be kept here: {spoilt}", hint="Check free space.")

    def keep_port(self, address: str) -> int:
        return int(self._ask("port", address=address)["port"])

    def addresses(self) -> list[nics.Address]:
        return [nics.Address(*one) for one in self._hello.result(0)["addresses"]]

    def listen(self, at: Sequence[str]) -> tuple[dict[str, int], str]:
        answer = self._ask("listen", addresses=list(at))
        return answer["ports"], answer["word"]

    def reach(self, targets: Sequence[tuple[str, int, str]]) -> list[bool]:
        return [bool(one) for one in self._ask("reach", targets=[list(one) for one in targets])["reached"]]

    def deaf(self) -> None:
        self._ask("deaf")

    def close(self, *, clean: bool) -> None:
        if not self.lost:
            with contextlib.suppress(LaunchError):
                self._ask("bye", clean=clean)
        self._closing.set()
        self._channel.close()

    def _ask(
        self, what: str, *, ident: int | None = None, timeout_s: float = ANSWER_S, **fields: Any
    ) -> Mapping[str, Any]:
        """Tell the agent to do something, and wait until it has."""
        number = next(self._ids) if ident is None else ident
        future: Future[Mapping[str, Any]] = Future()
        with self._lock:
            if self.lost:
                raise HostLost(self.name, self.lost)
            self._waiting[number] = future
        try:
            self._send(order(what, id=number, **fields))
            answer = future.result(None if timeout_s == float("inf") else timeout_s)
        except FutureTimeout:
            self._lose(f"its agent did not {what} within {timeout_s:g} s")
            raise HostLost(self.name, self.lost) from None
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise LaunchError(f"{self.name}: {answer['error']}", retryable=bool(answer.get("retryable", True)))
        return answer

    def _send(self, line: bytes) -> None:
        try:
            self._channel.send(line)
        except OSError as error:
            give_up = time.monotonic() + 2 * _LAST_WORDS_S
            while not self.lost and time.monotonic() < give_up:  # its last words, if there are any, say more
                time.sleep(0.02)
            self._lose(f"the way to it is closed ({error.strerror or error})")
            raise HostLost(self.name, self.lost) from None

    def _watch(self) -> None:
        """Ping the agent, whose guard wants to hear from us; and take it for lost when nothing comes from it."""
        silence = Silence()
        while not self._closing.wait(min(_PING_S, self._timeout_s / 8)):
            if self.lost:
                return
            heard, self._heard = self._heard, False
            silent_s = silence.lasts(heard=heard or not self._hello.done())
            if silent_s > self._timeout_s:
                self._lose(f"it said nothing for {self._timeout_s:g} s")
                return
            if self._hello.done():
                threading.Thread(target=self._ping, daemon=True).start()  # sending may wait for ever

    def _ping(self) -> None:
        with contextlib.suppress(HostLost):
            self._send(order("ping"))

    def _listen(self) -> None:
        for line in self._channel.lines():
            self._heard = True
            said = hear(line)
            if said is None:
                self._chatter = [*self._chatter, line.decode(errors="replace")][-_CHATTER_LINES:]
                continue
            try:
                self._hear(*said)
            except OSError as error:  # our own disk is full: what cannot be written here is lost here
                if not self._warned:
                    log.warning("what %s tells cannot be written: %s", self.name, error)
                self._warned = True
        self._lose(self._last_words())

    def _last_words(self) -> str:
        give_up = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < give_up and (self._channel.returncode is None or not self._channel.complaint()):
            time.sleep(0.02)
        code, said = self._channel.returncode, self._channel.complaint() or "\n".join(self._chatter)
        told = f"its agent ended with code {code}" if code is not None else "the way to it was closed"
        return f"{told}: {said[-500:]}" if said else told

    def _hear(self, kind: str, said: Mapping[str, Any]) -> None:
        if kind == "append":
            with self._file(said).open("ab") as file:
                file.write(unpack(said["data"]))
        elif kind == "file":
            replace_file(self._file(said), unpack(said["data"]))
        elif kind == "exit":
            self._ended.put((said["name"], int(said["code"])))
            self._wake()
        elif kind == "stopped":
            self._stopped = set(said["names"])
        elif kind == "piece":
            self._piece(said)
        elif kind == "hello" and not self._hello.done():
            self._hello.set_result(said)
        elif kind == "reply":
            future = self._waiting.get(said["id"])
            if future is not None and not future.done():
                future.set_result(said)
        elif kind == "error" and not self._hello.done():
            self._lose(str(said["message"]))

    def _file(self, said: Mapping[str, Any]) -> Path:
        """Return where a file of the other host stands here; it never leaves the attempt's folder."""
        name, world = str(said["name"]), int(said["world"])
        if not _NAME.match(name):
            raise OSError(f"{name!r} is no name of a file")
        return (self._place.world(world) if world else self._place.folder) / name

    def _piece(self, said: Mapping[str, Any]) -> None:
        root = self._pieces.get(said["id"])
        if root is None:
            return
        path = root / said["path"]
        try:
            if not path.resolve().is_relative_to(root.resolve()):
                raise OSError(f"{said['path']!r} leaves {root}")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb" if said["first"] else "ab") as file:
                file.write(unpack(said["data"]))
        except OSError as error:
            self._spoilt.setdefault(said["id"], str(error))
            raise

    def _lose(self, why: str) -> None:
        """Note that the host cannot be reached; whoever waits for an answer, or for the pipe, is told."""
        with self._lock:
            if self.lost:
                return
            self.lost = why
            waiting = [self._hello, *self._waiting.values()]
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # it was answered just now
                future.set_exception(HostLost(self.name, self.lost))
        threading.Thread(target=self._channel.close, name=f"close {self.name}", daemon=True).start()
        self._wake()
