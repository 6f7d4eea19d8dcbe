"""Breadcrumbs with TIES: remove the largest changes and the small ones, then elect signs and sum what agrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from acemerge.methods.breadcrumbs import breadcrumbs_of
from acemerge.methods.expert_weights import ExpertWeights, check_count, weight_each
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.ties import elect_and_merge
from acemerge.numerics.thresholds import count_of_share


@dataclass(frozen=True)
class BreadcrumbsTiesOptions(Options):
    """The shares are those of mergekit's own example; by default it removes nothing."""

    keep: Annotated[float, Field(gt=0, le=1, description="share of a tensor's entries kept: the largest after the outliers")] = (
        0.9
    )
    outliers: Annotated[
        float, Field(ge=0, lt=1, description="share of largest entries removed, but never so many that less than `keep` is left")
    ] = 0.01
    merge: Annotated[Literal["mean", "sum"], Field(description="of the agreeing entries: their weighted mean or sum")] = "sum"
    weights: ExpertWeights = "equal"

    def check(self, experts: int) -> None:
        """One weight per expert."""
        check_count(self.weights, experts)


@method(
    "breadcrumbs_ties",
    title="Model Breadcrumbs with TIES",
    paper="Davari and Belilovsky, Model Breadcrumbs, ECCV 2024; with TIES's election as mergekit has it",
    touches="all",
    ordered=True,
    flops=lambda tasks, rows, columns: 40.0 * tasks * rows * columns,
    float64_elements=lambda tasks, rows, columns: (0.5 * tasks + 4.5) * rows * columns,
)
def breadcrumbs_ties(task_vectors: Float[Tensor, "task *shape"], options: BreadcrumbsTiesOptions, context: Context) -> Merged:
    """Remove each task vector's largest entries and its small ones, elect a sign per entry, and sum what agrees with it.

    Shares are of whole tensors. An expert with a negative weight takes part with its change turned around.
    """
    weights = weight_each(options.weights, context.experts, context.tensor)
    n = task_vectors[0].numel()
    kept = count_of_share(n, options.keep)
    removed = min(count_of_share(n, options.outliers), n - kept)
    crumbs = torch.empty_like(task_vectors)
    for task, (task_vector, weight) in enumerate(zip(task_vectors, weights, strict=True)):
        crumb = breadcrumbs_of(task_vector.reshape(1, n), removed, kept).reshape(task_vector.shape)
        crumbs[task] = -crumb if weight < 0 else crumb
    M = elect_and_merge(crumbs, options.merge, majority_sign=1, weights=[abs(weight) for weight in weights])
    if kept > 0 or n == 0:
        return Merged(M)
    return Merged(M, warnings=(f"keep={options.keep:g} of {n} entries in the tensor is less than one: it stays at the base",))
