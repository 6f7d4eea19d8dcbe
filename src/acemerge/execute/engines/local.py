"""The local engine: this process, one shard at a time on each device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from acemerge.errors import InputError
from acemerge.execute.compute import torch_device
from acemerge.execute.engines.registry import Work
from acemerge.execute.opening import Scene
from acemerge.execute.shard import Record, ShardWriter
from acemerge.output.resources import check_memory, peak_memory
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress, SharedProgress
from acemerge.recipe.run_options import RunOptions


def check(run: RunOptions) -> None:
    """There is no cluster here."""
    if run.ray_address:
        raise InputError(f"--ray-address {run.ray_address}: only the cluster engine uses it; pass --engine ray too")


@contextmanager
def open_engine(scene: Scene) -> Iterator[LocalEngine]:
    """On the devices that were asked for."""
    yield LocalEngine(tuple(map(torch_device, scene.run.device.split(","))))


@dataclass(frozen=True)
class LocalEngine:
    """Carries out shards in this process."""

    devices: tuple[torch.device, ...]

    @property
    def device(self) -> torch.device:
        """The first."""
        return self.devices[0]

    def at_once(self, plan: Plan) -> int:  # noqa: ARG002
        """One on each device."""
        return len(self.devices)

    def problems(self, plans: Sequence[Plan]) -> list[str]:
        """Memory that this machine lacks."""
        on_cpu = sum(device.type == "cpu" for device in self.devices)
        problem = check_memory(peak_memory(plans) * on_cpu)
        return [problem] if problem else []

    def run(self, work: Work, progress: Progress) -> None:
        """Shard by shard."""
        if len(self.devices) > 1:
            self._run_on_each_device(work, progress)
            return
        for shard in work.shards:
            _finish(work, shard, _write(work, shard, self.device, progress))

    def _run_on_each_device(self, work: Work, progress: Progress) -> None:
        """A thread for each device takes a shard whenever the device is free."""
        free: SimpleQueue[torch.device] = SimpleQueue()
        for device in self.devices:
            free.put(device)

        def write(shard: str) -> list[Record]:
            device = free.get()
            try:
                return _write(work, shard, device, shared)
            finally:
                free.put(device)

        shared = SharedProgress(progress)
        with ThreadPoolExecutor(len(self.devices)) as pool:
            started = {pool.submit(write, shard): shard for shard in work.shards}
            try:
                for future in as_completed(started):
                    _finish(work, started[future], future.result())
            except BaseException:
                shared.stop()
                pool.shutdown(cancel_futures=True)
                raise


def _write(work: Work, shard: str, device: torch.device, progress: Progress) -> list[Record]:
    points = work.shards[shard]
    plans, folders = [work.plans[point] for point in points], [work.stagings[point].folder for point in points]
    return ShardWriter(plans, folders, [work.gathered[point] for point in points], device, progress).run_shard(shard)


def _finish(work: Work, shard: str, records: Sequence[Record]) -> None:
    for point, record in zip(work.shards[shard], records, strict=True):
        work.stagings[point].finish(shard, record)
