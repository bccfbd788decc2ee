"""How activations and gradients go from stage to stage: between threads of one process, or between ranks.

Horovod has no send and receive. Between ranks a message is a broadcast over a process set of the two ranks: Horovod
carries it out when both have asked for it by its name, in whichever order they asked for others, so messages of both
directions may be on their way at once, and no order of calls can make two ranks wait for each other in a circle. A name
must not be used again while it is on its way, and a stage that nothing comes back to may be steps ahead: so the sender
waits for its last message of that name first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import mxnet as mx

from mxdist.runtime.parallel.base import Group, plain
from mxdist.runtime.parallel.orders import Action
from mxdist.runtime.parallel.stages import Shape, Stages


class Link(ABC):
    """What one stage has to do with its neighbours."""

    @abstractmethod
    def expect(self, action: Action, rows: int) -> None:
        """Make ready for what this action will need; the next ``receive`` returns it.

        :param rows: examples in the micro-batch.
        """

    @abstractmethod
    def receive(self) -> mx.nd.NDArray:
        """Return what was expected, once it is here: an activation from the stage before, a gradient from the next."""

    @abstractmethod
    def send(self, action: Action, array: mx.nd.NDArray) -> None:
        """Pass on what an action made; returns at once."""


class Broken(Exception):
    """A neighbour has failed; it tells why."""


class Mailbox(Link):
    """Stages as threads of one process.

    :param queues: of all stages, both ways: ``queues[forward][stage]`` holds what goes to that stage.
    """

    def __init__(self, queues: dict[bool, list[SimpleQueue[mx.nd.NDArray | None]]], stage: int, to: mx.Context) -> None:
        self._queues, self._stage, self._device = queues, stage, to
        self._next: list[Action] = []

    def expect(self, action: Action, rows: int) -> None:
        """Note which direction comes next."""
        self._next.append(action)

    def receive(self) -> mx.nd.NDArray:
        """Wait for the neighbour, and bring what it sent to this stage's device.

        :raises Broken: it failed.
        """
        array = self._queues[self._next.pop(0).forward][self._stage].get()
        if array is None:
            raise Broken
        return array.as_in_context(self._device)

    def send(self, action: Action, array: mx.nd.NDArray) -> None:
        """Put it into the neighbour's box."""
        self._queues[action.forward][self._stage + (1 if action.forward else -1)].put(array)

    def give_up(self) -> None:
        """Wake the neighbours: nothing more will come from here."""
        last = len(self._queues[True]) - 1
        for forward, to in ((True, self._stage + 1), (False, self._stage - 1)):
            if 0 <= to <= last:
                self._queues[forward][to].put(None)


def mailboxes(devices: Sequence[mx.Context]) -> list[Mailbox]:
    """Return the links of all stages of one process."""
    queues: dict[bool, list[SimpleQueue[mx.nd.NDArray | None]]] = {
        forward: [SimpleQueue() for _ in devices] for forward in (True, False)
    }
    return [Mailbox(queues, stage, device) for stage, device in enumerate(devices)]


class Sets:
    """Groups of ranks in a world of ``replicas`` times ``stages``: rank = replica * stages + stage.

    Every rank makes all of them, in the same order. Where a group is the whole world, it is Horovod's own. Horovod
    takes each group once, so the world keeps them: those of an earlier layout serve again.

    :param group: the whole world.
    """

    def __init__(self, group: Group, replicas: int, stages: int) -> None:
        import horovod.mxnet as hvd

        self.hvd: Any = hvd
        self._group, self._everybody = group, list(range(replicas * stages))
        self.replica, self.stage, self.stages = group.rank // stages, group.rank % stages, stages
        rows = [[replica * stages + stage for stage in range(stages)] for replica in range(replicas)]
        pairs = [[self._set(row[stage : stage + 2]) for stage in range(stages - 1)] for row in rows]
        around = [None, *pairs[self.replica], None]
        self.before, self.after = around[self.stage], around[self.stage + 1]
        self.of_replica = [self._set(row) for row in rows][self.replica]
        self.of_stage = [self._set([row[stage] for row in rows]) for stage in range(stages)][self.stage]

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage of this rank's replica."""
        return self.replica * self.stages + stage

    def _set(self, ranks: Sequence[int]) -> Any:
        if len(ranks) == 1:
            return None
        if list(ranks) == self._everybody:
            return self.hvd.global_process_set
        return self._group.once(("process set", *ranks), lambda: self.hvd.add_process_set(list(ranks)))


class Pairwise(Link):
    """One stage as a rank.

    A receive is posted one action ahead, so that a message can arrive while this stage computes; that is one more
    activation, or gradient of one, in memory.

    :param device: of the stage.
    """

    def __init__(self, sets: Sets, stages: Stages, device: mx.Context) -> None:
        self._sets, self._stages, self._device = sets, stages, device
        self._next: list[mx.nd.NDArray] = []
        self._sent: dict[Action, mx.nd.NDArray] = {}

    def expect(self, action: Action, rows: int) -> None:
        """Post the receive."""
        stage = self._sets.stage
        shape: Shape = self._stages.shapes(rows)[stage - 1 if action.forward else stage]
        buffer = mx.nd.empty(shape, ctx=self._device, dtype=self._stages.dtype)
        source = stage - 1 if action.forward else stage + 1
        self._broadcast(buffer, action, source, self._sets.before if action.forward else self._sets.after)
        self._next.append(buffer)

    def receive(self) -> mx.nd.NDArray:
        """Wait for the message."""
        buffer = self._next.pop(0)
        buffer.wait_to_read()
        return buffer

    def send(self, action: Action, array: mx.nd.NDArray) -> None:
        """Hand the message to Horovod, once the last one of this name has arrived."""
        if action in self._sent:
            self._sent[action].wait_to_read()
        message = self._sent[action] = plain(array)
        self._broadcast(message, action, self._sets.stage, self._sets.after if action.forward else self._sets.before)

    def _broadcast(self, array: mx.nd.NDArray, action: Action, source: int, pair: Any) -> None:
        way = "forward" if action.forward else "backward"
        root = self._sets.rank_of(source)
        name = f"mxdist.{way}.{root}.{action.part}.{array.shape[0]}"
        self._sets.hvd.broadcast_(array, root_rank=root, name=name, process_set=pair)
