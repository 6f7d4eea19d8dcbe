"""SVC, singular value calibration: a merge whose output directions are shrunk by as much as experts share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.inner import InnerOptions, inner_core_sides, inner_facts, inner_statistics
from acemerge.methods.registry import Context, Merged, method
from acemerge.numerics.linalg import (
    LeadingDirections,
    changed_tasks,
    directions_elements,
    directions_flops,
    leading_directions,
    sum_of_squares,
)

ROUNDING = 1e-6
"""Of an expert's length: what it has less of along a direction is rounding of float32 weights."""


@dataclass(frozen=True)
class SvcOptions(InnerOptions):
    """The floor is the authors' for all methods but TSV-M, after which they set it to 1."""

    outer: ClassVar[str] = "svc"

    floor: Annotated[
        Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["tasks"],
        Field(description="a: no expert's projection counts less, and no direction grows beyond 1 / a; 'tasks': 1 / T"),
    ] = "tasks"


@method(
    "svc",
    title="Singular value calibration",
    paper="SVC, ICML 2026, arXiv 2602.05536",
    statistics=inner_statistics,
    low_rank=inner_core_sides,
    facts=lambda options: {
        "smallest_factor": "what the most shared direction was multiplied by",
        "largest_factor": "what the least shared direction was multiplied by",
        **inner_facts(options),
    },
    flops=lambda tasks, rows, columns: (
        directions_flops(rows, columns, min(rows, columns)) + (2.0 * tasks + 2) * rows * columns * min(rows, columns)
    ),
    float64_elements=lambda tasks, rows, columns: (  # noqa: ARG005
        4.0 * rows * columns + directions_elements(rows, columns, min(rows, columns))
    ),
)
def svc(task_vectors: Float[Tensor, "task out in"], options: SvcOptions, context: Context) -> Merged:
    """A step after another method: directions that experts share are made shorter, neglected ones longer.

    The inner merge is U diag(s) V^T. Where it does p_t times what expert t does in direction u_i, s_i is multiplied by
    T / sum_t max(p_t, a). Only singular values change, and their scale with them.
    """
    inner, inner_options = options.inner_method()
    merged = inner(task_vectors, inner_options, context)
    changed = changed_tasks(task_vectors)
    D = leading_directions(merged.delta.double(), min(merged.delta.shape))
    if not len(D.values):
        return replace(merged, delta=torch.zeros_like(merged.delta))
    a = 1 / len(changed) if options.floor == "tasks" else options.floor
    gamma = calibration(D, [task_vectors[t] for t in changed], a)
    coincide = "singular values of the inner merge coincide: its directions, and so their calibration, are not unique"
    unique = bool((D.values.diff() > ROUNDING * D.values[-1]).all())
    factors = {"smallest_factor": float(gamma.min()), "largest_factor": float(gamma.max())}
    return Merged(
        (D.left * (gamma * D.values)) @ D.right.T,
        {**factors, **merged.facts},
        warnings=merged.warnings if unique else (*merged.warnings, coincide),
    )


def calibration(D: LeadingDirections, task_vectors: Sequence[Float[Tensor, "out in"]], a: float) -> Float[Tensor, " k"]:
    """gamma_i = T / sum_t max(p_it, a), p_it = <u_i^T D, u_i^T tau_t> / |u_i^T tau_t|^2; 0 where tau_t has nothing of u_i."""
    total = torch.zeros_like(D.values)
    for task_vector in task_vectors:
        c = D.left.T @ task_vector.double()
        projections = D.values * (c.T * D.right).sum(0)
        squares = c.square().sum(1)
        has = squares > ROUNDING**2 * sum_of_squares(task_vector)
        total += torch.where(has, projections / squares, 0.0).clamp(min=a)
    return len(task_vectors) / total
