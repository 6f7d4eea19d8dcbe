"""Breadcrumbs with TIES: remove the largest changes and the small ones, then elect signs and sum what agrees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import BeforeValidator, Field
from torch import Tensor

from acemerge.methods.breadcrumbs import breadcrumbs_of, nothing_kept
from acemerge.methods.expert_weights import ExpertWeights, check_count, check_each, each_expert, split_list, weight_each
from acemerge.methods.registry import Context, Merged, Options, method
from acemerge.methods.ties import Share, elect_and_merge
from acemerge.numerics.thresholds import count_of_share


@dataclass(frozen=True)
class BreadcrumbsTiesOptions(Options):
    """The shares are those of mergekit's own example; by default it removes nothing."""

    keep: Annotated[
        Share | tuple[Share, ...],
        BeforeValidator(split_list),
        Field(description="share of a tensor's entries kept: the largest after the outliers; one for all experts, or one each"),
    ] = 0.9
    outliers: Annotated[
        float, Field(ge=0, lt=1, description="share of largest entries removed, but never so many that less than `keep` is left")
    ] = 0.01
    merge: Annotated[Literal["mean", "sum"], Field(description="of the agreeing entries: their weighted mean or sum")] = "sum"
    weights: ExpertWeights = "equal"

    def check(self, experts: int) -> None:
        """One number per expert."""
        check_each("keep", self.keep, experts)
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
    shares = each_expert(options.keep, len(task_vectors))
    crumbs = torch.empty_like(task_vectors)
    for crumb, task_vector, share in zip(crumbs, task_vectors, shares, strict=True):
        kept = count_of_share(n, share)
        removed = min(count_of_share(n, options.outliers), n - kept)
        crumb.copy_(breadcrumbs_of(task_vector.reshape(1, n), removed, kept).reshape(task_vector.shape))
    M = elect_and_merge(crumbs, options.merge, majority_sign=1, weights=weights)
    return Merged(M, warnings=nothing_kept(shares, n))
