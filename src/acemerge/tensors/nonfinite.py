"""Tensors with NaN or infinite values: which model they come from, and whether that is the end of the merge."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from acemerge.errors import MergeError
from acemerge.planning.plan import Plan
from acemerge.planning.tensor import PlannedTensor
from acemerge.tensors.task_vectors import stored_tensors

REPAIR = "repair or leave out that model"
INSIST = "or pass --allow-nonfinite to insist"


def insist(plan: Plan, planned: PlannedTensor, problem: str, then: str = "") -> list[str]:
    """The problem as a warning that says what is done then, if the recipe allows values that are not finite; or else the end."""
    if plan.recipe.allow_nonfinite:
        return [f"{problem}{then}"]
    raise MergeError(f"tensor '{planned.name}': {problem}, {INSIST}")


def excuse_nonfinite(plan: Plan, planned: PlannedTensor) -> bool:
    """A tensor with NaN or infinite values is not shown to statistics, which it would spoil; or it is the end of the merge."""
    if not all_equal_base(plan, planned):
        insist(plan, planned, likely_cause(plan, planned))
    return False


def all_equal_base(plan: Plan, planned: PlannedTensor) -> bool:
    """Whether nobody changed it; by its bits, which works for infinities too."""
    (_, _, base), *others = stored_tensors(plan, planned)
    return all(base.shape == other.shape and torch.equal(other, base) for _, _, other in others)


def likely_cause(plan: Plan, planned: PlannedTensor) -> str:
    """Which inputs are not finite, or else what to try."""
    return nonfinite_values(plan, planned) or (
        "the inputs are finite, so try other options (a smaller alpha; of ACE a larger epsilon) or --dtype float32"
    )


def nonfinite_values(plan: Plan, planned: PlannedTensor, *, of_experts: bool = True) -> str:
    """Every model with NaN or infinite values in this tensor, and how many; empty if there is none."""
    stored = islice(stored_tensors(plan, planned), None if of_experts else 1)
    counts = [(model, name, count_nonfinite(tensor)) for model, name, tensor in stored]
    found = [f"{model.where} has {count} NaN or infinite values in '{name}'" for model, name, count in counts if count]
    return f"{'; '.join(found)}; {REPAIR}" if found else ""


def count_nonfinite(tensor: Tensor) -> int:
    """How many of its values are NaN or infinite."""
    return int((~torch.isfinite(tensor)).sum())
