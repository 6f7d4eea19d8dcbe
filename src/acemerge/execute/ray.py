"""The cluster engine: every shard is a task of Ray, on whichever machine has room for it.

Tasks write into folders of their own within the staging folder; this process moves a shard to its place when it is whole. So a
task that was given up, because its machine seemed lost, can do no harm.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from acemerge.errors import InputError, MergeError
from acemerge.execute.local import Record
from acemerge.execute.passes import Gathered
from acemerge.execute.ray_task import Order, write_shard
from acemerge.methods import get_method
from acemerge.output.resources import FORCE, check_resources
from acemerge.output.staging import Staging
from acemerge.planning.plan import Plan, PlannedTensor
from acemerge.planning.progress import Progress
from acemerge.recipe.sizes import human_bytes
from acemerge.version import __version__

TRIES = 4
"""Of a shard whose worker dies, before the merge fails."""
_PROCESS_MEMORY = 500_000_000  # bytes: Python and torch, before any tensor
_OBJECT_STORE = 100_000_000  # bytes: no tensor goes through it
_ENDING_SECONDS = _ANSWERING_SECONDS = 10.0


@contextmanager
def ray_cluster(address: str | None) -> Iterator[None]:
    """Be connected to the cluster at this address, or at RAY_ADDRESS; without either to one of this machine, for this run."""
    if ray.is_initialized():
        if address:
            raise InputError(f"ray_address={address}: this program has called ray.init already; leave ray_address out")
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if ":" in address:
        _check_answers(address)
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked
        settings |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    try:
        ray.init(address, **settings)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"--ray-address {address}: cannot be used as a Ray cluster ({reason}); one that asks for a token needs RAY_AUTH_MODE="
            "token and RAY_AUTH_TOKEN, as on its machines"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Ray itself would try for many minutes."""
    if address.startswith("ray://"):
        raise InputError(f"--ray-address {address}: a client's address; run acemerge on a machine of the cluster, with HOST:PORT")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERING_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise InputError(
            f"--ray-address {address}: no Ray cluster answers there ({error}); `ray start --head` names it"
        ) from None


@dataclass(frozen=True)
class RayEngine:
    """Carries out shards as tasks of the cluster that this process is connected to."""

    plan: Plan
    order: Order
    """With nothing gathered yet."""
    worker_device: str
    threads: int

    @property
    def device(self) -> torch.device:
        """Where statistics passes compute: in this process, whose machine may have no GPU."""
        return torch.device("cpu")

    def problems(self, output: Path) -> list[str]:
        """What this machine and the cluster's lack for it."""
        on_cpu = int(any(_has_pass(tensor.method) for tensor in self.plan.tensors))
        found = check_resources(output, self.plan, on_cpu=on_cpu, at_once=len(self.plan.shards))
        needed = self.resources(self.plan.shards)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(machine.get(name, 0) >= amount for name, amount in needed.items()) for machine in machines):
            wanted = [f"{needed['CPU']} CPUs (--threads)", f"{human_bytes(needed['memory'])} of memory"]
            wanted += ["a GPU"] if needed["GPU"] else []
            found.append(
                f"cluster: none of its {len(machines)} machines has {', '.join(wanted)}, which one task takes; add such a "
                f"machine, {FORCE} if the cluster will grow"
            )
        return found

    def run(self, shards: Sequence[str], gathered: Gathered, staging: Staging, progress: Progress) -> None:
        """Write these shards of the plan."""
        if len(shards) == 1:
            progress.say("one shard: one machine does all the work; a smaller --shard-size makes more shards")
        unseen = {tensor.name: tensor for shard in shards for tensor in self.plan.shards[shard]}
        run = _Run(self, ray.put(_packed(self.order, gathered)), staging, progress, unseen)
        try:
            for shard in shards:
                run.start(shard)
            while run.tasks:
                run.take_next()
        finally:
            run.cancel()

    def resources(self, shards: Iterable[str]) -> dict[str, int]:
        """What a task takes: enough for the largest tensor of any of these shards."""
        largest = max(tensor.peak_memory for shard in shards for tensor in self.plan.shards[shard])
        return {"CPU": self.threads, "memory": largest + _PROCESS_MEMORY, "GPU": int(self.worker_device != "cpu")}


@dataclass(frozen=True)
class _Task:
    """One try at a shard, and the folder that it writes in."""

    shard: str
    folder: Path


@dataclass
class _Run:
    """The tasks under way, and what has come of them so far."""

    engine: RayEngine
    order: Any
    """Where Ray keeps the packed order."""
    staging: Staging
    progress: Progress
    unseen: dict[str, PlannedTensor]
    """The tensors that the user has not been told of."""
    tasks: dict[Any, _Task] = field(default_factory=dict)
    """By the generator of their messages."""
    tries: Counter[str] = field(default_factory=Counter)

    def start(self, shard: str) -> None:
        """Hand a shard to the cluster."""
        self.tries[shard] += 1
        folder = self.staging.folder / f".acemerge-{uuid4().hex}"
        folder.mkdir()
        needed = self.engine.resources([shard])
        # Whether to try again is decided here: only if a worker died, a number of times, and in view of the user.
        task = ray.remote(write_shard).options(
            num_returns="streaming", max_retries=0, name=f"acemerge {shard}", scheduling_strategy="SPREAD",
            num_cpus=needed["CPU"], num_gpus=needed["GPU"], memory=needed["memory"],
        )  # fmt: skip
        messages = task.remote(self.order, shard, folder, self.engine.worker_device, self.engine.threads)
        self.tasks[messages] = _Task(shard, folder)

    def take_next(self) -> None:
        """Wait until one of the tasks has something to say."""
        [messages], _ = ray.wait([*self.tasks], num_returns=1)
        try:
            message: str | Record = ray.get(next(messages))
        except RayTaskError as error:
            raise _as_locally(error) from error
        except RayError as error:
            self._start_again(self.tasks.pop(messages), error)
            return
        if isinstance(message, str):
            self._show(message)
        else:
            self._finish(self.tasks.pop(messages), message)

    def _show(self, name: str) -> None:
        """Each tensor once, however often its shard was started."""
        if name in self.unseen:
            self.progress.advance(self.unseen.pop(name))

    def _finish(self, task: _Task, record: Record) -> None:
        """Move a whole shard and its parts to their places."""
        for name in (task.shard, *record["parts"]):
            place = self.staging.folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            (task.folder / name).replace(place)
        shutil.rmtree(task.folder)
        self.staging.finish(task.shard, record)

    def _start_again(self, task: _Task, error: RayError) -> None:
        """A worker died, by a signal or with its machine. One that always dies, dies of the shard."""
        shutil.rmtree(task.folder)
        reason = " ".join(str(error).split()).partition(". ")[0]
        tried = self.tries[task.shard]
        if tried == TRIES:
            raise MergeError(
                f"{task.shard}: its worker died {TRIES} times ({reason}); nothing was published. Machines with more memory, or a "
                "smaller --shard-size, may help; repeat the command to go on"
            )
        self.progress.say(f"{task.shard}: its worker died ({reason}); starting it again, try {tried + 1} of {TRIES}")
        self.start(task.shard)

    def cancel(self) -> None:
        """End what is still under way, and wait for its end, so that nobody writes to the staging folder any more."""
        for messages in self.tasks:
            ray.cancel(messages, force=True)
        for messages in self.tasks:
            with suppress(RayError, StopIteration):
                while ray.wait([messages], timeout=_ENDING_SECONDS)[0]:
                    ray.get(next(messages))
        for task in self.tasks.values():
            shutil.rmtree(task.folder, ignore_errors=True)


def _packed(order: Order, gathered: Gathered) -> bytes:
    try:
        packed: bytes = cloudpickle.dumps(replace(order, gathered=gathered))
    except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
        methods = ", ".join(sorted({str(method) for method, _ in gathered})) or "the suite"
        raise InputError(
            f"--engine ray: what {methods} gathered cannot be sent to other processes ({error}); use --engine local"
        ) from None
    return packed


def _as_locally(error: RayTaskError) -> Exception:
    """What happened in a task, as it would have reached the user without Ray."""
    if "failed to import on the worker" in str(error):
        return MergeError(
            f"a machine of the cluster has no acemerge {__version__}, or not where its Ray looks; install the same on every one"
        )
    return error.cause if isinstance(error.cause, Exception) else error


def _has_pass(method: str | None) -> bool:
    return method is not None and (get_method(method).statistics is not None or get_method(method).uses == "data")
