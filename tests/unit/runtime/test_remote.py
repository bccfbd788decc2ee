"""What the supervisor makes of what an agent says, when its own disk is full or an answer comes late."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mxdist.errors import LaunchError
from mxdist.runtime.channel import Channel
from mxdist.runtime.place import Place
from mxdist.runtime.remote import AgentLink
from mxdist.runtime.wire import pack, say

Answer = Callable[[dict[str, Any]], list[bytes]]


class Agent(Channel):
    """An agent on paper.

    :param answer: what it says to an order.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer, self._said = answer, queue.SimpleQueue[bytes | None]()
        self.say(say("hello", folder="/far", addresses=[]))

    def say(self, line: bytes) -> None:
        self._said.put(line)

    def send(self, data: bytes) -> None:
        told = json.loads(data)
        for line in self._answer(told):
            self.say(line)
        if told.get("id") is not None:
            self.say(say("reply", id=told["id"]))

    def lines(self) -> Iterator[bytes]:
        while (line := self._said.get()) is not None:
            yield line

    def close(self) -> None:
        self._said.put(None)

    @property
    def returncode(self) -> int | None:
        return None

    def complaint(self) -> str:
        return "gone"


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Callable[[Answer], tuple[AgentLink, Agent]]]:
    links = []

    def make(answer: Answer) -> tuple[AgentLink, Agent]:
        agent = Agent(answer)
        links.append(AgentLink("far", agent, Place(tmp_path, "token", 1, {}, {}), lambda: None, link_timeout_s=60))
        links[-1].greet(10)
        return links[-1], agent

    yield make
    for one in links:
        one.close(clean=False)


def two_files(told: dict[str, Any]) -> list[bytes]:
    if told["do"] != "fetch":
        return []
    return [
        say("piece", id=told["id"], path="model.json", data=pack(b"{}"), first=True),
        say("piece", id=told["id"], path="weights/params.npz", data=pack(b"123"), first=True),
    ]


def test_a_model_is_brought_whole(link: Callable[[Answer], tuple[AgentLink, Agent]], tmp_path: Path) -> None:
    link(two_files)[0].collect("model")
    assert (tmp_path / "model/model.json").read_bytes() == b"{}"
    assert (tmp_path / "model/weights/params.npz").read_bytes() == b"123"


def test_a_model_that_finds_no_room_is_not_taken_for_whole(
    link: Callable[[Answer], tuple[AgentLink, Agent]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def full(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == "params.npz":
            raise OSError(28, "No space left on device")
        return opened(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(LaunchError, match=r"model of far cannot be kept here: .*No space left"):
        link(two_files)[0].collect("model")


def test_a_path_that_leaves_the_folder_spoils_the_model(link: Callable[[Answer], tuple[AgentLink, Agent]]) -> None:
    def climbing(told: dict[str, Any]) -> list[bytes]:
        path = "../attempt.json"
        return [say("piece", id=told["id"], path=path, data=pack(b"{}"), first=True)] if told["do"] == "fetch" else []

    with pytest.raises(LaunchError, match="leaves"):
        link(climbing)[0].collect("model")


def test_who_ended_with_the_last_world_does_not_end_in_the_next(
    link: Callable[[Answer], tuple[AgentLink, Agent]],
) -> None:
    def late(told: dict[str, Any]) -> list[bytes]:
        return [say("exit", name="rank 3", code=-9)] if told["do"] == "world" else []

    far, agent = link(late)
    far.open_world(2, {}, ["rank 3"])
    assert far.reap() == {}
    agent.say(say("exit", name="rank 3", code=0))
    while not (found := far.reap()):
        pass
    assert found == {"rank 3": 0}
