"""Interrupt a merge at one tensor, and see which tensors were merged."""

from collections.abc import Callable

import torch

from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.merging import merge_tensor
from acemerge.tensors.results import MergedTensor


def stop_at(name: str, calls: list[str]) -> Callable[[Plan, PlannedTensor, torch.device, object], MergedTensor]:
    """A merge_tensor that counts its calls and is interrupted at one tensor."""

    def interrupted(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: object) -> MergedTensor:
        calls.append(planned.name)
        if planned.name == name:
            raise KeyboardInterrupt
        return merge_tensor(plan, planned, device, statistics)

    return interrupted
