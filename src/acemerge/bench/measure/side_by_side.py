"""Work in two processes of one thread each.

On few cores, two threads on matrices of this size mostly wait for each other; two processes do not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import Any, TypeVar

import torch

WORKERS = 2
T = TypeVar("T")


def run_side_by_side(work: Callable[..., T], arguments: Sequence[tuple[Any, ...]], workers: int) -> Iterator[tuple[int, T]]:
    """The index and result of each call, as they come. An error or Ctrl-C ends what is under way.

    One worker is this process itself, with all its threads: for models that fill a machine or a GPU.
    """
    if workers == 1:
        yield from ((index, work(*given)) for index, given in enumerate(arguments))
        return
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start)
    try:
        calls = {pool.submit(work, *given): index for index, given in enumerate(arguments)}
        for call in as_completed(calls):
            yield calls[call], call.result()
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.terminate()
        raise


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which ends it
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
