"""A few threads over many items, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_parallel(work: Callable[[Item], Answer], items: Sequence[Item], workers: int) -> list[Answer]:
    """Return ``work`` of every item, in order. The first failure stops the rest, and is raised.

    Threads draw from one counter: a pool with a future for each of a million files would need gigabytes.
    """
    answers: dict[int, Answer] = {}
    numbers = iter(range(len(items)))
    lock, stop = threading.Lock(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                answers[number] = work(items[number])
            except BaseException:
                stop.set()
                raise

    with ThreadPoolExecutor(min(workers, max(1, len(items)))) as pool:
        futures = [pool.submit(draw) for _ in range(min(workers, len(items)))]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()
    return [answers[number] for number in range(len(items))]
