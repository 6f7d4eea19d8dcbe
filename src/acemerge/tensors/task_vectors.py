"""What a method sees of one tensor, from memory-mapped files: task vectors, and what it may know besides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from acemerge.adapters.change import LoraChange
from acemerge.adapters.stacked import StackedChange
from acemerge.checkpoints.file_vector import FileVector
from acemerge.checkpoints.folder import Checkpoint
from acemerge.methods import Context
from acemerge.numerics.frame import Factors, Frame, to_cores
from acemerge.numerics.pieces import Stored, Vector
from acemerge.planning.fates import Core, ExpertTensor
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import ComputedTensor, PlannedTensor, matrix_shape

_PAGE = 4096


def load_task_vectors(
    plan: Plan, planned: ComputedTensor, device: torch.device
) -> tuple[Float[Tensor, "task *shape"], Frame | None]:
    """What the method sees of every expert, and in which frame: W_t - W0 itself, or, of adapters, its low-rank core."""
    if planned.fate.core is None:
        return load_dense(plan, planned, device), None
    return _load_cores(plan, planned, planned.fate.core, device)


def load_dense(plan: Plan, planned: ComputedTensor, device: torch.device) -> Float[Tensor, "task *shape"]:
    """W_t - W0 of every expert, [task, out, in] for matrices, in float32 (float64 if any input is)."""
    base, view, experts = plan.base.read(planned.name), planned.fate.view, planned.fate.experts
    W0 = view.to_method(base)
    stored = [plan.experts[s.expert].tensors[s.name].dtype for s in experts if s.name]
    wide = base.dtype == torch.float64 or "float64" in stored
    task_vectors = torch.empty((len(experts), *W0.shape), dtype=torch.float64 if wide else torch.float32, device=device)
    for task_vector, source in zip(task_vectors, experts, strict=True):
        expert = plan.experts[source.expert]
        change = (expert.changes or {}).get(source.name) if source.name else None
        if source.name is None:
            task_vector.zero_()
        elif isinstance(change, StackedChange) and view.matrix is not None:
            task_vector.copy_(view.within_matrix.to_method(change.expand_matrix(view.matrix)))
        elif change:
            task_vector.copy_(view.to_method(change.expand(base)))
        else:
            task_vector.copy_(view.to_method(expert_value(plan, source, base)))
            task_vector.sub_(W0.to(device))
    return task_vectors


def expert_value(plan: Plan, source: ExpertTensor, base: Tensor) -> Tensor:
    """A tensor that an expert stores whole, with the rows of tokens in the base's order."""
    assert source.name is not None
    stored = plan.experts[source.expert].read(source.name)
    return source.rows.to_base_order(stored, base) if source.rows else stored


def _load_cores(
    plan: Plan, planned: ComputedTensor, core: Core, device: torch.device
) -> tuple[Float[Tensor, "task p q"], Frame | None]:
    experts: list[Factors | None] = []
    for source in planned.fate.experts:
        change = (plan.experts[source.expert].changes or {})[source.name] if source.name else None
        assert change is None or isinstance(change, LoraChange)
        factors = planned.fate.view.low_rank_to_method(change.factors()) if change else None
        experts.append(factors and Factors(factors.left.to(device), factors.right.to(device)))
    _, rows, columns = matrix_shape(planned)
    frame, cores = to_cores(experts, (rows, columns), core.sides)
    return cores, frame


def tensor_context(plan: Plan, planned: ComputedTensor, frame: Frame | None, statistics: Any = None) -> Context:
    """What a method may know about the tensor beyond its task vectors."""
    view = planned.fate.view
    name = planned.name if view.block is None else f"{planned.name}, block {view.block}"
    base = view.to_method(plan.base.read(planned.name))
    return Context(name, expert_names(plan, planned), base, statistics, frame, view.to_method)


def pieces_context(plan: Plan, planned: ComputedTensor, statistics: Any = None) -> Context:
    """The same for a method that sees pieces of the tensor, which have no shape and no place."""
    return replace(tensor_context(plan, planned, None, statistics), base=None)


def expert_names(plan: Plan, planned: PlannedTensor) -> tuple[str, ...]:
    """Of those that take part."""
    return tuple(plan.experts[source.expert].name for source in planned.experts)


def stored_values(plan: Plan, planned: PlannedTensor) -> Stored:
    """A tensor that the experts store whole, as the files hold it, but for the order of tokens."""
    return Stored(plan.base.vector(planned.name), [_stored_vector(plan, planned, source) for source in planned.experts])


def _stored_vector(plan: Plan, planned: PlannedTensor, source: ExpertTensor) -> Vector | None:
    if source.name is None:
        return None
    if source.rows:
        return expert_value(plan, source, plan.base.read(planned.name)).reshape(-1)
    return plan.experts[source.expert].vector(source.name)


def stored_tensors(plan: Plan, planned: PlannedTensor) -> Iterator[tuple[Checkpoint, str, Tensor]]:
    """Everything that stands for a tensor: the base's value, and each expert's or what its change is made of."""
    for model, name in _sources(plan, planned):
        for stored_name, tensor in model.stored(name):
            yield model, stored_name, tensor


def _sources(plan: Plan, planned: PlannedTensor) -> list[tuple[Checkpoint, str]]:
    return [(plan.base, planned.name), *((plan.experts[s.expert], s.name) for s in planned.experts if s.name)]


def prefetch(plan: Plan, planned: PlannedTensor) -> None:
    """Bring a tensor's pages into the page cache; costs no memory of our own."""
    for model, name in _sources(plan, planned):
        vector = None if model.changes and name in model.changes else model.vector(name)
        if isinstance(vector, FileVector):
            vector.will_be_needed()
            continue
        for tensor in model.mapped(name):
            if tensor.is_contiguous() and tensor.dim():
                tensor.view(torch.uint8).reshape(-1)[::_PAGE].sum()  # one byte of each
