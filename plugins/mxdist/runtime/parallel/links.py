"""How activations and gradients go from stage to stage: between threads of one process, or between ranks.

Between ranks of one host, a message is written into memory that its receiver maps, see ``nearby``. Anywhere else, and
on GPUs, it goes through Horovod, which has no send and receive: there a message is a broadcast over a process set of
the two ranks. Horovod carries it out when both have asked for it by its name, in whichever order they asked for others,
so messages of both directions may be on their way at once, and no order of calls can make two ranks wait for each other
in a circle. A name must not be used again while it is on its way, and a stage that nothing comes back to may be steps
ahead: so the sender waits for its last message of that name first.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from mxdist.runtime.parallel import nearby
from mxdist.runtime.parallel.base import Group, plain
from mxdist.runtime.parallel.nearby import Neighbour, Waiting
from mxdist.runtime.parallel.orders import Action
from mxdist.runtime.parallel.stages import Shape, Stages

_ALIGNED = 64
_WRITTEN, _READ = b"w", b"r"


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

    @abstractmethod
    def close(self) -> None:
        """Leave the neighbours: nothing more goes either way."""


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

    def close(self) -> None:
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
        self._rows = rows
        self.of_replica = [self._set(row) for row in rows][self.replica]
        self.of_stage = [self._set([row[stage] for row in rows]) for stage in range(stages)][self.stage]

    def pairs(self) -> tuple[Any, Any]:
        """Return the groups of this rank with that of the stage before, and of the next; every rank must ask."""
        pairs = [[self._set(row[stage : stage + 2]) for stage in range(self.stages - 1)] for row in self._rows]
        around = [None, *pairs[self.replica], None]
        return around[self.stage], around[self.stage + 1]

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage of this rank's replica."""
        return self.replica * self.stages + stage

    def _set(self, ranks: Sequence[int]) -> Any:
        if len(ranks) == 1:
            return None
        if list(ranks) == self._everybody:
            return self.hvd.global_process_set
        return self._group.once(("process set", *ranks), lambda: self.hvd.add_process_set(list(ranks)))


class Ways(Link):
    """One stage as a rank: a link to the stage before, and one to the next."""

    def __init__(self, before: Link | None, after: Link | None) -> None:
        self._before, self._after = before, after
        self._next: list[Link] = []

    def expect(self, action: Action, rows: int) -> None:
        """Make ready where it will come from."""
        link = self._of(self._before if action.forward else self._after)
        link.expect(action, rows)
        self._next.append(link)

    def receive(self) -> mx.nd.NDArray:
        """Wait for the message."""
        return self._next.pop(0).receive()

    def send(self, action: Action, array: mx.nd.NDArray) -> None:
        """Pass it on."""
        self._of(self._after if action.forward else self._before).send(action, array)

    def close(self) -> None:
        """Close both."""
        for link in (self._before, self._after):
            if link is not None:
                link.close()

    @staticmethod
    def _of(link: Link | None) -> Link:
        if link is None:
            raise ValueError("there is no stage on that side")
        return link


class Pairwise(Link):
    """The way to a rank anywhere, through Horovod.

    A receive is posted one action ahead, so that a message can arrive while this stage computes; that is one more
    activation, or gradient of one, in memory.

    :param pair: the process set of this rank and that one.
    :param device: of the stage.
    """

    def __init__(self, sets: Sets, pair: Any, stages: Stages, device: mx.Context) -> None:
        self._sets, self._pair, self._stages, self._device = sets, pair, stages, device
        self._next: list[mx.nd.NDArray] = []
        self._sent: dict[Action, mx.nd.NDArray] = {}

    def expect(self, action: Action, rows: int) -> None:
        """Post the receive."""
        stage = self._sets.stage
        buffer = mx.nd.empty(self._stages.shape_of(action, stage, rows), ctx=self._device, dtype=self._stages.dtype)
        self._broadcast(buffer, action, stage - 1 if action.forward else stage + 1)
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
        self._broadcast(message, action, self._sets.stage)

    def close(self) -> None:
        """Leave nothing: Horovod ends with the world."""

    def _broadcast(self, array: mx.nd.NDArray, action: Action, source: int) -> None:
        way = "forward" if action.forward else "backward"
        root = self._sets.rank_of(source)
        name = f"mxdist.{way}.{root}.{action.part}.{array.shape[0]}"
        self._sets.hvd.broadcast_(array, root_rank=root, name=name, process_set=self._pair)


class Beside(Link):
    """The way to a rank of the same host: memory with room for the messages of one step, written in turn.

    The sender waits only if the receiver is a step behind. That cannot become a circle: the stage before has all
    gradients of the last step, so whoever made them has read all its activations; and where no gradient comes back,
    nobody waits for that stage.

    :param slots: messages that there is room for: micro-batches of a step.
    """

    def __init__(self, neighbour: Neighbour, slots: int, stages: Stages, stage: int, device: mx.Context) -> None:
        self._neighbour, self._slots, self._stages, self._stage, self._device = neighbour, slots, stages, stage, device
        self._next: list[Shape] = []
        self._sent = self._received = 0

    def expect(self, action: Action, rows: int) -> None:
        """Note its shape."""
        self._next.append(self._stages.shape_of(action, self._stage, rows))

    def receive(self) -> mx.nd.NDArray:
        """Wait for the message, and copy it."""
        shape = self._next.pop(0)
        self._neighbour.hear(_WRITTEN)
        content = self._slot(self._neighbour.inbox, self._received, shape)
        array = mx.nd.array(content, ctx=self._device, dtype=content.dtype)
        self._received += 1
        self._neighbour.tell(_READ)
        return array

    def send(self, action: Action, array: mx.nd.NDArray) -> None:
        """Write the message; there is room unless the receiver is a step behind."""
        if self._sent >= self._slots:
            self._neighbour.hear(_READ)
        self._slot(self._neighbour.outbox, self._sent, array.shape)[...] = array.asnumpy()
        self._sent += 1
        self._neighbour.tell(_WRITTEN)

    def close(self) -> None:
        """Leave the neighbour."""
        self._neighbour.close()

    def _slot(self, memory: mmap.mmap, number: int, shape: Shape) -> NDArray[Any]:
        each = len(memory) // self._slots
        found: NDArray[Any] = np.ndarray(shape, np.dtype(self._stages.dtype), memory, number % self._slots * each)
        return found


def between(sets: Sets, stages: Stages, group: Group, *, slots: int, rows: int, waiting: Waiting | None) -> Ways:
    """Return the links of this rank's stage: beside it where its neighbour is on this host, else through Horovod.

    Every rank must call it.

    :param slots: micro-batches of a step.
    :param rows: examples of the largest micro-batch.
    :param waiting: see ``nearby``; None: all goes through Horovod.
    """
    stage, device = sets.stage, stages.stages[sets.stage].device
    sizes: dict[int, int] = {}
    for other in (stage - 1, stage + 1):
        if 0 <= other < sets.stages and waiting is not None and device.device_type == "cpu":
            shape = stages.shapes(rows)[min(stage, other)]
            each = math.prod(shape) * np.dtype(stages.dtype).itemsize
            sizes[sets.rank_of(other)] = -(-each // _ALIGNED) * _ALIGNED * slots
    found = nearby.join(group, sizes, waiting or (lambda rank: None))
    around = [sets.rank_of(other) for other in (stage - 1, stage + 1) if 0 <= other < sets.stages]
    far = group.any(any(rank not in found for rank in around))
    pairs = sets.pairs() if far else (None, None)

    def way(other: int, pair: Any) -> Link | None:
        if not 0 <= other < sets.stages:
            return None
        neighbour = found.get(sets.rank_of(other))
        if neighbour is None:
            return Pairwise(sets, pair, stages, device)
        return Beside(neighbour, slots, stages, stage, device)

    return Ways(way(stage - 1, pairs[0]), way(stage + 1, pairs[1]))
