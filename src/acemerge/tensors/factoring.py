"""One tensor that adapters change by factors, from their files to the factors of its merged change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from acemerge.errors import MergeError
from acemerge.methods import Merged
from acemerge.numerics.frame import Frame, low_rank_factors, rounding_energy, standard_frame
from acemerge.numerics.linalg import sum_of_squares
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.computing import Computation, TensorMerge, computations, compute, read_each
from acemerge.tensors.nonfinite import likely_cause
from acemerge.tensors.results import MergedFactors, TensorFact, tensor_warnings


def merge_to_factors(
    plan: Plan, planned: PlannedTensor, device: torch.device, statistics: Any, rank: int | None
) -> MergedFactors | None:
    """The merged change of one tensor at its own rank, or at most at the one given; None if nobody changed it."""
    [(_, merged)] = merge_to_factors_at_points([TensorMerge(plan, planned, statistics)], device, rank)
    return merged


def merge_to_factors_at_points(
    merges: Sequence[TensorMerge], device: torch.device, rank: int | None
) -> Iterator[tuple[list[int], MergedFactors | None]]:
    """The same for every plan, reading the tensor once; each distinct result with the indices of its merges, in any order."""
    todo = computations(merges)
    for seen in read_each(todo, range(len(todo)), device):
        first = todo[seen.points[0]]
        if not seen.finite:
            raise MergeError(f"tensor '{first.planned.name}': {likely_cause(first.plan, first.planned)}")
        if not seen.changed:
            yield seen.points, None
        else:
            for sharing, merged, facts in compute(todo, seen):
                yield sharing, _as_factors(todo[sharing[0]], merged, facts, seen.frame, rank)


def _as_factors(
    merge: Computation, merged: Merged, facts: dict[str, TensorFact], frame: Frame | None, rank: int | None
) -> MergedFactors:
    plan, planned = merge.plan, merge.planned
    energy = sum_of_squares(merged.delta)
    if not math.isfinite(energy):
        raise MergeError(f"tensor '{planned.name}': the merged change is not finite; {likely_cause(plan, planned)}")
    core = merged.delta.flatten(1).double()
    factors, kept = low_rank_factors(core, frame or standard_frame(core[None]), rank)
    # What a smaller rank leaves out is orthogonal to what it keeps, so the two losses add up.
    lost = (max(0.0, energy - kept) if rank is not None else 0.0) + rounding_energy(factors, getattr(torch, planned.output_dtype))
    if not math.isfinite(lost):
        raise MergeError(f"tensor '{planned.name}': its factors are too large for {planned.output_dtype}; pass --dtype float32")
    error = math.sqrt(lost / energy) if energy else 0.0
    facts |= {"norm": math.sqrt(energy), "rank": factors.left.shape[1], "relative_error": error}
    stored = planned.fate.view.low_rank_to_stored(factors)
    return MergedFactors(stored, facts, tensor_warnings(planned, merged.warnings))
