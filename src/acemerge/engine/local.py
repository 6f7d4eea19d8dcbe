"""The local engine: one process, one tensor's task vectors at a time, reading ahead by one and writing behind by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acemerge.adapter_output import AdapterWriter
from acemerge.plan import Plan, PlannedTensor, tensor_record
from acemerge.progress import Progress
from acemerge.staging import Staging
from acemerge.statistics import gather_statistics
from acemerge.task_vectors import MergedTensor, merge_tensor, merge_to_factors, prefetch
from acemerge.writer import PartsWriter, write_safetensors


@dataclass(frozen=True)
class LocalEngine:
    """Carries out a plan's shards in this process."""

    plan: Plan
    staging: Staging
    device: torch.device
    progress: Progress

    def run(self) -> None:
        """Write every shard of the plan that is not already finished."""
        unfinished = {shard: tensors for shard, tensors in self.plan.shards.items() if not self.staging.reusable(shard)}
        for shard in self.plan.shards.keys() - unfinished.keys():
            for tensor in self.plan.shards[shard]:
                self.progress.advance(tensor)
        if unfinished:
            hashes = self.staging.inputs.all if self.staging.inputs else dict
            gathered = gather_statistics(self.plan, self.device, self.progress, hashes)
            for shard, tensors in unfinished.items():
                self._run_shard(shard, tensors, gathered)

    def _run_shard(self, shard: str, tensors: Sequence[PlannedTensor], gathered: Any) -> None:
        """Merge one shard's tensors straight into its file."""
        if self.plan.recipe.save_as == "adapter":
            self._run_adapter(shard, tensors, gathered)
            return
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
            parts = PartsWriter(self.staging.folder, shard, open_files)
            digest = write_safetensors(self.staging.folder / shard, headers, values(parts), hashes)
            for record in records:
                record["sha256"] = hashes[record["name"]]
            self.staging.finish(shard, {"sha256": digest, "parts": parts.finish(), "tensors": records})

    def _run_adapter(self, shard: str, tensors: Sequence[PlannedTensor], gathered: Any) -> None:
        """Merge the adapters' tensors into one adapter; a tensor that stays with the base is only accounted for."""
        records: list[dict[str, Any]] = []
        with ExitStack() as open_files:
            writer = AdapterWriter(self.plan, self.staging.folder, open_files)
            for tensor in tensors:
                facts: Mapping[str, Any] = {}
                warnings: tuple[str, ...] = ()
                statistics = gathered.get((tensor.method, tensor.options))
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
        self.staging.finish(shard, {"sha256": digest, "parts": {}, "tensors": records})

    def _merged(self, ordered: Sequence[PlannedTensor], gathered: Any) -> Iterator[tuple[PlannedTensor, MergedTensor]]:
        """Each tensor with its merged value; the next one's pages are brought in meanwhile."""
        with ThreadPoolExecutor(1) as reader:
            for tensor, following in zip(ordered, [*ordered[1:], None], strict=True):
                ahead = reader.submit(prefetch, self.plan, following) if following else None
                yield tensor, merge_tensor(self.plan, tensor, self.device, gathered.get((tensor.method, tensor.options)))
                if ahead:
                    ahead.result()
