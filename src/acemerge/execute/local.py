"""One shard, a tensor at a time, reading ahead by one and writing behind by one; and the local engine, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from acemerge.execute.passes import Gathered
from acemerge.execute.together import own_stream, together
from acemerge.numerics.threads import share
from acemerge.output.adapter_writer import AdapterWriter
from acemerge.output.resources import check_resources
from acemerge.output.staging import Staging
from acemerge.output.writer import PartsWriter, write_safetensors
from acemerge.planning.plan import Plan, tensor_record
from acemerge.planning.progress import Progress, SharedProgress
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.factoring import merge_to_factors
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor
from acemerge.tensors.task_vectors import prefetch

Record = dict[str, Any]
"""What is noted of a finished shard: its hash, its parts' and what became of each of its tensors."""


@dataclass(frozen=True)
class LocalEngine:
    """Carries out shards in this process: one at a time on each device."""

    plan: Plan
    devices: tuple[torch.device, ...]

    @property
    def device(self) -> torch.device:
        """Where statistics passes compute."""
        return self.devices[0]

    def problems(self, output: Path) -> list[str]:
        """What this machine lacks for it."""
        on_cpu = sum(device.type == "cpu" for device in self.devices)
        return check_resources(output, self.plan, on_cpu=on_cpu, at_once=len(self.devices))

    def run(self, shards: Sequence[str], gathered: Gathered, staging: Staging, progress: Progress) -> None:
        """Write these shards of the plan."""
        if len(self.devices) > 1:
            self._run_on_each_device(shards, gathered, staging, progress)
            return
        writer = ShardWriter(self.plan, staging.folder, self.device, progress)
        for shard in shards:
            staging.finish(shard, writer.run_shard(shard, gathered))

    def _run_on_each_device(self, shards: Sequence[str], gathered: Gathered, staging: Staging, progress: Progress) -> None:
        """A thread for each device takes a shard whenever the device is free."""
        free: SimpleQueue[torch.device] = SimpleQueue()
        for device in self.devices:
            free.put(device)

        def write(shard: str) -> Record:
            device = free.get()
            try:
                return ShardWriter(self.plan, staging.folder, device, shared).run_shard(shard, gathered)
            finally:
                free.put(device)

        shared = SharedProgress(progress)
        with ThreadPoolExecutor(len(self.devices)) as pool:
            started = {pool.submit(write, shard): shard for shard in shards}
            try:
                for future in as_completed(started):
                    staging.finish(started[future], future.result())
            except BaseException:
                shared.stop()
                pool.shutdown(cancel_futures=True)
                raise


@dataclass(frozen=True)
class ShardWriter:
    """Carries out one shard at a time. Every engine does so, in whichever process, thread and folder it likes."""

    plan: Plan
    folder: Path
    device: torch.device
    progress: Progress

    def run_shard(self, shard: str, gathered: Gathered) -> Record:
        """Merge one shard's tensors straight into its file."""
        tensors = self.plan.shards[shard]
        if self.plan.recipe.save_as == "adapter":
            return self._run_adapter(shard, tensors, gathered)
        # Wide dtypes first keeps every tensor aligned in the file.
        ordered = sorted(tensors, key=lambda t: -t.output_bytes // max(1, t.header.elements))
        records: list[dict[str, Any]] = []
        hashes: dict[str, str] = {}

        def values(parts: PartsWriter) -> Iterator[Tensor]:
            for tensor, merged in self._merged(ordered, gathered):
                facts = {**merged.facts, "warnings": list(merged.warnings)}
                records.append({**tensor_record(tensor, shard, self.plan.experts), **facts})
                parts.add(tensor.name, merged.shared, merged.parts)
                yield merged.value
                self.progress.advance(tensor)

        headers = [(tensor.name, replace(tensor.header, dtype=tensor.output_dtype)) for tensor in ordered]
        with ExitStack() as open_files:
            parts = PartsWriter(self.folder, shard, open_files)
            digest = write_safetensors(self.folder / shard, headers, values(parts), hashes)
            for record in records:
                record["sha256"] = hashes[record["name"]]
            return {"sha256": digest, "parts": parts.finish(), "tensors": records}

    def _run_adapter(self, shard: str, tensors: Sequence[PlannedTensor], gathered: Gathered) -> Record:
        """Merge the adapters' tensors into one adapter; a tensor that stays with the base is only accounted for."""
        records: list[dict[str, Any]] = []
        with ExitStack() as open_files:
            writer = AdapterWriter(self.plan, self.folder, open_files)
            for tensor in tensors:
                facts: Mapping[str, Any] = {}
                warnings: tuple[str, ...] = ()
                statistics = gathered.get(tensor.setting)
                if tensor.form == "factors":
                    factors = merge_to_factors(self.plan, tensor, self.device, statistics, self.plan.recipe.rank)
                    if factors:
                        writer.add_factors(tensor, factors)
                    facts, warnings = (factors.facts, factors.warnings) if factors else ({"active_experts": 0}, ())
                elif tensor.form == "value":
                    merged = merge_tensor(self.plan, tensor, self.device, statistics)
                    writer.add_value(tensor, merged.value)
                    facts, warnings = merged.facts, merged.warnings
                record = tensor_record(tensor, shard, self.plan.experts)
                records.append({**record, **facts, "warnings": list(warnings), "written": tensor.form})
                self.progress.advance(tensor)
            digest = writer.finish()
        return {"sha256": digest, "parts": {}, "tensors": records}

    def _merged(self, ordered: Sequence[PlannedTensor], gathered: Gathered) -> Iterator[tuple[PlannedTensor, MergedTensor]]:
        """Each tensor with its merged value; the following ones' pages are brought in meanwhile."""

        def merge(tensor: PlannedTensor) -> MergedTensor:
            return merge_tensor(self.plan, tensor, self.device, gathered.get(tensor.setting))

        def merge_beside_others(tensor: PlannedTensor) -> MergedTensor:
            with own_stream(self.device):
                return merge(tensor)

        groups = together(ordered, self.device)
        with ThreadPoolExecutor(1) as reader:
            for group, following in zip(groups, [*groups[1:], []], strict=True):
                ahead = [reader.submit(prefetch, self.plan, tensor) for tensor in following]
                # One alone may share its own work; and a GPU keeps memory for every stream, so a large one gets none of its own.
                merged = share(merge_beside_others, group) if len(group) > 1 else map(merge, group)
                yield from zip(group, merged, strict=True)
                for future in ahead:
                    future.result()
