"""The statistics pass: what whole-model methods must know first, gathered one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from acemerge.methods import Options, get_method
from acemerge.methods.registry import Statistics
from acemerge.plan import Plan, PlannedTensor
from acemerge.progress import Progress
from acemerge.task_vectors import observed_task_vectors, tensor_context

Gathered = Mapping[tuple[str | None, Options | None], Statistics]


def gather_statistics(plan: Plan, device: torch.device, progress: Progress) -> Gathered:
    """Run every statistics pass that the plan's methods ask for; the result is keyed by method and options."""
    groups: dict[tuple[str, Options], list[PlannedTensor]] = {}
    for planned in plan.tensors:
        if planned.action == "merged" and planned.method and planned.options:
            groups.setdefault((planned.method, planned.options), []).append(planned)
    names = tuple(expert.name for expert in plan.experts)
    gathered: dict[tuple[str | None, Options | None], Statistics] = {}
    for (method, options), tensors in groups.items():
        factory = get_method(method).statistics
        statistics = factory(options, names) if factory else None
        if statistics is not None:
            _run_passes(plan, tensors, statistics, device, progress)
            gathered[method, options] = statistics
    return gathered


def _run_passes(
    plan: Plan, tensors: list[PlannedTensor], statistics: Statistics, device: torch.device, progress: Progress
) -> None:
    number, more = 0, True
    while more:
        number += 1
        progress.say(f"statistics pass {number}: {len(tensors)} tensors")
        for planned in tensors:
            task_vectors, frame = observed_task_vectors(plan, planned, device)
            if task_vectors is not None:
                statistics.observe(task_vectors, tensor_context(plan, planned, frame))
        more = statistics.end_pass()
