"""One tensor of an adapter that is being written, from the files to the factors of its merged change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from acemerge.errors import MergeError
from acemerge.methods import Merged
from acemerge.numerics.frame import Factors, Frame, low_rank_factors, rounding_energy
from acemerge.numerics.linalg import sum_of_squares
from acemerge.numerics.low_rank import nearest_factors, residual_energy
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.computing import Computation, TensorMerge, computations, compute, read_each
from acemerge.tensors.nonfinite import likely_cause
from acemerge.tensors.results import MergedFactors, MergedTensor, TensorFact, tensor_warnings


def merge_to_factors(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: Any) -> MergedFactors | None:
    """The merged change of one tensor at its own rank, or at the one that the recipe asks for; None if nobody changed it."""
    [(_, merged)] = merge_to_factors_at_points([TensorMerge(plan, planned, statistics)], device)
    assert not isinstance(merged, MergedTensor)
    return merged


def merge_to_factors_at_points(
    merges: Sequence[TensorMerge], device: torch.device
) -> Iterator[tuple[list[int], MergedFactors | MergedTensor | None]]:
    """The same for every plan, reading the tensor once; each distinct result with the indices of its merges, in any order.

    Of a tensor that the adapter has no place for, only the length of its change is told.
    """
    todo = computations(merges)
    for seen in read_each(todo, range(len(todo)), device):
        first = todo[seen.points[0]]
        if not seen.finite:
            raise MergeError(f"tensor '{first.planned.name}': {likely_cause(first.plan, first.planned)}")
        if not seen.changed:
            yield seen.points, None
        else:
            for sharing, merged, facts in compute(todo, seen):
                merge = todo[sharing[0]]
                facts["norm"] = math.sqrt(energy := _finite_energy(merge, merged))
                if merge.planned.form == "left out":
                    yield sharing, MergedTensor(torch.empty(0), facts, tensor_warnings(merge.planned, merged.warnings))
                else:
                    yield sharing, _as_factors(merge, merged, energy, facts, seen.frame)


def _finite_energy(merge: Computation, merged: Merged) -> float:
    energy = sum_of_squares(merged.delta)
    if not math.isfinite(energy):
        cause = likely_cause(merge.plan, merge.planned)
        raise MergeError(f"tensor '{merge.planned.name}': the merged change is not finite; {cause}")
    return energy


def _as_factors(
    merge: Computation, merged: Merged, energy: float, facts: dict[str, TensorFact], frame: Frame | None
) -> MergedFactors:
    planned = merge.planned
    matrix = merged.delta.flatten(1)
    factors, lost = _of_a_core(merge, matrix, energy, frame) if frame else _of_a_whole_matrix(merge, matrix)
    if not math.isfinite(lost):
        raise MergeError(f"tensor '{planned.name}': its factors are too large for {planned.output_dtype}; pass --dtype float32")
    share = min(1.0, lost / energy) if energy else 0.0
    facts |= {"rank": factors.left.shape[1], "relative_error": math.sqrt(share), "energy_kept": 1 - share}
    stored = planned.fate.view.low_rank_to_stored(factors)
    return MergedFactors(stored, facts, tensor_warnings(planned, merged.warnings))


def _of_a_core(merge: Computation, core: Tensor, energy: float, frame: Frame) -> tuple[Factors, float]:
    """The factors, and what they lack of the merged change, in energy."""
    recipe = merge.plan.recipe
    factors, kept = low_rank_factors(core.double(), frame, recipe.rank, recipe.energy)
    # What a smaller rank leaves out is orthogonal to what it keeps, so the two losses add up.
    cut = max(0.0, energy - kept) if recipe.rank or recipe.energy else 0.0
    return factors, cut + rounding_energy(factors, getattr(torch, merge.planned.output_dtype))


def _of_a_whole_matrix(merge: Computation, matrix: Tensor) -> tuple[Factors, float]:
    """The same, measured with the factors as they are written: those of a large matrix come from random projections."""
    factors = nearest_factors(matrix, merge.plan.recipe.rank, merge.plan.recipe.energy)
    dtype = getattr(torch, merge.planned.output_dtype)
    return factors, residual_energy(matrix, factors.left.to(dtype), factors.right.to(dtype))
