"""Interrupt a merge at one tensor, and see which tensors were merged."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from acemerge.planning.plan import Plan, PlannedTensor
from acemerge.tensors.task_vectors import MergedTensor, TensorMerge, merge_tensor


def stop_at(name: str, calls: list[str]) -> Callable[[Plan, PlannedTensor, torch.device, object], MergedTensor]:
    """A merge_tensor that counts its calls and is interrupted at one tensor."""

    def interrupted(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: object) -> MergedTensor:
        calls.append(planned.name)
        if planned.name == name:
            raise KeyboardInterrupt
        return merge_tensor(plan, planned, device, statistics)

    return interrupted


MergeOne = Callable[..., Any]
"""Takes what merge_tensor takes; what a test puts in its place may never return."""


def one_by_one(merge: MergeOne) -> Callable[[Sequence[TensorMerge], torch.device], Iterator[tuple[list[int], MergedTensor]]]:
    """A stand-in for what a shard's writer calls for a tensor at all settings: this function for each of them."""

    def at_points(merges: Sequence[TensorMerge], device: torch.device) -> Iterator[tuple[list[int], MergedTensor]]:
        for point, each in enumerate(merges):
            yield [point], merge(each.plan, each.planned, device, each.statistics)

    return at_points
