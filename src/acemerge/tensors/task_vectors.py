"""One tensor, from memory-mapped files to its merged value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.adapters.change import LoraChange
from acemerge.checkpoints.folder import Checkpoint
from acemerge.errors import MergeError
from acemerge.methods import Context, Merged, get_method
from acemerge.methods.option_text import Fact
from acemerge.methods.shared_routes import merge_at_points
from acemerge.numerics.frame import Factors, Frame, Sides, low_rank_factors, rounding_energy, standard_frame, to_cores
from acemerge.numerics.linalg import sum_of_squares
from acemerge.numerics.pieces import Stored, merge_pieces
from acemerge.planning.plan import Plan, PlannedTensor

REPAIR = "repair or leave out that model"
INSIST = "or pass --allow-nonfinite to insist"
TensorFact = Fact | list[float]
"""What a report says of a tensor: what its method tells, and norms; `task_norms` in the order of its experts."""
_ANOTHER_EPSILON = (
    "try a smaller alpha or, with ACE, another epsilon: larger where the regulariser's share of the system (ridge_share) is near "
    "0, smaller where it is near 1"
)
_MORE_ROWS = "that is common where inputs are few or much alike; more rows or, with RegMean, a smaller off_diagonal shorten it"
LARGE_MERGE = 3.0  # a merged delta this many times longer than the longest task vector deserves a warning


@dataclass(frozen=True)
class MergedTensor:
    """The value to write, on the CPU, in the output dtype and the stored layout; facts and warnings for the report."""

    value: Tensor
    facts: Mapping[str, TensorFact]
    warnings: tuple[str, ...] = ()
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Of methods with one model per task: each expert's own parts, and what all of them refer to, as they are stored."""


@dataclass(frozen=True)
class TensorMerge:
    """One tensor under one plan. A sweep has many plans, which differ in their method's options alone."""

    plan: Plan
    planned: PlannedTensor
    statistics: Any = None
    """What its method's statistics pass gathered, if it has one."""


def merge_tensor(plan: Plan, planned: PlannedTensor, device: torch.device, statistics: Any = None) -> MergedTensor:
    """Carry out the plan for one tensor; `statistics` is what its method's statistics pass gathered, if it has one."""
    [(_, merged)] = merge_tensor_at_points([TensorMerge(plan, planned, statistics)], device)
    return merged


def merge_tensor_at_points(merges: Sequence[TensorMerge], device: torch.device) -> Iterator[tuple[list[int], MergedTensor]]:
    """Carry out every plan for one tensor, reading it once; each distinct result with the indices of its merges, in any order."""
    plan, planned = merges[0].plan, merges[0].planned
    base = plan.base.read(planned.name)
    dtype = getattr(torch, planned.output_dtype)
    if planned.method is None or planned.options is None:
        yield list(range(len(merges))), _untouched(plan, planned, base.to(dtype))
        return
    in_pieces = [point for point, merge in enumerate(merges) if merge.planned.in_pieces and device.type == "cpu"]
    yield from _merge_each_in_pieces(merges, in_pieces)
    others = [point for point in range(len(merges)) if point not in in_pieces]
    for points, task_vectors, frame, energies in _read_each_core(merges, others, device):
        if not all(map(math.isfinite, energies)):
            yield points, _nonfinite(plan, planned, device)
        elif not any(energies):
            yield points, _unchanged(plan, planned)
        else:
            for sharing, merged, facts in _merge(merges, points, task_vectors, frame, energies):
                yield sharing, _as_stored(merges[sharing[0]], base, merged, facts, frame)


def _as_stored(
    merge: TensorMerge, base: Tensor, merged: Merged, facts: Mapping[str, TensorFact], frame: Frame | None
) -> MergedTensor:
    """W0 + M and the tasks' parts as they are written; M is used up."""
    plan, planned = merge.plan, merge.planned
    parts = _parts(plan, planned, merged)
    shared = _shared_vector(planned, merged)
    exact = _add_base(merged.delta, base, planned, frame)
    value = _to_stored(exact, planned, getattr(torch, planned.output_dtype))
    shared |= _lost_by_rounding(planned, exact, value) if parts else {}
    given = list(merged.warnings)
    if not math.isfinite(sum_of_squares(value)):
        given += _too_large(plan, planned)
    return MergedTensor(value, facts, _warnings(planned, facts, given), shared, parts)


@dataclass(frozen=True)
class MergedFactors:
    """A merged change as the product of two small matrices, in the method's orientation; facts and warnings for the report."""

    factors: Factors
    facts: Mapping[str, TensorFact]
    warnings: tuple[str, ...] = ()


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
    plan, planned = merges[0].plan, merges[0].planned
    for points, task_vectors, frame, energies in _read_each_core(merges, range(len(merges)), device):
        if not all(map(math.isfinite, energies)):
            raise MergeError(f"tensor '{planned.name}': {_likely_cause(plan, planned)}")
        if not any(energies):
            yield points, None
        else:
            for sharing, merged, facts in _merge(merges, points, task_vectors, frame, energies):
                yield sharing, _as_factors(merges[sharing[0]], merged, facts, frame, rank)


def _as_factors(
    merge: TensorMerge, merged: Merged, facts: dict[str, TensorFact], frame: Frame | None, rank: int | None
) -> MergedFactors:
    plan, planned = merge.plan, merge.planned
    energy = sum_of_squares(merged.delta)
    if not math.isfinite(energy):
        raise MergeError(f"tensor '{planned.name}': the merged change is not finite; {_likely_cause(plan, planned)}")
    core = merged.delta.flatten(1).double()
    factors, kept = low_rank_factors(core, frame or standard_frame(core[None]), rank)
    # What a smaller rank leaves out is orthogonal to what it keeps, so the two losses add up.
    lost = (max(0.0, energy - kept) if rank is not None else 0.0) + rounding_energy(factors, getattr(torch, planned.output_dtype))
    if not math.isfinite(lost):
        raise MergeError(f"tensor '{planned.name}': its factors are too large for {planned.output_dtype}; pass --dtype float32")
    error = math.sqrt(lost / energy) if energy else 0.0
    facts |= {"norm": math.sqrt(energy), "rank": factors.left.shape[1], "relative_error": error}
    return MergedFactors(factors, facts, _warnings(planned, facts, merged.warnings))


def _read_each_core(
    merges: Sequence[TensorMerge], points: Iterable[int], device: torch.device
) -> Iterator[tuple[list[int], Tensor, Frame | None, list[float]]]:
    """Task vectors, their frame and their energies, once for all of these points that see them alike, which come first."""
    alike: dict[Sides | None, list[int]] = {}
    for point in points:
        alike.setdefault(merges[point].planned.core, []).append(point)
    for sharing in alike.values():
        first = merges[sharing[0]]
        task_vectors, frame = load_task_vectors(first.plan, first.planned, device)
        yield sharing, task_vectors, frame, [sum_of_squares(task_vector) for task_vector in task_vectors]


def _merge(
    merges: Sequence[TensorMerge], points: Sequence[int], task_vectors: Tensor, frame: Frame | None, energies: list[float]
) -> Iterator[tuple[list[int], Merged, dict[str, TensorFact]]]:
    """The method at work at these points, and what it and the norms tell."""
    chosen = [merges[point] for point in points]
    plan, planned = chosen[0].plan, chosen[0].planned
    assert planned.method is not None
    options = [merge.planned.options for merge in chosen if merge.planned.options is not None]
    contexts = [tensor_context(merge.plan, merge.planned, frame, merge.statistics) for merge in chosen]
    try:
        for found, merged in merge_at_points(get_method(planned.method), task_vectors, options, contexts):
            norms = _norms(energies, sum_of_squares(merged.delta)) if planned.action == "merged" else {}
            facts = {**merged.facts, "task_norms": [math.sqrt(energy) for energy in energies], **norms}
            yield [points[index] for index in found], merged, facts
    except ArithmeticError as error:
        raise MergeError(f"tensor '{planned.name}': {error}; {_likely_cause(plan, planned)}") from None


def _merge_each_in_pieces(merges: Sequence[TensorMerge], points: Sequence[int]) -> Iterator[tuple[list[int], MergedTensor]]:
    """These points' merges by pieces, once for all that do the same."""
    same: dict[tuple[Any, ...], list[int]] = {}
    for point in points:
        merge = merges[point]
        same.setdefault((merge.planned.method, merge.planned.options, id(merge.statistics)), []).append(point)
    for sharing in same.values():
        first = merges[sharing[0]]
        yield sharing, _merge_in_pieces(first.plan, first.planned, first.statistics)


def _merge_in_pieces(plan: Plan, planned: PlannedTensor, statistics: Any) -> MergedTensor:
    """The same for an elementwise method, without ever holding the whole tensor's task vectors."""
    assert planned.method is not None
    assert planned.options is not None
    method, options = get_method(planned.method), planned.options
    context = pieces_context(plan, planned, statistics)
    value = torch.empty(planned.header.shape, dtype=getattr(torch, planned.output_dtype))
    found = merge_pieces(
        stored_values(plan, planned), lambda task_vectors: method(task_vectors, options, context).delta, value.view(-1)
    )
    if not all(map(math.isfinite, found.energies)):
        return _nonfinite(plan, planned, torch.device("cpu"))
    if not any(found.energies):
        return _unchanged(plan, planned)
    facts: dict[str, TensorFact] = {
        "task_norms": [math.sqrt(energy) for energy in found.energies],
        **(_norms(found.energies, found.merged_energy) if planned.action == "merged" else {}),
    }
    given = [] if found.finite else _too_large(plan, planned)
    return MergedTensor(value, facts, _warnings(planned, facts, given))


def stored_values(plan: Plan, planned: PlannedTensor) -> Stored:
    """A tensor that the experts store whole, as the files hold it."""
    experts = [plan.experts[source.expert].read(source.name).reshape(-1) if source.name else None for source in planned.experts]
    return Stored(plan.base.read(planned.name).reshape(-1), experts)


def _unchanged(plan: Plan, planned: PlannedTensor) -> MergedTensor:
    """Nobody changed it: the base's value, bit for bit."""
    return MergedTensor(plan.base.read(planned.name).to(getattr(torch, planned.output_dtype)), {"active_experts": 0})


def _too_large(plan: Plan, planned: PlannedTensor) -> list[str]:
    return _insist(plan, planned, f"the merged value is not finite in {planned.output_dtype}; {_likely_cause(plan, planned)}")


def _untouched(plan: Plan, planned: PlannedTensor, value: Tensor) -> MergedTensor:
    """A kept weight must be sound too; what is copied is no weight, and a constant may well be infinite."""
    warnings: Sequence[str] = ()
    if planned.action == "kept" and not torch.isfinite(value).all():
        bad = nonfinite_values(plan, planned, of_experts=False) or f"the base's value is too large for {planned.output_dtype}"
        warnings = _insist(plan, planned, bad)
    return MergedTensor(value, {}, _warnings(planned, {}, warnings))


def _nonfinite(plan: Plan, planned: PlannedTensor, device: torch.device) -> MergedTensor:
    """What becomes of a tensor with NaN or infinite values: an error, or by request the mean, which is all that is left to do."""
    base, dtype = plan.base.read(planned.name), getattr(torch, planned.output_dtype)
    if _all_equal_base(plan, planned):
        return _unchanged(plan, planned)  # a constant with infinities, such as an attention mask
    warnings = _insist(plan, planned, _likely_cause(plan, planned), ". It is averaged, not merged")
    mean = _load_dense(plan, planned, device).mean(0).add_(_to_method(base, planned.transposed).to(device))
    return MergedTensor(_to_stored(mean, planned, dtype), {}, _warnings(planned, {}, warnings))


def _insist(plan: Plan, planned: PlannedTensor, problem: str, then: str = "") -> list[str]:
    """The problem as a warning that says what is done then, if the recipe allows values that are not finite; or else the end."""
    if plan.recipe.allow_nonfinite:
        return [f"{problem}{then}"]
    raise MergeError(f"tensor '{planned.name}': {problem}, {INSIST}")


def excuse_nonfinite(plan: Plan, planned: PlannedTensor) -> bool:
    """A tensor with NaN or infinite values is not shown to statistics, which it would spoil; or it is the end of the merge."""
    if not _all_equal_base(plan, planned):
        _insist(plan, planned, _likely_cause(plan, planned))
    return False


def tensor_context(plan: Plan, planned: PlannedTensor, frame: Frame | None, statistics: Any = None) -> Context:
    """What a method may know about the tensor beyond its task vectors."""
    base = _to_method(plan.base.read(planned.name), planned.transposed)
    return Context(planned.name, _expert_names(plan, planned), base, statistics, frame, planned.transposed)


def _expert_names(plan: Plan, planned: PlannedTensor) -> tuple[str, ...]:
    return tuple(plan.experts[source.expert].name for source in planned.experts)


def pieces_context(plan: Plan, planned: PlannedTensor, statistics: Any = None) -> Context:
    """The same for a method that sees pieces of the tensor, which have no shape and no place."""
    return replace(tensor_context(plan, planned, None, statistics), base=None)


def load_task_vectors(
    plan: Plan, planned: PlannedTensor, device: torch.device
) -> tuple[Float[Tensor, "task *shape"], Frame | None]:
    """What the method sees of every expert, and in which frame: W_t - W0 itself, or, of adapters, its low-rank core."""
    if planned.core is None:
        return _load_dense(plan, planned, device), None
    experts: list[Factors | None] = []
    for source in planned.experts:
        change = (plan.experts[source.expert].changes or {})[source.name] if source.name else None
        assert change is None or isinstance(change, LoraChange)
        factors = change.factors(change.stored_in_out != planned.transposed) if change else None
        experts.append(factors and Factors(factors.left.to(device), factors.right.to(device)))
    _, rows, columns = planned.matrix_shape
    frame, cores = to_cores(experts, (rows, columns), planned.core)
    return cores, frame


def _load_dense(plan: Plan, planned: PlannedTensor, device: torch.device) -> Float[Tensor, "task *shape"]:
    """W_t - W0 of every expert, [task, out, in] for matrices, in float32 (float64 if any input is)."""
    base = plan.base.read(planned.name)
    stored = [plan.experts[s.expert].tensors[s.name].dtype for s in planned.experts if s.name]
    wide = base.dtype == torch.float64 or "float64" in stored
    shape = _to_method(base, planned.transposed).shape
    task_vectors = torch.empty((len(planned.experts), *shape), dtype=torch.float64 if wide else torch.float32, device=device)
    for task_vector, source in zip(task_vectors, planned.experts, strict=True):
        expert = plan.experts[source.expert]
        change = (expert.changes or {}).get(source.name) if source.name else None
        if source.name is None:
            task_vector.zero_()
        elif change:
            task_vector.copy_(_to_method(change.expand(base), planned.transposed))
        else:
            task_vector.copy_(_to_method(expert.read(source.name), planned.transposed))
            task_vector.sub_(_to_method(base, planned.transposed).to(device))
    return task_vectors


def _add_base(delta: Tensor, base: Tensor, planned: PlannedTensor, frame: Frame | None) -> Tensor:
    """W0 + M as the method sees it; in the place of M if that is a whole tensor."""
    W0 = _to_method(base, planned.transposed)
    if frame is None:
        return delta.add_(W0.to(delta.device))
    # Leaving the core takes most of the time. The product is exact enough in the output's precision.
    delta = delta.to(torch.float64 if planned.output_dtype == "float64" else torch.float32)
    exact = frame.to_right(frame.to_left(delta))
    return exact.add_(W0.reshape(exact.shape).to(exact.device))


def prefetch(plan: Plan, planned: PlannedTensor) -> None:
    """Bring a tensor's pages into the page cache by touching one byte of each; costs no memory of our own."""
    page = 4096
    for _, _, tensor in _stored(plan, planned):
        if tensor.is_contiguous() and tensor.dim():
            tensor.view(torch.uint8).reshape(-1)[::page].sum()


def _stored(plan: Plan, planned: PlannedTensor) -> Iterator[tuple[Checkpoint, str, Tensor]]:
    """Everything the files hold for a tensor: the base's value, and each expert's or what its change is made of."""
    sources = [(plan.experts[s.expert], s.name) for s in planned.experts if s.name]
    for model, name in [(plan.base, planned.name), *sources]:
        for stored_name, tensor in model.stored(name):
            yield model, stored_name, tensor


def _all_equal_base(plan: Plan, planned: PlannedTensor) -> bool:
    (_, _, base), *others = _stored(plan, planned)
    return all(base.shape == other.shape and torch.equal(other, base) for _, _, other in others)


def _to_method(stored: Tensor, transposed: bool) -> Tensor:
    return stored.T if transposed else stored


def _to_stored(merged: Tensor, planned: PlannedTensor, dtype: torch.dtype) -> Tensor:
    return _to_method(merged, planned.transposed).to("cpu", dtype).reshape(planned.header.shape).contiguous()


def _parts(plan: Plan, planned: PlannedTensor, merged: Merged) -> dict[str, dict[str, Tensor]]:
    """What is each expert's own, by its name; an expert that has nothing of its own is left out."""
    names = _expert_names(plan, planned)
    stored = {expert: _stored_parts(own, planned) for expert, own in zip(names, merged.parts, strict=bool(merged.parts))}
    return {expert: own for expert, own in stored.items() if own}


def _parts_dtype(planned: PlannedTensor) -> torch.dtype:
    """Half precision would lose the small numbers that parts are made of."""
    return torch.float64 if planned.output_dtype == "float64" else torch.float32


def _shared_vector(planned: PlannedTensor, merged: Merged) -> dict[str, Tensor]:
    """The vector that masks refer to; a copy, because the merged task vector may be the same memory."""
    if merged.shared is None:
        return {}
    return {"vector": _to_stored(merged.shared, planned, _parts_dtype(planned)).clone()}


def _lost_by_rounding(planned: PlannedTensor, exact: Tensor, value: Tensor) -> dict[str, Tensor]:
    """What a half-precision output lost of the shared model.

    A task's model is made from the shared one. Rounded twice it would carry noise as large as a small change of weights;
    these 8 further bits per entry leave the one rounding that its dtype needs.
    """
    if planned.output_dtype not in ("float16", "bfloat16"):
        return {}
    return {"lost": (_to_stored(exact, planned, exact.dtype) - value).to(torch.bfloat16)}


def _stored_parts(parts: Mapping[str, Tensor], planned: PlannedTensor) -> dict[str, Tensor]:
    """One expert's parts of one tensor as they are written: in the stored layout, masks as packed bits."""
    dtype = _parts_dtype(planned)
    stored: dict[str, Tensor] = {}
    if "left" in parts:
        left, right = (parts["right"].T, parts["left"].T) if planned.transposed else (parts["left"], parts["right"])
        stored |= {"left": left.to("cpu", dtype).contiguous(), "right": right.to("cpu", dtype).contiguous()}
    if "delta" in parts:
        stored["delta"] = _to_stored(parts["delta"], planned, dtype)
    if "mask" in parts:
        mask = _to_stored(parts["mask"], planned, torch.bool)
        stored["mask"] = torch.from_numpy(np.packbits(mask.numpy()))
        stored["scale"] = parts["scale"].to("cpu", torch.float64)
    return stored


def _norms(energies: list[float], merged_energy: float) -> dict[str, TensorFact]:
    norm, largest = math.sqrt(merged_energy), math.sqrt(max(energies))
    return {"norm": norm, "largest_task_norm": largest, "norm_ratio": norm / largest}


def _warnings(planned: PlannedTensor, facts: Mapping[str, TensorFact], given: Sequence[str]) -> tuple[str, ...]:
    found = list(given)
    ratio = facts.get("norm_ratio", 0.0)
    if isinstance(ratio, float) and ratio > LARGE_MERGE:
        advice = _MORE_ROWS if planned.method and get_method(planned.method).uses == "data" else _ANOTHER_EPSILON
        found.append(f"the merged change is {ratio:.1f}x the largest task vector; {advice}")
    return tuple(f"tensor '{planned.name}': {warning}" for warning in found)


def _likely_cause(plan: Plan, planned: PlannedTensor) -> str:
    """Which inputs are not finite, or else what to try."""
    return nonfinite_values(plan, planned) or (
        "the inputs are finite, so try other options (a larger epsilon, a smaller alpha) or --dtype float32"
    )


def nonfinite_values(plan: Plan, planned: PlannedTensor, *, of_experts: bool = True) -> str:
    """Every model with NaN or infinite values in this tensor, and how many; empty if there is none."""
    stored = islice(_stored(plan, planned), None if of_experts else 1)
    counts = [(model, name, count_nonfinite(tensor)) for model, name, tensor in stored]
    found = [f"{model.where} has {count} NaN or infinite values in '{name}'" for model, name, count in counts if count]
    return f"{'; '.join(found)}; {REPAIR}" if found else ""


def count_nonfinite(tensor: Tensor) -> int:
    """How many of its values are NaN or infinite."""
    return int((~torch.isfinite(tensor)).sum())
