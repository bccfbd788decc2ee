"""The ranks of one host, for a supervisor on another: ``python -m mxdist.runtime.agent --document FD``.

It starts, watches and ends processes as the supervisor does on its own host (``crew``), when it is told to, and tells
what they write. It is also the guard of its host: when the supervisor is gone, when the way to it is cut, or when
nothing comes from it any more, every process of the job here is ended, and then the agent ends.

Neither MXNet nor anything else that is slow to import is needed here.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import select
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mxdist import processes
from mxdist.environment import base_environment
from mxdist.errors import MxdistError
from mxdist.private import dump_no_core
from mxdist.runtime import nics
from mxdist.runtime.crew import Crew, Order
from mxdist.runtime.mirror import PIECE_BYTES, Mirror
from mxdist.runtime.place import JOURNAL, Place, replace_file
from mxdist.runtime.wake import Wake
from mxdist.runtime.wire import Silence, pack, say, unpack

log = logging.getLogger("mxdist.agent")

_TICK_S = 0.25
_IDLE_TICK_S = 1.0
_WAITING_BYTES = 4 << 20
"""What may wait to be written before the files are looked at again."""


class Mouth:
    """Writes lines in a thread of its own: a supervisor that does not read must not stop the guard."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.waiting_bytes = 0
        self.broken = False
        self._lock = threading.Lock()
        threading.Thread(target=self._write, name="mouth", daemon=True).start()

    def say(self, line: bytes) -> None:
        """Hand over a line; it is written in its turn."""
        with self._lock:
            self.waiting_bytes += len(line)
        self._lines.put(line)

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was handed over is written."""
        give_up = time.monotonic() + timeout_s
        while self.waiting_bytes and not self.broken and time.monotonic() < give_up:
            time.sleep(0.02)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            view = memoryview(line)
            try:
                while view:
                    view = view[os.write(self._file, view) :]
            except OSError:
                self.broken = True
                return
            with self._lock:
                self.waiting_bytes -= len(line)


class Ear:
    """Reads lines without ever waiting. The file stays a blocking one: sshd gives us one socket for both directions."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.closed = False
        self._rest = b""

    def hear(self) -> list[Mapping[str, Any]]:
        """Return what has come since."""
        while not self.closed and select.select([self.file], [], [], 0)[0]:
            try:
                data = os.read(self.file, 1 << 16)
            except OSError:
                data = b""
            self._rest += data
            self.closed = not data
        *lines, self._rest = self._rest.split(b"\n")
        return [json.loads(line) for line in lines if line]


class Agent:
    """One host's part of an attempt.

    :param link_timeout_s: how long nothing may come from the supervisor.
    """

    def __init__(self, place: Place, wake: Wake, *, link_timeout_s: float) -> None:
        self._place, self._wake, self._timeout_s = place, wake, link_timeout_s
        self._crew = Crew(place)
        self._ear, self._mouth = Ear(0), Mouth(1)
        self._mirror: Mirror | None = None
        self._listener: nics.Listener | None = None
        self._ending: tuple[threading.Thread, int, list[str]] | None = None
        self._stopped: set[str] = set()
        self._leaving = ""
        self._does: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any] | None]] = {
            "world": self._world, "start": self._start, "write": self._write, "signal": self._signal,
            "abort": self._abort, "end": self._end, "fetch": self._fetch, "port": self._port, "listen": self._listen,
            "reach": self._reach, "deaf": self._deaf, "bye": self._bye, "ping": self._ping,
        }  # fmt: skip

    def run(self) -> str:
        """Work until the supervisor is gone or says so; return why. No process of the job is left here then."""
        processes.terminate(self._place.token, grace_s=0, exclude=(os.getpid(),), exact=True)
        try:
            self._work()
        finally:
            self._crew.end(grace_s=0)
            self._crew.reap()
        self._mouth.drain(self._timeout_s if self._leaving == "bye" else 0)
        return self._leaving

    def _work(self) -> None:
        self._mouth.say(say("hello", **self._hello()))
        silence = Silence()
        while not self._leaving:
            self._wake.wait(_TICK_S if self._mirror else _IDLE_TICK_S, also=self._ear.file)
            orders = self._ear.hear()
            silent_s = silence.lasts(heard=bool(orders))
            for order in orders:
                self._obey(order)
            self._look()
            if self._wake.terminated and not self._crew.busy:  # its ranks were told as well, and had their time
                self._leaving = self._leaving or "this host was told to end (SIGTERM)"
            elif self._ear.closed or self._mouth.broken:
                self._leaving = self._leaving or "the way to the supervisor is closed"
            elif silent_s > self._timeout_s:
                self._leaving = f"nothing came from the supervisor for {self._timeout_s:g} s"

    def _hello(self) -> dict[str, Any]:
        return {
            "host_identity": processes.host_identity(),
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "start_time": processes.start_time(os.getpid()),
            "addresses": [[one.device, one.address, one.prefix] for one in nics.addresses()],
            "cores": len(os.sched_getaffinity(0)),
            "folder": str(self._place.folder),
            "python": ".".join(map(str, sys.version_info[:3])),
        }

    def _obey(self, told: Mapping[str, Any]) -> None:
        number = told.get("id")
        try:
            answer = self._does[told["do"]](told)
        except (MxdistError, OSError) as error:
            retryable = error.retryable if isinstance(error, MxdistError) else True
            self._mouth.say(say("reply", id=number, error=str(error), retryable=retryable))
            return
        if number is not None and answer is not None:
            self._mouth.say(say("reply", id=number, **answer))

    def _look(self) -> None:
        """Tell who has ended, and what there is to read."""
        ended = self._crew.reap()
        if self._mirror is not None and (ended or self._mouth.waiting_bytes < _WAITING_BYTES):
            for line in self._mirror.changes(final=bool(ended)):
                self._mouth.say(line)
        for name, code in ended.items():
            self._mouth.say(say("exit", name=name, code=code))
        stopped = self._crew.stopped()
        if stopped != self._stopped:
            self._stopped = stopped
            self._mouth.say(say("stopped", names=sorted(stopped)))
        if self._ending is not None and not self._ending[0].is_alive():
            self._ended()

    def _world(self, told: Mapping[str, Any]) -> dict[str, Any]:
        journal_at = 0
        if told.get("journal") is not None:
            seed = unpack(told["journal"])
            self._place.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._place.folder / JOURNAL, seed)
            journal_at = len(seed)
        self._crew.open_world(told["number"], told["job"], told["names"])
        self._mirror = Mirror(self._place, told["number"], journal_at)
        return {}

    def _start(self, told: Mapping[str, Any]) -> dict[str, Any]:
        started = {}
        for document in told["orders"]:
            order = Order.load(document)
            one = self._crew.start(order)
            started[order.name] = [one.pid, one.start_time]
        return {"started": started}

    def _write(self, told: Mapping[str, Any]) -> dict[str, Any]:
        replace_file(self._crew.folder / Path(told["name"]).name, unpack(told["data"]))
        return {}

    def _signal(self, told: Mapping[str, Any]) -> dict[str, Any]:
        self._crew.signal(told["number"], spare=told["spare"])
        return {}

    def _abort(self, told: Mapping[str, Any]) -> dict[str, Any]:
        self._crew.abort(told["names"])
        return {}

    def _end(self, told: Mapping[str, Any]) -> None:
        """End the world, aside: pings must go on meanwhile."""
        problems: list[str] = []

        def end() -> None:
            try:
                self._crew.end(grace_s=told["grace_s"])
            except MxdistError as error:
                problems.append(str(error))
            self._wake.call()

        thread = threading.Thread(target=end, name="end", daemon=True)
        thread.start()
        self._ending = (thread, told["id"], problems)

    def _ended(self) -> None:
        assert self._ending is not None  # noqa: S101  # for the type checker
        _, number, problems = self._ending
        self._ending = None
        late = self._crew.reap()  # all have ended: none of them may be told of in the next world
        for line in self._mirror.changes(final=True) if self._mirror else ():
            self._mouth.say(line)
        for name, code in late.items():
            self._mouth.say(say("exit", name=name, code=code))
        self._mirror = None
        self._mouth.say(say("reply", id=number, **({"error": problems[0], "retryable": True} if problems else {})))

    def _fetch(self, told: Mapping[str, Any]) -> None:
        """Send the files of a folder, aside."""

        def send() -> None:
            root = self._place.folder / Path(told["name"]).name
            try:
                for path in sorted(path for path in root.rglob("*") if path.is_file()):
                    self._send_file(told["id"], path, str(path.relative_to(root)))
                self._mouth.say(say("reply", id=told["id"]))
            except OSError as error:
                self._mouth.say(say("reply", id=told["id"], error=str(error), retryable=True))

        threading.Thread(target=send, name="fetch", daemon=True).start()

    def _send_file(self, number: int, path: Path, name: str) -> None:
        with path.open("rb") as file:
            first = True
            while (data := file.read(PIECE_BYTES)) or first:
                while self._mouth.waiting_bytes > _WAITING_BYTES and not self._mouth.broken:
                    time.sleep(0.01)
                self._mouth.say(say("piece", id=number, path=name, data=pack(data), first=first))
                first = False

    def _port(self, told: Mapping[str, Any]) -> dict[str, Any]:
        return {"port": self._crew.keep_port(told["address"])}

    def _listen(self, told: Mapping[str, Any]) -> dict[str, Any]:
        self._deaf(told)
        self._listener = nics.Listener(told["addresses"])
        return {"ports": self._listener.ports, "word": self._listener.word}

    def _reach(self, told: Mapping[str, Any]) -> None:
        def reach() -> None:
            reached = nics.reach([(address, port, word) for address, port, word in told["targets"]])
            self._mouth.say(say("reply", id=told["id"], reached=reached))

        threading.Thread(target=reach, name="reach", daemon=True).start()

    def _deaf(self, told: Mapping[str, Any]) -> dict[str, Any]:
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        return {}

    def _bye(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The attempt is over: all that its folder held is with the supervisor."""
        self._leaving = "bye"
        self._crew.end(grace_s=0)
        if told.get("clean"):
            shutil.rmtree(self._place.folder, ignore_errors=True)
        return {}

    def _ping(self, told: Mapping[str, Any]) -> dict[str, Any]:
        self._mouth.say(say("pong"))
        return {}


def main() -> None:
    """Take the document, and work."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="mxdist agent: %(message)s")
    document = json.loads(_read(int(sys.argv[sys.argv.index("--document") + 1])))
    processes.adopt_orphans()
    dump_no_core()
    wake = Wake()
    given = document.get("environment") or {}
    environment = {**base_environment(os.environ), **given}
    place = Place(
        Path(document["folder"]), f"{document['token']}.{document['number']}", document["attempt"], environment,
        document.get("secrets") or {},
    )  # fmt: skip
    why = Agent(place, wake, link_timeout_s=document["link_timeout_s"]).run()
    if why != "bye":
        log.info("%s: all processes of the job on this host have been ended", why)
    sys.stderr.flush()
    os._exit(0)


def _read(file: int) -> bytes:
    with open(file, "rb") as document:
        return document.read()


if __name__ == "__main__":
    main()
