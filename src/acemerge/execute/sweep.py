"""The engine of a sweep: one pass over the models, every tensor merged at all points, into every point's own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from acemerge.execute.passes import Gathered, gather_at_points
from acemerge.output.adapter_writer import AdapterWriter
from acemerge.output.staging import Staging
from acemerge.output.writer import PartsWriter, StreamedFile, tensor_sha256
from acemerge.planning.plan import Plan, tensor_record
from acemerge.planning.progress import Progress
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.computing import TensorMerge
from acemerge.tensors.factoring import merge_to_factors_at_points
from acemerge.tensors.merging import merge_tensor_at_points
from acemerge.tensors.results import MergedFactors, MergedTensor
from acemerge.tensors.task_vectors import prefetch


@dataclass(frozen=True)
class SweepEngine:
    """Carries out plans that differ in their method's options alone, each into its own staging folder."""

    plans: Sequence[Plan]
    stagings: Sequence[Staging]
    device: torch.device
    progress: Progress

    def run(self) -> None:
        """Write every shard of every plan that is not already finished."""
        shards = self.plans[0].shards
        unfinished = {
            shard: [point for point, staging in enumerate(self.stagings) if not staging.reusable(shard)] for shard in shards
        }
        for shard in (shard for shard, points in unfinished.items() if not points):
            for tensor in shards[shard]:
                self.progress.advance(tensor)
        needed = sorted({point for points in unfinished.values() for point in points})
        inputs = self.stagings[0].inputs
        found = gather_at_points(
            [self.plans[point] for point in needed], self.device, self.progress, inputs.all if inputs else dict
        )
        gathered = dict(zip(needed, found, strict=True))
        for shard, points in unfinished.items():
            if points:
                self._run_shard(shard, points, gathered)

    def _run_shard(self, shard: str, points: Sequence[int], gathered: Mapping[int, Gathered]) -> None:
        """Merge one shard's tensors straight into these points' files."""
        ordered = [_in_file_order(self.plans[point], shard) for point in points]
        as_adapter = self.plans[0].recipe.save_as == "adapter"
        with ExitStack() as open_files:
            kind = _AdapterOutput if as_adapter else _ShardOutput
            outputs = [kind(self.plans[p], shard, self.stagings[p].folder, open_files) for p in points]
            for tensors in self._reading_ahead(list(zip(*ordered, strict=True))):
                merges = [
                    TensorMerge(self.plans[p], tensor, gathered[p].get(tensor.setting))
                    for p, tensor in zip(points, tensors, strict=True)
                ]
                for sharing, merged in self._merge(merges):
                    facts = _facts(merged)
                    for index in sharing:
                        outputs[index].add(tensors[index], merged, facts)
                self.progress.advance(tensors[0])
            for point, output in zip(points, outputs, strict=True):
                self.stagings[point].finish(shard, output.finish())

    def _merge(self, merges: Sequence[TensorMerge]) -> Iterator[tuple[list[int], MergedTensor | MergedFactors | None]]:
        plan, planned = merges[0].plan, merges[0].planned
        if planned.form == "factors":
            yield from merge_to_factors_at_points(merges, self.device, plan.recipe.rank)
        elif planned.form == "value":
            yield from merge_tensor_at_points(merges, self.device)
        else:  # left to the base
            yield list(range(len(merges))), MergedTensor(torch.empty(0), {})

    def _reading_ahead(self, rows: Sequence[Sequence[PlannedTensor]]) -> Iterator[Sequence[PlannedTensor]]:
        """Each tensor, as every point plans it; the next one's pages are brought in meanwhile."""
        with ThreadPoolExecutor(1) as reader:
            for row, following in zip(rows, [*rows[1:], None], strict=True):
                ahead = reader.submit(prefetch, self.plans[0], following[0]) if following else None
                yield row
                if ahead:
                    ahead.result()


def _in_file_order(plan: Plan, shard: str) -> Sequence[PlannedTensor]:
    """Wide dtypes first, which keeps every tensor aligned in the file; an adapter's file sees to that itself."""
    if plan.recipe.save_as == "adapter":
        return plan.shards[shard]
    return sorted(plan.shards[shard], key=lambda tensor: -tensor.output_bytes // max(1, tensor.header.elements))


def _facts(merged: MergedTensor | MergedFactors | None) -> dict[str, Any]:
    """What a record says of a result, whichever points it belongs to."""
    if merged is None:
        return {"active_experts": 0, "warnings": []}
    sha = {"sha256": tensor_sha256(merged.value)} if isinstance(merged, MergedTensor) else {}
    return {**merged.facts, "warnings": list(merged.warnings), **sha}


@dataclass
class _ShardOutput:
    """One point's file of weights, and what per-task methods write beside it."""

    plan: Plan
    shard: str
    folder: Path
    open_files: ExitStack
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        headers = [(t.name, replace(t.header, dtype=t.output_dtype)) for t in _in_file_order(self.plan, self.shard)]
        self._file = StreamedFile(self.folder / self.shard, headers, self.open_files)
        self._parts = PartsWriter(self.folder, self.shard, self.open_files)

    def add(self, tensor: PlannedTensor, merged: MergedTensor | MergedFactors | None, facts: Mapping[str, Any]) -> None:
        assert isinstance(merged, MergedTensor)
        self.records.append({**tensor_record(tensor, self.shard, self.plan.experts), **facts})
        self._parts.add(tensor.name, merged.shared, merged.parts)
        self._file.add(merged.value)

    def finish(self) -> dict[str, Any]:
        return {"sha256": self._file.finish(), "parts": self._parts.finish(), "tensors": self.records}


@dataclass
class _AdapterOutput:
    """One point's adapter."""

    plan: Plan
    shard: str
    folder: Path
    open_files: ExitStack
    records: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._writer = AdapterWriter(self.plan, self.folder, self.open_files)

    def add(self, tensor: PlannedTensor, merged: MergedTensor | MergedFactors | None, facts: Mapping[str, Any]) -> None:
        if isinstance(merged, MergedFactors):
            self._writer.add_factors(tensor, merged)
        elif merged is not None and tensor.form == "value":
            self._writer.add_value(tensor, merged.value)
        told = {name: fact for name, fact in facts.items() if name != "sha256"}  # the file holds no such tensor
        self.records.append({**tensor_record(tensor, self.shard, self.plan.experts), **told, "written": tensor.form})

    def finish(self) -> dict[str, Any]:
        return {"sha256": self._writer.finish(), "parts": {}, "tensors": self.records}
