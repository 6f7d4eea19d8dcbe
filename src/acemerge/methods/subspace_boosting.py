"""Subspace boosting: the small singular values of a merge raised to a larger one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.inner import InnerOptions, inner_core_sides, inner_facts, inner_statistics
from acemerge.methods.registry import Context, Merged, method
from acemerge.numerics.linalg import directions_elements, directions_flops, leading_count, leading_directions


@dataclass(frozen=True)
class SubspaceBoostingOptions(InnerOptions):
    """The share is that of a public implementation; the authors choose it, and the scale, on validation data."""

    outer: ClassVar[str] = "subspace_boosting"

    share: Annotated[
        float, Field(ge=0, le=1, description="beta: the leading singular values with this share of their sum are not raised")
    ] = 0.01


@method(
    "subspace_boosting",
    title="Subspace boosting",
    paper="Skorobogat et al., Subspace-boosted model merging, arXiv 2506.16506, 2025",
    statistics=inner_statistics,
    low_rank=inner_core_sides,
    facts=lambda options: {
        "singular_value": "the one that all smaller ones were raised to",
        "longer": "how many times as long the merge became",
        **inner_facts(options),
    },
    flops=lambda tasks, rows, columns: (
        directions_flops(rows, columns, min(rows, columns)) + 2.0 * rows * columns * (tasks + min(rows, columns))
    ),
    float64_elements=lambda tasks, rows, columns: (  # noqa: ARG005
        3.0 * rows * columns + directions_elements(rows, columns, min(rows, columns))
    ),
)
def subspace_boosting(task_vectors: Float[Tensor, "task out in"], options: SubspaceBoostingOptions, context: Context) -> Merged:
    """A step after another method: small singular values of the merge are raised to one of its leading ones.

    Merges of many experts are dominated by what the experts share; the weak directions hold what is each one's own. Makes the
    change longer, so mind alpha. Directions that the merge does not have get nothing.
    """
    inner, inner_options = options.inner_method()
    merged = inner(task_vectors, inner_options, context)
    D = leading_directions(merged.delta.double(), min(merged.delta.shape))
    if not len(D.values):
        return replace(merged, delta=torch.zeros_like(merged.delta))
    level = float(D.values[-leading_count(D.values, options.share)])
    raised = D.values.clamp(min=level)
    facts = {"singular_value": level, "longer": float(raised.norm() / D.values.norm()), **merged.facts}
    return replace(merged, delta=(D.left * raised) @ D.right.T, facts=facts)
