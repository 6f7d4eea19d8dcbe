"""One tensor, from memory-mapped files to its merged value."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from acemerge.methods import Merged, get_method
from acemerge.numerics.frame import Frame
from acemerge.numerics.linalg import sum_of_squares
from acemerge.numerics.pieces import merge_pieces
from acemerge.planning.estimates import wholes_at_once
from acemerge.planning.fates import Kept
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, apart
from acemerge.tensors.computing import Computation, TensorMerge, computations, compute, lengths, read_each
from acemerge.tensors.fused import joined_facts
from acemerge.tensors.nonfinite import all_equal_base, insist, likely_cause, nonfinite_values
from acemerge.tensors.output_rows import place_output_rows
from acemerge.tensors.parts import lost_by_rounding, shared_vector, task_parts, to_stored
from acemerge.tensors.results import MergedTensor, TensorFact, tensor_warnings
from acemerge.tensors.task_vectors import load_dense, pieces_context, stored_values


def merge_tensor(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: Any = None) -> MergedTensor:
    """Carry out the plan for one tensor; `statistics` is what its method's statistics pass gathered, if it has one."""
    [(_, merged)] = merge_tensor_at_points([TensorMerge(plan, planned, statistics)], device)
    return merged


def merge_tensor_at_points(merges: Sequence[TensorMerge], device: torch.device) -> Iterator[tuple[list[int], MergedTensor]]:
    """Carry out every plan for one tensor, reading it once; each distinct result with the indices of its merges, in any order."""
    for points, merged in _merge_at_points(merges, device):
        merge = merges[points[0]]
        yield points, _in_eight_bits(merge.planned, _with_output_rows(merge, merged))


def _merge_at_points(merges: Sequence[TensorMerge], device: torch.device) -> Iterator[tuple[list[int], MergedTensor]]:
    """The same with the base's rows."""
    todo = computations(merges)
    if not todo:
        yield list(range(len(merges))), _untouched(merges[0].plan, merges[0].planned)
    elif todo[0].planned.fate.view.is_apart:
        at_once = wholes_at_once(todo[0].planned)
        for start in range(0, len(todo), at_once):
            for point, merged in enumerate(_merge_apart(todo[start : start + at_once], device), start):
                yield [point], merged
    else:
        yield from _merge_each(todo, device)


def _with_output_rows(merge: TensorMerge, merged: MergedTensor) -> MergedTensor:
    planned = merge.planned
    if planned.rows is None:
        return merged
    value, warnings = place_output_rows(merge.plan, planned, planned.rows, merged.value)
    return replace(merged, value=value, warnings=(*merged.warnings, *tensor_warnings(planned, warnings)))


def _in_eight_bits(planned: PlannedTensor, merged: MergedTensor) -> MergedTensor:
    if planned.eight_bits is None:
        return merged
    numbers, scales = planned.eight_bits.quantised(merged.value)
    return replace(merged, value=numbers, scales=scales)


def _merge_each(merges: Sequence[Computation], device: torch.device) -> Iterator[tuple[list[int], MergedTensor]]:
    in_pieces = [point for point, merge in enumerate(merges) if merge.planned.fate.in_pieces and device.type == "cpu"]
    yield from _merge_each_in_pieces(merges, in_pieces)
    others = [point for point in range(len(merges)) if point not in in_pieces]
    for seen in read_each(merges, others, device):
        first = merges[seen.points[0]]
        if not seen.finite:
            yield seen.points, _nonfinite(first.plan, first.planned, device)
        elif not seen.changed and not get_method(first.planned.fate.method).is_always_called(first.planned.fate.options):
            yield seen.points, _unchanged(first.plan, first.planned)
        else:
            for sharing, merged, facts in compute(merges, seen):
                yield sharing, _as_stored(merges[sharing[0]], merged, facts, seen.frame)


def _merge_apart(merges: Sequence[Computation], device: torch.device) -> Iterator[MergedTensor]:
    """A fused matrix or a stack of them: each for itself, at all settings, to its place in every setting's whole."""
    planned = merges[0].planned
    dtypes = [getattr(torch, merge.planned.output_dtype) for merge in merges]
    wholes = deque(_Whole(torch.empty(planned.header.shape, dtype=dtype)) for dtype in dtypes)
    for blocks in zip(*(apart(merge.planned) for merge in merges), strict=True):
        own = [replace(merge, planned=block) for merge, block in zip(merges, blocks, strict=True)]
        for sharing, merged in _merge_each(own, device):
            for point in sharing:
                wholes[point].put(blocks[point], merged)
    while wholes:  # whoever gets one may let go of it
        yield wholes.popleft().merged()


@dataclass(frozen=True)
class _Whole:
    """What becomes of a tensor whose matrices are merged apart."""

    value: Tensor
    facts: list[Mapping[str, TensorFact]] = field(default_factory=list)
    warnings: dict[str, None] = field(default_factory=dict)

    def put(self, block: ComputedTensor, merged: MergedTensor) -> None:
        """One of its matrices, in the order in which they lie."""
        block.fate.view.put(merged.value, self.value)
        self.facts.append(merged.facts)
        self.warnings.update(dict.fromkeys(merged.warnings))

    def merged(self) -> MergedTensor:
        """All of them."""
        return MergedTensor(self.value, joined_facts(self.facts), tuple(self.warnings))


def _as_stored(merge: Computation, merged: Merged, facts: Mapping[str, TensorFact], frame: Frame | None) -> MergedTensor:
    """W0 + M and the tasks' parts as they are written; M is used up."""
    plan, planned = merge.plan, merge.planned
    parts = task_parts(plan, planned, merged)
    shared = shared_vector(planned, merged)
    exact = _add_base(merged.delta, plan.base.read(planned.name), planned, frame)
    value = to_stored(exact, planned, getattr(torch, planned.output_dtype))
    shared |= lost_by_rounding(planned, exact, value) if parts else {}
    given = list(merged.warnings)
    if not math.isfinite(sum_of_squares(value)):
        given += _too_large(plan, planned)
    return MergedTensor(value, facts, tensor_warnings(planned, given), shared, parts)


def _add_base(delta: Tensor, base: Tensor, planned: ComputedTensor, frame: Frame | None) -> Tensor:
    """W0 + M as the method sees it; in the place of M if that is a whole tensor."""
    W0 = planned.fate.view.to_method(base)
    if frame is None:
        return delta.add_(W0.to(delta.device))
    # Leaving the core takes most of the time. The product is exact enough in the output's precision.
    delta = delta.to(torch.float64 if planned.output_dtype == "float64" else torch.float32)
    exact = frame.to_right(frame.to_left(delta))
    return exact.add_(W0.reshape(exact.shape).to(exact.device))


# --- a piece at a time -------------------------------------------------------------------------------------------------


def _merge_each_in_pieces(merges: Sequence[Computation], points: Sequence[int]) -> Iterator[tuple[list[int], MergedTensor]]:
    """These points' merges by pieces, once for all that do the same."""
    same: dict[tuple[Any, ...], list[int]] = {}
    for point in points:
        merge = merges[point]
        same.setdefault((merge.planned.fate.setting, id(merge.statistics)), []).append(point)
    for sharing in same.values():
        yield sharing, _merge_in_pieces(merges[sharing[0]])


def _merge_in_pieces(merge: Computation) -> MergedTensor:
    """The same for an elementwise method, without ever holding the whole tensor's task vectors."""
    plan, planned = merge.plan, merge.planned
    method, options = get_method(planned.fate.method), planned.fate.options
    context = pieces_context(plan, planned, merge.statistics)
    value = torch.empty(planned.header.shape, dtype=getattr(torch, planned.output_dtype))
    found = merge_pieces(
        stored_values(plan, planned), lambda task_vectors: method(task_vectors, options, context).delta, value.view(-1)
    )
    if not all(map(math.isfinite, found.energies)):
        return _nonfinite(plan, planned, torch.device("cpu"))
    if not any(found.energies):
        return _unchanged(plan, planned)
    facts = lengths(planned, found.energies, found.merged_energy)
    given = [] if found.finite else _too_large(plan, planned)
    return MergedTensor(value, facts, tensor_warnings(planned, given))


# --- what is not merged ------------------------------------------------------------------------------------------------


def _untouched(plan: Plan, planned: PlannedTensor) -> MergedTensor:
    """A kept weight must be sound too; what is copied is no weight, and a constant may well be infinite."""
    value = plan.base.read(planned.name).to(getattr(torch, planned.output_dtype))
    warnings: Sequence[str] = ()
    if isinstance(planned.fate, Kept) and not torch.isfinite(value).all():
        bad = nonfinite_values(plan, planned, of_experts=False) or f"the base's value is too large for {planned.output_dtype}"
        warnings = insist(plan, planned, bad)
    return MergedTensor(value, {}, tensor_warnings(planned, warnings))


def _unchanged(plan: Plan, planned: ComputedTensor) -> MergedTensor:
    """Nobody changed it: the base's value, bit for bit."""
    value = planned.fate.view.own(plan.base.read(planned.name))
    return MergedTensor(value.to(getattr(torch, planned.output_dtype)), {"active_experts": 0})


def _nonfinite(plan: Plan, planned: ComputedTensor, device: torch.device) -> MergedTensor:
    """What becomes of a tensor with NaN or infinite values: an error, or by request the mean, which is all that is left to do."""
    if all_equal_base(plan, planned):
        return _unchanged(plan, planned)  # a constant with infinities, such as an attention mask
    warnings = insist(plan, planned, likely_cause(plan, planned), ". It is averaged, not merged")
    base = planned.fate.view.to_method(plan.base.read(planned.name))
    mean = load_dense(plan, planned, device).mean(0).add_(base.to(device))
    value = to_stored(mean, planned, getattr(torch, planned.output_dtype))
    return MergedTensor(value, {}, tensor_warnings(planned, warnings))


def _too_large(plan: Plan, planned: ComputedTensor) -> list[str]:
    return insist(plan, planned, f"the merged value is not finite in {planned.output_dtype}; {likely_cause(plan, planned)}")
