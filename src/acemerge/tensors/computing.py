"""A method at work on one tensor, under one plan or many: task vectors are read once, and what is equal is merged once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acemerge.errors import MergeError
from acemerge.methods import Merged, get_method
from acemerge.methods.shared_routes import merge_at_points
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import sum_of_squares
from acemerge.planning import fates
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, is_computed
from acemerge.tensors.nonfinite import likely_cause
from acemerge.tensors.results import TensorFact, norms
from acemerge.tensors.task_vectors import load_task_vectors, tensor_context


@dataclass(frozen=True)
class TensorMerge:
    """One tensor under one plan. A sweep has many plans, which differ in their method's options alone."""

    plan: Plan
    planned: PlannedTensor
    statistics: Any = None
    """What its method's statistics pass gathered, if it has one."""


@dataclass(frozen=True)
class Computation:
    """The same of a tensor that a method makes."""

    plan: Plan
    planned: ComputedTensor
    statistics: Any


def computations(merges: Sequence[TensorMerge]) -> list[Computation]:
    """Of merges of one tensor, which a method makes under every plan or under none."""
    return [Computation(merge.plan, merge.planned, merge.statistics) for merge in merges if is_computed(merge.planned)]


@dataclass(frozen=True)
class Seen:
    """What the methods see of a tensor at these points, which see it alike."""

    points: list[int]
    task_vectors: Tensor
    frame: Frame | None
    energies: list[float]

    @property
    def finite(self) -> bool:
        """Whether there is anything that is not a number."""
        return all(map(math.isfinite, self.energies))

    @property
    def changed(self) -> bool:
        """Whether anybody changed the tensor."""
        return any(self.energies)


def read_each(merges: Sequence[Computation], points: Iterable[int], device: torch.device) -> Iterator[Seen]:
    """Task vectors, their frame and their energies, once for all of these points that see them alike."""
    alike: dict[fates.Core | None, list[int]] = {}
    for point in points:
        alike.setdefault(merges[point].planned.fate.core, []).append(point)
    for sharing in alike.values():
        first = merges[sharing[0]]
        task_vectors, frame = load_task_vectors(first.plan, first.planned, device)
        yield Seen(sharing, task_vectors, frame, [sum_of_squares(task_vector) for task_vector in task_vectors])


def compute(merges: Sequence[Computation], seen: Seen) -> Iterator[tuple[list[int], Merged, dict[str, TensorFact]]]:
    """The method at work at these points, and what it and the norms tell."""
    chosen = [merges[point] for point in seen.points]
    plan, planned = chosen[0].plan, chosen[0].planned
    options = [merge.planned.fate.options for merge in chosen]
    contexts = [tensor_context(merge.plan, merge.planned, seen.frame, merge.statistics) for merge in chosen]
    try:
        for found, merged in merge_at_points(get_method(planned.fate.method), seen.task_vectors, options, contexts):
            facts = {**merged.facts, **lengths(planned, seen.energies, sum_of_squares(merged.delta))}
            yield [seen.points[index] for index in found], merged, facts
    except ArithmeticError as error:
        raise MergeError(f"tensor '{planned.name}': {error}; {likely_cause(plan, planned)}") from None


def lengths(planned: ComputedTensor, energies: Sequence[float], merged_energy: float) -> dict[str, TensorFact]:
    """Of every expert's change; and of the merged one, if it is no mean."""
    own: dict[str, TensorFact] = {"task_norms": [math.sqrt(energy) for energy in energies]}
    return {**own, **norms(energies, merged_energy)} if isinstance(planned.fate, fates.Merged) else own
