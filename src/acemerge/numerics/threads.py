"""Work shared by threads of our own, each of which computes alone.

Torch's threads spin for a while after every operation, and OpenBLAS' do too: where the two take turns, each waits for a core that
the other one burns, and two threads are slower than one. Ours sleep when they have nothing to do. How work is cut never depends
on the number of threads, so neither do the bits that come out.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
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
        # Threadpoolctl lets one thread at a time decide: the limit of another is ignored, which costs time and changes no bits.
        with _blas().limit(limits=1):
            results = [_pool(threads).submit(work, item) for item in items]
            wait(results)  # all of them, even if one has failed: nothing goes on behind the caller's back
            return [result.result() for result in results]


def available_threads() -> int:
    """How many threads `share` uses here."""
    with torch_at_rest() as threads:
        return 1 if _is_worker() else threads


def torch_at_rest() -> AbstractContextManager[int]:
    """Torch works in the calling thread alone, so that its own threads burn no core; says how many it had."""
    return _torch_at_rest


class _TorchAtRest(AbstractContextManager[int]):
    """Entered with the first thread that asks for it, left with the last: torch's number of threads is the process's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._threads = 1

    def __enter__(self) -> int:
        with self._lock:
            if not self._inside:
                self._threads = torch.get_num_threads()
                torch.set_num_threads(1)
            self._inside += 1
            return self._threads

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.set_num_threads(self._threads)


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries in this process; looking for them takes milliseconds."""
    return ThreadpoolController().select(user_api="blas")


def look_for_blas_again() -> None:
    """To be called when one has been loaded: `share` limits what it knows, and other threads fight for cores."""
    _blas.cache_clear()


_torch_at_rest = _TorchAtRest()
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


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process has none of these threads
