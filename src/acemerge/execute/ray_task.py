"""What a machine of a cluster does: make the plan anew, and write one shard into a folder of its own.

Nothing here needs Ray. Models are read by path; what comes back are names of tensors and the shard's record.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue

from acemerge.calibration.suite import Suite
from acemerge.errors import MergeError
from acemerge.execute.local import Record, ShardWriter
from acemerge.execute.passes import Gathered
from acemerge.execute.pipeline import Sources, compute_threads, make_plan, torch_device
from acemerge.planning.plan import Plan, PlannedTensor
from acemerge.recipe.recipe import Recipe


@dataclass(frozen=True)
class Order:
    """What another process needs to know to do the same: everything the plan is made of, and what was gathered for it."""

    recipe: Recipe
    sources: Sources
    relative_to: Path
    suite: Suite | None
    digest: str
    """The plan's, which must come out the same."""
    working_folder: Path
    """What relative paths start from."""
    gathered: Gathered


def write_shard(order: bytes, shard: str, folder: Path, device: str, threads: int) -> Iterator[str | Record]:
    """Write one shard into a folder; yields the name of each tensor when it is done, and at last the shard's record."""
    messages: SimpleQueue[str | None] = SimpleQueue()

    def work() -> Record:
        with compute_threads(threads):
            plan, gathered = _open_order(order)
            return ShardWriter(plan, folder, torch_device(device), _Reporting(messages.put)).run_shard(shard, gathered)

    def end(_: Future[Record]) -> None:
        messages.put(None)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        done.add_done_callback(end)
        for name in iter(messages.get, None):  # noqa: UP028  (Ray sends answers, which `yield from` would pass on)
            yield name
        yield done.result()


@dataclass(frozen=True)
class _Reporting:
    """Progress as messages."""

    send: Callable[[str], None]

    def advance(self, tensor: PlannedTensor) -> None:
        """One tensor is done."""
        self.send(tensor.name)

    def say(self, message: str) -> None:
        """Shards have no phases."""


@lru_cache(maxsize=1)  # a worker process takes one shard after the other
def _open_order(packed: bytes) -> tuple[Plan, Gathered]:
    """The plan, made from the files that this machine sees, and what was gathered for it."""
    try:
        order: Order = pickle.loads(packed)
        with suppress(OSError):  # where all paths are absolute, this folder need not be shared
            os.chdir(order.working_folder)
        plan = make_plan(order.recipe, order.sources, order.relative_to, order.suite)
        if plan.digest != order.digest:
            raise MergeError("a model or its date, or the version of acemerge, is not the same there")
    except Exception as error:  # whatever it is, it went well where the order was made
        raise MergeError(
            f"machine {socket.gethostname()} cannot take part: {error}. Every machine of the cluster needs the same acemerge, "
            "and the models, the output and ACEMERGE_CACHE on a file system that all of them share under the same paths"
        ) from error
    return plan, order.gathered
