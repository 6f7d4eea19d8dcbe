"""The cluster engine: every shard is a task of Ray, on whichever machine has room for it.

Tasks write into folders of their own within the staging folder; this process moves a shard to its place when it is whole. So a
task that was given up, because its machine seemed lost, can do no harm.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError

from acemerge.errors import InputError, MergeError
from acemerge.execute.engines.registry import Work
from acemerge.execute.opening import Scene
from acemerge.execute.ray_task import Order, Part, write_shard
from acemerge.execute.shard import Record
from acemerge.methods import get_method
from acemerge.output.resources import FORCE, check_memory, peak_memory, tensor_memory
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress
from acemerge.planning.tensor import PlannedTensor
from acemerge.recipe.sizes import human_bytes
from acemerge.version import __version__

TRIES = 4
"""Of a shard whose worker dies, before the merge fails."""
_PROCESS_MEMORY = 500_000_000  # bytes: Python and torch, before any tensor
_OBJECT_STORE = 100_000_000  # bytes: no tensor goes through it
_ENDING_SECONDS = _ANSWERING_SECONDS = 10.0
_LISTENING_SECONDS = 1.0


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
    except Exception as error:  # Ray raises all kinds, the plainest where a machine is too busy to start it in time
        ray.shutdown()
        reason = " ".join(str(error).split())
        if address == "local":
            raise MergeError(
                f"--engine ray: no cluster could be started here ({reason}); nothing was published. Repeat the command when the "
                "machine is less busy, or use --engine local"
            ) from None
        raise InputError(
            f"--ray-address {address}: cannot be used as a Ray cluster ({reason}); one that asks for a token needs RAY_AUTH_MODE="
            "token and RAY_AUTH_TOKEN, as on its machines"
        ) from None
    try:
        yield
    except ClusterLostError:
        atexit.unregister(ray.shutdown)  # it would wait for what is gone, and end the process before it has said anything
        raise
    except BaseException:
        ray.shutdown()
        raise
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


class ClusterLostError(MergeError):
    """A part of the cluster without which nothing goes on is gone: Ray would wait for it, then end the process without a word."""

    ends_the_process = True


@dataclass(frozen=True)
class Daemons:
    """What this process cannot do without: the cluster's head, and the raylet of its own machine."""

    addresses: Mapping[str, tuple[str, int]]

    @staticmethod
    def of_this_machine() -> Daemons:
        """Where they listen."""
        context = ray.get_runtime_context()
        host, _, port = context.gcs_address.rpartition(":")
        here = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        raylet = (here["NodeManagerAddress"], here["NodeManagerPort"])
        return Daemons({"head": (host, int(port)), "raylet of this machine": raylet})

    def check(self) -> None:
        """Whether each of them still answers."""
        for what, (host, port) in self.addresses.items():
            try:
                socket.create_connection((host, port), timeout=_ANSWERING_SECONDS).close()
            except OSError as error:
                raise ClusterLostError(
                    f"--engine ray: the {what} ({host}:{port}) no longer answers ({error}); nothing was published. Repeat the "
                    "command on a cluster that runs to go on, or with --engine local"
                ) from None


@dataclass(frozen=True)
class RayEngine:
    """Carries out shards as tasks of the cluster that this process is connected to."""

    scene: Scene

    @property
    def threads(self) -> int:
        """Of a task."""
        return self.scene.run.threads or 1

    @property
    def device(self) -> torch.device:
        """Where passes over the whole model compute: in this process, whose machine may have no GPU."""
        return torch.device("cpu")

    def at_once(self, plan: Plan) -> int:
        """As many as the cluster has room for."""
        return len(plan.shards)

    def problems(self, plans: Sequence[Plan]) -> list[str]:
        """What this machine and the cluster's lack for it."""
        has_pass = any(_has_pass(tensor.method) for tensor in plans[0].tensors)
        problem = check_memory(peak_memory(plans)) if has_pass else None
        found = [problem] if problem else []
        needed = self.resources(plans, plans[0].shards)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(all(machine.get(name, 0) >= amount for name, amount in needed.items()) for machine in machines):
            wanted = [f"{needed['CPU']} CPUs (--threads)", f"{human_bytes(needed['memory'])} of memory"]
            wanted += ["a GPU"] if needed["GPU"] else []
            found.append(
                f"cluster: none of its {len(machines)} machines has {', '.join(wanted)}, which one task takes; add such a "
                f"machine, {FORCE} if the cluster will grow"
            )
        return found

    def run(self, work: Work, progress: Progress) -> None:
        """A task for every shard."""
        if len(work.shards) == 1:
            progress.say("one shard: one machine does all the work; a smaller --shard-size makes more shards")
        unseen = {tensor.name: tensor for shard in work.shards for tensor in work.plans[0].shards[shard]}
        run = _Run(self, work, ray.put(self._packed_order(work)), progress, unseen, Daemons.of_this_machine())
        try:
            for shard in work.shards:
                run.start(shard)
            while run.tasks:
                run.take_next()
        except ClusterLostError:
            run.tasks.clear()  # nobody is left to be told
            raise
        finally:
            run.cancel()

    def resources(self, plans: Sequence[Plan], shards: Iterable[str]) -> dict[str, int]:
        """What a task takes: enough for the largest tensor of any of these shards."""
        largest = max(tensor_memory(tensor, len(plans)) for shard in shards for tensor in plans[0].shards[shard])
        return {"CPU": self.threads, "memory": largest + _PROCESS_MEMORY, "GPU": int(self.scene.run.device != "cpu")}

    def _packed_order(self, work: Work) -> bytes:
        recipes, digests = [plan.recipe for plan in work.plans], [plan.digest for plan in work.plans]
        try:
            packed: bytes = cloudpickle.dumps(Order(recipes, self.scene, digests, Path.cwd(), work.gathered))
        except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
            methods = {method for found in work.gathered.values() for method, _ in filter(None, found)}
            who = ", ".join(sorted(methods)) or "the suite"
            raise InputError(
                f"--engine ray: what {who} gathered cannot be sent to other processes ({error}); use --engine local"
            ) from None
        return packed


@dataclass
class _Run:
    """The tasks under way, and what has come of them so far."""

    engine: RayEngine
    work: Work
    order: Any
    """Where Ray keeps the packed order."""
    progress: Progress
    unseen: dict[str, PlannedTensor]
    """The tensors that the user has not been told of."""
    daemons: Daemons
    tasks: dict[Any, Part] = field(default_factory=dict)
    """By the generator of their messages."""
    tries: Counter[str] = field(default_factory=Counter)

    def start(self, shard: str) -> None:
        """Hand a shard to the cluster, to be written in new folders."""
        self.tries[shard] += 1
        stagings = {point: self.work.stagings[point] for point in self.work.shards[shard]}
        part = Part(shard, {point: staging.folder / f".acemerge-{uuid4().hex}" for point, staging in stagings.items()})
        for folder in part.folders.values():
            folder.mkdir()
        needed = self.engine.resources(self.work.plans, [shard])
        # Whether to try again is decided here: only if a worker died, a number of times, and in view of the user.
        task = ray.remote(write_shard).options(
            num_returns="streaming", max_retries=0, name=f"acemerge {shard}", scheduling_strategy="SPREAD",
            num_cpus=needed["CPU"], num_gpus=needed["GPU"], memory=needed["memory"],
        )  # fmt: skip
        messages = task.remote(self.order, part, self.engine.scene.run.device, self.engine.threads)
        self.tasks[messages] = part

    def take_next(self) -> None:
        """Wait until one of the tasks has something to say, and the cluster lives."""
        while not (ready := ray.wait([*self.tasks], num_returns=1, timeout=_LISTENING_SECONDS)[0]):
            self.daemons.check()
        [messages] = ready
        try:
            message: str | list[Record] = ray.get(next(messages))
        except RayTaskError as error:
            raise _as_locally(error) from error
        except RayError as error:
            self.daemons.check()  # without them, starting anything waits for a minute
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

    def _finish(self, part: Part, records: Sequence[Record]) -> None:
        """Move a whole shard and its parts to their places."""
        for (point, folder), record in zip(part.folders.items(), records, strict=True):
            staging = self.work.stagings[point]
            for name in (part.shard, *record["parts"]):
                place = staging.folder / name
                place.parent.mkdir(parents=True, exist_ok=True)
                (folder / name).replace(place)
            shutil.rmtree(folder)
            staging.finish(part.shard, record)

    def _start_again(self, part: Part, error: RayError) -> None:
        """A worker died, by a signal or with its machine. One that always dies, dies of the shard."""
        for folder in part.folders.values():
            shutil.rmtree(folder)
        reason = " ".join(str(error).split()).partition(". ")[0]
        tried = self.tries[part.shard]
        if tried == TRIES:
            raise MergeError(
                f"{part.shard}: its worker died {TRIES} times ({reason}); nothing was published. Machines with more memory, or a "
                "smaller --shard-size, may help; repeat the command to go on"
            )
        self.progress.say(f"{part.shard}: its worker died ({reason}); starting it again, try {tried + 1} of {TRIES}")
        self.start(part.shard)

    def cancel(self) -> None:
        """End what is still under way, and wait for its end, so that nobody writes to the staging folder any more."""
        for messages in self.tasks:
            ray.cancel(messages, force=True)
        for messages in self.tasks:
            with suppress(RayError, StopIteration):
                while ray.wait([messages], timeout=_ENDING_SECONDS)[0]:
                    ray.get(next(messages))
        for part in self.tasks.values():
            for folder in part.folders.values():
                shutil.rmtree(folder, ignore_errors=True)


def _as_locally(error: RayTaskError) -> Exception:
    """What happened in a task, as it would have reached the user without Ray."""
    if "failed to import on the worker" in str(error):
        return MergeError(
            f"a machine of the cluster has no acemerge {__version__}, or not where its Ray looks; install the same on every one"
        )
    return error.cause if isinstance(error.cause, Exception) else error


def _has_pass(method: str | None) -> bool:
    return method is not None and (get_method(method).statistics is not None or get_method(method).uses == "data")
