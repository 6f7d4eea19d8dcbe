"""The statistics pass: what whole-model methods must know first, gathered one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from acemerge.data.run import DataRun
from acemerge.input_hashes import Hashes
from acemerge.methods import Options, get_method
from acemerge.methods.registry import Statistics
from acemerge.plan import Plan, PlannedTensor
from acemerge.progress import Progress
from acemerge.task_vectors import observed_task_vectors, tensor_context

Gathered = Mapping[tuple[str | None, Options | None], Any]


def gather_statistics(plan: Plan, device: torch.device, progress: Progress, hashes: Callable[[], Hashes] = dict) -> Gathered:
    """Run every statistics pass and every measurement on data that the plan's methods ask for, keyed by method and options.

    `hashes` gives the sha256 of the models' files, by which measurements are kept.
    """
    groups: dict[tuple[str, Options], list[PlannedTensor]] = {}
    for planned in plan.tensors:
        if planned.action == "merged" and planned.method and planned.options:
            groups.setdefault((planned.method, planned.options), []).append(planned)
    names = tuple(expert.name for expert in plan.experts)
    gathered: dict[tuple[str | None, Options | None], Any] = {}
    for (method, options), tensors in groups.items():
        measure, factory = get_method(method).measure, get_method(method).statistics
        if measure and plan.data:
            run = DataRun(plan, tensors, plan.data, hashes(), device, progress)
            gathered[method, options] = measure(run, options)
            progress.say(f"measured; merging {len(plan.tensors)} tensors")
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
