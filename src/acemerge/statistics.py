"""The statistics pass: what whole-model methods must know first, gathered one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from acemerge.data.run import DataRun
from acemerge.input_hashes import Hashes
from acemerge.linalg import sum_of_squares
from acemerge.methods import Options, get_method
from acemerge.methods.registry import Statistics, TensorStatistics
from acemerge.plan import Plan, PlannedTensor
from acemerge.progress import Progress
from acemerge.task_vectors import excuse_nonfinite, load_task_vectors, pieces_context, stored_values, tensor_context

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
    sound = tensors
    while more:
        number += 1
        progress.say(f"statistics pass {number}: {len(tensors)} tensors")
        sound = [planned for planned in sound if _observe(plan, planned, statistics, device, first=number == 1)]
        more = statistics.end_pass()


def _observe(plan: Plan, planned: PlannedTensor, statistics: Statistics, device: torch.device, *, first: bool) -> bool:
    """Show one tensor to the statistics, in pieces if it is merged so; whether it is sound, which the first pass finds out."""
    if planned.in_pieces and device.type == "cpu":
        stored = stored_values(plan, planned)
        if first and not stored.has_finite_task_vectors():
            return excuse_nonfinite(plan, planned)
        context = pieces_context(plan, planned)
        if first and isinstance(statistics, TensorStatistics):
            statistics.know_tensor(lambda look: stored.each(lambda piece: look(piece.task_vectors)), context)
        stored.each(lambda piece: statistics.observe(piece.task_vectors, context))
    else:
        task_vectors, frame = load_task_vectors(plan, planned, device)
        if first and not all(math.isfinite(sum_of_squares(task_vector)) for task_vector in task_vectors):
            return excuse_nonfinite(plan, planned)
        statistics.observe(task_vectors, tensor_context(plan, planned, frame))
    return True
