"""The local engine: one process, one tensor's task vectors at a time, reading ahead by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acemerge.plan import Plan, PlannedTensor, tensor_record
from acemerge.progress import Progress
from acemerge.task_vectors import merge_tensor, prefetch
from acemerge.writer import Staging, write_safetensors


def run_shards(plan: Plan, staging: Staging, device: torch.device, progress: Progress) -> None:
    """Write every shard of the plan that is not already finished."""
    for shard, tensors in plan.shards.items():
        if staging.reusable(shard):
            for tensor in tensors:
                progress.advance(tensor)
        else:
            run_shard(plan, shard, tensors, staging, device, progress)


def run_shard(
    plan: Plan, shard: str, tensors: Sequence[PlannedTensor], staging: Staging, device: torch.device, progress: Progress
) -> None:
    """Merge one shard's tensors straight into its file."""
    # Wide dtypes first keeps every tensor aligned in the file.
    ordered = sorted(tensors, key=lambda t: -t.output_bytes // max(1, t.header.elements))
    records: list[dict[str, Any]] = []

    def values() -> Iterator[Tensor]:
        with ThreadPoolExecutor(1) as reader:
            for tensor, following in zip(ordered, [*ordered[1:], None], strict=True):
                ahead = reader.submit(prefetch, plan, following) if following else None
                merged = merge_tensor(plan, tensor, device)
                records.append({**tensor_record(tensor, shard, plan.experts), **merged.facts, "warnings": merged.warnings})
                yield merged.value
                for warning in merged.warnings:
                    progress.warn(warning)
                progress.advance(tensor)
                if ahead:
                    ahead.result()

    headers = [(tensor.name, replace(tensor.header, dtype=tensor.output_dtype)) for tensor in ordered]
    digest = write_safetensors(staging.folder / shard, headers, values())
    staging.finish(shard, {"sha256": digest, "tensors": records})
