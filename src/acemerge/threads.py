"""Work shared by threads of our own, each of which computes alone.

Torch's threads spin for a while after every operation, and OpenBLAS' do too: where the two take turns, each waits for a core that
the other one burns, and two threads are slower than one. Ours sleep when they have nothing to do. How work is cut never depends
on the number of threads, so neither do the bits that come out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
Result = TypeVar("Result")


AT_ONCE = 4
"""How many threads may do work that takes memory for each of them, whatever the machine has."""


def share(work: Callable[[Item], Result], items: Iterable[Item], at_once: int | None = None) -> list[Result]:
    """`work` on every item, in as many threads as torch was given, but at most so many; the results in the items' order.

    What a thread shares out in its turn it does by itself.

    >>> share(abs, [-1, 2, -3])
    [1, 2, 3]
    """
    items = list(items)
    with torch_at_rest() as threads:
        threads = min(threads, at_once or threads)
        if min(threads, len(items)) < 2 or _is_worker():
            return [work(item) for item in items]
        with _blas().limit(limits=1):
            return list(_pool(threads).map(work, items))


def available_threads() -> int:
    """How many threads `share` uses here."""
    with torch_at_rest() as threads:
        return 1 if _is_worker() else threads


class _Rest:
    """How many callers want torch's threads at rest, and how many threads it had before the first of them came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers = 0
        self.threads = 1

    def begin(self) -> None:
        with self._lock:
            if not self._callers:
                self.threads = torch.get_num_threads()
                torch.set_num_threads(1)
            self._callers += 1

    def end(self) -> None:
        with self._lock:
            self._callers -= 1
            if not self._callers:
                torch.set_num_threads(self.threads)


_rest = _Rest()  # one for the process, as torch's number of threads is


@contextmanager
def torch_at_rest() -> Iterator[int]:
    """Torch works in the calling thread alone, so that its own threads burn no core; says how many it had."""
    _rest.begin()
    try:
        yield _rest.threads
    finally:
        _rest.end()


_worker = threading.local()


def _become_worker() -> None:
    _worker.busy = True
    torch.get_num_threads()  # takes the one that torch now has, and keeps it; the machine's number if it did not ask


def _is_worker() -> bool:
    return getattr(_worker, "busy", False)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept, because new threads start slowly: with new memory."""
    return ThreadPoolExecutor(threads, "share", initializer=_become_worker)


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries in this process; looking for them takes milliseconds."""
    return ThreadpoolController().select(user_api="blas")
