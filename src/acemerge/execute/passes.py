"""The statistics pass: what whole-model methods must know first, gathered one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from acemerge.calibration.registry import measurement_of
from acemerge.calibration.run import DataRun
from acemerge.methods import get_method
from acemerge.methods.registry import Statistics, TensorStatistics
from acemerge.numerics.linalg import sum_of_squares
from acemerge.numerics.pieces import Piece
from acemerge.output.input_hashes import Hashes
from acemerge.planning.fates import Core, Setting
from acemerge.planning.plan import Plan
from acemerge.planning.progress import Progress, tell_steps
from acemerge.planning.tensor import ComputedTensor, apart, computed
from acemerge.tensors.nonfinite import excuse_nonfinite
from acemerge.tensors.task_vectors import load_task_vectors, pieces_context, stored_values, tensor_context

Gathered = Mapping[Setting | None, Any]
"""By a tensor's setting; a tensor that no method makes has none, and finds nothing."""


def gather_statistics(plan: Plan, device: torch.device, progress: Progress, hashes: Callable[[], Hashes] = dict) -> Gathered:
    """Run every statistics pass and every measurement on data that the plan's methods ask for, keyed by method and options.

    `hashes` gives the hashes of the models' files, by which measurements are kept.
    """
    return gather_at_points([plan], device, progress, hashes)[0]


def gather_at_points(
    plans: Sequence[Plan], device: torch.device, progress: Progress, hashes: Callable[[], Hashes] = dict
) -> list[Gathered]:
    """The same for each of several plans, which differ in their method's options alone; their passes read every tensor once."""
    passes: dict[tuple[object, ...], _Pass] = {}
    gathered: list[dict[Setting | None, Any]] = [{} for _ in plans]
    for plan, own in zip(plans, gathered, strict=True):
        names = tuple(expert.name for expert in plan.experts)
        for (method, options), tensors in _groups(plan).items():
            chosen = get_method(method)
            if chosen.uses == "data" and plan.data:
                run = DataRun(plan, tensors, hashes(), device, progress)
                own[method, options] = measurement_of(method)(run, options)
                progress.say(f"measured; merging {len(plan.tensors)} tensors")
            statistics = chosen.statistics(options, names) if chosen.statistics else None
            if statistics is not None:
                planned = {tensor.name: tensor for tensor in tensors}
                same = passes.setdefault((method, options, *planned), _Pass(plan, planned, statistics))
                own[method, options] = same.statistics
    _run_passes(list(passes.values()), device, progress)
    return list(gathered)


def _groups(plan: Plan) -> dict[Setting, list[ComputedTensor]]:
    groups: dict[Setting, list[ComputedTensor]] = {}
    for planned in computed(plan.tensors):
        if planned.action == "merged":
            groups.setdefault(planned.fate.setting, []).append(planned)
    return groups


@dataclass(frozen=True)
class _Pass:
    """What one method, at one point, must see."""

    plan: Plan
    tensors: Mapping[str, ComputedTensor]
    statistics: Statistics


def _run_passes(passes: Sequence[_Pass], device: torch.device, progress: Progress) -> None:
    """All of them side by side, until none needs another. A tensor that is not sound is seen by none."""
    number, unsound = 0, set[str]()
    while passes:
        number += 1
        sizes = {name: t.header.nbytes for each in passes for name, t in each.tensors.items() if name not in unsound}
        phase = f"statistics pass {number}"
        progress.say(f"{phase}: {len(sizes)} tensors")
        for name in tell_steps(progress, phase, sizes):
            if not _show([each for each in passes if name in each.tensors], name, device, first=number == 1):
                unsound.add(name)
        passes = [each for each in passes if each.statistics.end_pass()]


def _show(passes: Sequence[_Pass], name: str, device: torch.device, *, first: bool) -> bool:
    """One tensor to all that must see it, read once for each way to see it; whether it is sound, as the first pass finds."""
    alike: dict[tuple[Core | None, bool], list[_Pass]] = {}
    for each in passes:
        fate = each.tensors[name].fate
        alike.setdefault((fate.core, fate.in_pieces and device.type == "cpu"), []).append(each)
    return all(
        _show_pieces(group, name, first=first) if in_pieces else _show_whole(group, name, device, first=first)
        for (_, in_pieces), group in alike.items()
    )


def _show_pieces(passes: Sequence[_Pass], name: str, *, first: bool) -> bool:
    plan, planned = passes[0].plan, passes[0].tensors[name]
    stored = stored_values(plan, planned)
    if first and not stored.has_finite_task_vectors():
        return excuse_nonfinite(plan, planned)
    viewers = [(each.statistics, pieces_context(each.plan, each.tensors[name])) for each in passes]
    for statistics, context in viewers:
        if first and isinstance(statistics, TensorStatistics):
            statistics.know_tensor(lambda look: stored.each(lambda piece: look(piece.task_vectors)), context)

    def show(piece: Piece) -> None:
        for statistics, context in viewers:
            statistics.observe(piece.task_vectors, context)

    stored.each(show)
    return True


def _show_whole(passes: Sequence[_Pass], name: str, device: torch.device, *, first: bool) -> bool:
    plan, planned = passes[0].plan, passes[0].tensors[name]
    matrices = apart(planned)
    alone = load_task_vectors(plan, matrices[0], device) if len(matrices) == 1 else None  # of several, one is held at a time
    if first:
        for matrix in matrices:
            task_vectors, _ = alone or load_task_vectors(plan, matrix, device)
            if not all(math.isfinite(sum_of_squares(own)) for own in task_vectors):
                return excuse_nonfinite(plan, planned)
    own_matrices = [apart(each.tensors[name]) for each in passes]
    for index, matrix in enumerate(matrices):
        task_vectors, frame = alone or load_task_vectors(plan, matrix, device)
        for each, own in zip(passes, own_matrices, strict=True):
            each.statistics.observe(task_vectors, tensor_context(each.plan, own[index], frame))
    return True
