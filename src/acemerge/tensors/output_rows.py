"""A merged tensor with the rows of the output's vocabulary: the merged ones in their new places, and those of new tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from acemerge.checkpoints.folder import Checkpoint
from acemerge.planning.plan import Plan
from acemerge.planning.rows import OutputRows, TakenRows
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.nonfinite import REPAIR, insist

_AT_ONCE = 4096
"""Rows that are worked on in float64 at a time, so that memory stays small."""


def place_output_rows(plan: Plan, planned: PlannedTensor, rows: OutputRows, merged: Tensor) -> tuple[Tensor, list[str]]:
    """The tensor as it is written, and warnings about rows that are not finite."""
    value = place_rows(rows, merged, lambda taken: _model(plan, taken).read(taken.name))
    warnings = []
    for taken in rows.taken:
        model = _model(plan, taken)
        if bad := int((~torch.isfinite(model.read(taken.name).index_select(rows.axis, taken.rows))).sum()):
            problem = f"{model.where} has {bad} NaN or infinite values in '{taken.name}', in rows of new tokens; {REPAIR}"
            warnings += insist(plan, planned, problem)
    return value, warnings


def _nothing(taken: TakenRows) -> Tensor:
    raise AssertionError(taken.name)


def place_rows(rows: OutputRows, merged: Tensor, read: Callable[[TakenRows], Tensor] = _nothing) -> Tensor:
    """The tensor's rows in their places; `read` gives a model's tensor that rows are taken from, if any are."""
    value = merged.index_select(rows.axis, rows.merged.clamp(min=0))
    seen = value.movedim(rows.axis, 0)
    seen[rows.zero] = 0
    if len(rows.unfounded):
        seen[rows.unfounded] = _mean(merged.movedim(rows.axis, 0)).to(value.dtype)
    tensors = [(taken, read(taken).movedim(rows.axis, 0)) for taken in rows.taken]
    places = torch.unique(torch.cat([taken.to for taken in rows.taken])) if rows.taken else rows.zero[:0]
    for some in places.split(_AT_ONCE):
        total = torch.zeros(len(some), *seen.shape[1:], dtype=torch.float64)
        givers = torch.zeros(len(some), dtype=torch.float64)
        for taken, theirs in tensors:
            chosen = torch.isin(taken.to, some)
            where = torch.searchsorted(some, taken.to[chosen])
            total.index_add_(0, where, theirs.index_select(0, taken.rows[chosen]).double())
            givers.index_add_(0, where, torch.ones(len(where), dtype=torch.float64))
        seen[some] = (total / givers.reshape(-1, *[1] * (total.dim() - 1))).to(value.dtype)
    return value


def _mean(rows: Tensor) -> Tensor:
    total = torch.zeros(rows.shape[1:], dtype=torch.float64)
    for some in rows.split(_AT_ONCE):
        total += some.double().sum(0)
    return total / max(1, len(rows))


def _model(plan: Plan, taken: TakenRows) -> Checkpoint:
    return plan.base if taken.expert is None else plan.experts[taken.expert]
