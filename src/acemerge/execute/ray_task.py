"""What a machine of a cluster does: make the plans anew, and write one shard into folders of its own.

Nothing here needs Ray. Models are read by path; what comes back are names of tensors and the shard's records.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue

from acemerge.errors import MergeError
from acemerge.execute.compute import compute_threads, torch_device
from acemerge.execute.opening import Scene
from acemerge.execute.passes import Gathered
from acemerge.execute.shard import Record, ShardWriter
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.recipe.recipe import Recipe


@dataclass(frozen=True)
class Order:
    """What another process needs to know to do the same: everything the plans are made of, and what was gathered for them."""

    recipes: Sequence[Recipe]
    scene: Scene
    digests: Sequence[str]
    """The plans', which must come out the same."""
    working_folder: Path
    """What relative paths start from."""
    gathered: Mapping[int, Gathered]
    """By the number of the plan."""


@dataclass(frozen=True)
class Part:
    """One shard of some of an order's plans, and the folder that each is written in."""

    shard: str
    folders: Mapping[int, Path]
    """By the number of the plan."""


def write_shard(order: bytes, part: Part, device: str, threads: int) -> Iterator[str | list[Record]]:
    """Write one shard; yields the name of each tensor when it is done, and at last the shard's records."""
    messages: SimpleQueue[str | None] = SimpleQueue()

    def work() -> list[Record]:
        with compute_threads(threads):
            plans, gathered = _open_order(order)
            chosen, folders = list(part.folders), list(part.folders.values())
            found, reporting = [gathered[point] for point in chosen], _Reporting(messages.put)
            writer = ShardWriter([plans[point] for point in chosen], folders, found, torch_device(device), reporting)
            return writer.run_shard(part.shard)

    def end(_: Future[list[Record]]) -> None:
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
def _open_order(packed: bytes) -> tuple[list[Plan], Mapping[int, Gathered]]:
    """The plans, made from the files that this machine sees, and what was gathered for them."""
    try:
        order: Order = pickle.loads(packed)
        with suppress(OSError):  # where all paths are absolute, this folder need not be shared
            os.chdir(order.working_folder)
        plans = order.scene.plans(order.recipes)
        if [plan.digest for plan in plans] != list(order.digests):
            raise MergeError("a model or its date, or the version of acemerge, is not the same there")
    except Exception as error:  # whatever it is, it went well where the order was made
        raise MergeError(
            f"machine {socket.gethostname()} cannot take part: {error}. Every machine of the cluster needs the same acemerge, "
            "and the models, the output and ACEMERGE_CACHE on a file system that all of them share under the same paths"
        ) from error
    return plans, order.gathered
